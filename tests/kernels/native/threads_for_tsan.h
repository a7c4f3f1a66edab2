// OpenMP's parallel regions on C++ threads, which ThreadSanitizer understands: libgomp is not
// instrumented, and its barriers would look like races. Included first by
// -include, see tests/kernels/native/test_flags.py.

#include <thread>
#include <vector>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))
HIDDEN int omp_get_thread_num() noexcept;
HIDDEN int omp_get_num_threads() noexcept;
HIDDEN int omp_in_parallel() noexcept;

namespace tsan {
inline thread_local int number = 0, team = 1;
}

int omp_get_thread_num() noexcept { return tsan::number; }
int omp_get_num_threads() noexcept { return tsan::team; }
int omp_in_parallel() noexcept { return tsan::team > 1; }

HIDDEN void GOMP_parallel(void (*body)(void*), void* data, unsigned count, unsigned) {
  const auto run = [=](int number) {
    tsan::number = number;
    tsan::team = int(count);
    body(data);
    tsan::number = 0;
    tsan::team = 1;
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < count; i++) others.emplace_back(run, int(i));
  run(0);
  for (auto& other : others) other.join();
}
