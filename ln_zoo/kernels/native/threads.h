// Threads, which torch's OpenMP runtime lends, and their floating-point mode.

#pragma once

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

int64_t threads_for(int64_t wanted, int64_t pieces) {
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  return std::max<int64_t>(1, std::min(wanted, pieces));
#else
  (void)wanted, (void)pieces;
  return 1;
#endif
}

// Flush subnormal numbers (float32: below 1.2e-38) to 0 in this thread; restores the previous mode.
//
// Vanishing gradients become subnormal, and Intel's processors then need over a hundred cycles per
// operation: without this, a training step over 784 time steps took seven times as long. No update
// could use the lost values. No threads may start in this scope: they would inherit the mode.
class FlushSubnormals {
#if defined(__SSE2__)
  static constexpr unsigned BITS = 0x8040;  // of MXCSR: FTZ for results, DAZ for operands
  const unsigned before_ = _mm_getcsr();

 public:
  FlushSubnormals() { _mm_setcsr(before_ | BITS); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  static constexpr uint64_t BITS = 1 << 24;  // of FPCR: FZ
  const uint64_t before_ = read();
  static uint64_t read() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }

 public:
  FlushSubnormals() { write(before_ | BITS); }
  ~FlushSubnormals() { write(before_); }
#else
 public:
  FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
};

template <class Body>
void in_parallel(int64_t threads, Body body) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(int(threads))
    {
      const FlushSubnormals flush;
      // The runtime may provide fewer threads than requested.
      const int64_t got = omp_get_num_threads();
      for (int64_t i = omp_get_thread_num(); i < threads; i += got) body(i);
    }
    return;
  }
#endif
  const FlushSubnormals flush;
  for (int64_t i = 0; i < threads; i++) body(i);
}

}  // namespace
