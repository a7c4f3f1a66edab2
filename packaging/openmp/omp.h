// The functions of OpenMP that the kernels call, for compilers without the header. torch brings the runtime.

#pragma once

#ifdef __cplusplus
extern "C" {
#endif

int omp_get_num_threads(void);
int omp_get_thread_num(void);
int omp_in_parallel(void);

#ifdef __cplusplus
}
#endif
