// SIMD vectors, and elementary functions of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(LN_ZOO_LANES)
#define LANES LN_ZOO_LANES  // for tests: wider vectors than the processor has
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

// Vectors

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int32_t unaligned_ivec __attribute__((vector_size(4 * LANES), aligned(4)));
constexpr int64_t L = LANES;

inline vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
inline void store(float* p, vec a) { *reinterpret_cast<unaligned_vec*>(p) = a; }
// Broadcast. Not `vec{} + a`: compilers would keep the addition, since -0 + 0 is not -0.
inline vec all(float a) {
#if defined(__AVX512F__)
  return (vec)_mm512_set1_ps(a);
#elif defined(__AVX__)
  return (vec)_mm256_set1_ps(a);
#else
  return a - vec{};
#endif
}

// Prefetch the same place of the next row.
inline void ahead(const float* p, int64_t row) { __builtin_prefetch(p + row); }

// Shuffle two vectors; lanes of the second have indices from LANES on. Clang lacks
// __builtin_shuffle, GCC before 12 lacks __builtin_shufflevector.
#if defined(__clang__) || __GNUC__ >= 12
#define LN_ZOO_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LN_ZOO_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif

// The upper or lower of two rows at distance D after exchanging blocks of D lanes.
template <int D, bool LOWER, int... I>
inline vec exchanged(vec upper, vec lower, std::integer_sequence<int, I...>) {
  if (LOWER) return LN_ZOO_SHUFFLE(upper, lower, ((I & D) ? LANES + I : I + D)...);
  return LN_ZOO_SHUFFLE(upper, lower, ((I & D) ? LANES + I - D : I)...);
}

// Transpose L rows of L elements.
template <int D = 1>
inline void transpose(vec* rows) {
  const auto lanes = std::make_integer_sequence<int, LANES>();
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    if (i & D) continue;
    const vec upper = rows[i], lower = rows[i + D];
    rows[i] = exchanged<D, false>(upper, lower, lanes);
    rows[i + D] = exchanged<D, true>(upper, lower, lanes);
  }
  if constexpr (2 * D < LANES) transpose<2 * D>(rows);
}

inline float total(vec a) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)a);
#else
  // Tree reduction, to avoid a chain of dependent additions.
  for (int64_t half = L / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; i++) a[i] += a[i + half];
  }
  return a[0];
#endif
}

// A block of L units, and the last, partial block of a row, whose lanes past the end read zero.
struct Whole {
  vec read(const float* p) const { return load(p); }
  void write(float* p, vec a) const { store(p, a); }
  vec keep(vec a) const { return a; }
};

// AddressSanitizer does not check masked loads and stores.
#if defined(__SANITIZE_ADDRESS__)
#define LN_ZOO_MASKED 0
#elif defined(__has_feature)
#define LN_ZOO_MASKED !__has_feature(address_sanitizer)
#else
#define LN_ZOO_MASKED 1
#endif

#if defined(__AVX512F__) && LN_ZOO_MASKED
struct Rest {
  __mmask16 mask;
  explicit Rest(int64_t n) : mask(__mmask16((1u << n) - 1)) {}
  vec read(const float* p) const { return (vec)_mm512_maskz_loadu_ps(mask, p); }
  void write(float* p, vec a) const { _mm512_mask_storeu_ps(p, mask, (__m512)a); }
  vec keep(vec a) const { return (vec)_mm512_maskz_mov_ps(mask, (__m512)a); }
};
#else
struct Rest {
  int64_t n;
  explicit Rest(int64_t n) : n(n) {}
  vec read(const float* p) const {
    vec a{};
    for (int64_t i = 0; i < n; i++) a[i] = p[i];
    return a;
  }
  void write(float* p, vec a) const {
    for (int64_t i = 0; i < n; i++) p[i] = a[i];
  }
  vec keep(vec a) const {
    for (int64_t i = n; i < L; i++) a[i] = 0;
    return a;
  }
};
#endif

// Flags as integers, of L units or of the n remaining.
inline ivec flags(const bool* p, int64_t n) {
  typedef int8_t bytes __attribute__((vector_size(LANES)));
  bytes found{};
  if (n >= L)
    std::memcpy(&found, p, L);
  else
    std::memcpy(&found, p, n);
  return __builtin_convertvector(found, ivec);
}

template <class Body>
inline void for_units(int64_t n, Body body) {
  int64_t j = 0;
  for (; j + L <= n; j += L) body(j, Whole{});
  if (j < n) body(j, Rest(n - j));
}

inline bool all_zero(const float* p, int64_t n) {
  ivec bits{};
  for_units(n, [&](int64_t j, auto block) { bits |= (ivec)block.read(p + j) << 1; });
  int32_t found = 0;
  for (int64_t i = 0; i < L; i++) found |= bits[i];
  return !found;
}

inline float sum_of_squares(const float* p, int64_t n) {
  vec a{}, b{}, c{}, d{};
  int64_t j = 0;
  for (; j + 4 * L <= n; j += 4 * L) {
    vec x = load(p + j), y = load(p + j + L), z = load(p + j + 2 * L), w = load(p + j + 3 * L);
    a += x * x;
    b += y * y;
    c += z * z;
    d += w * w;
  }
  for_units(n - j, [&](int64_t i, auto block) {
    vec x = block.read(p + j + i);
    a += x * x;
  });
  return total((a + b) + (c + d));
}

// x limited to [-most, most]; NaN stays NaN.
inline vec clamped(vec x, float most) {
#ifdef __AVX512F__
  const __m512 above = _mm512_max_ps(_mm512_set1_ps(-most), (__m512)x);
  return (vec)_mm512_min_ps(_mm512_set1_ps(most), above);
#else
  x = x > all(most) ? all(most) : x;
  return x < all(-most) ? all(-most) : x;
#endif
}

// e^x = scale (1 + excess) for |x| <= 87: x = n log 2 + f with |f| <= log(2) / 2, scale = 2^n, and
// excess = e^f - 1, by a polynomial of degree 6 whose error is below 0.1 units in the last place.
struct Power {
  vec scale, excess;
  explicit Power(vec x) {
    const vec shift = all(12582912.0f);  // adding 1.5 * 2^23 rounds; the low bits are then n
    const vec shifted = x * 1.44269504f + shift, n = shifted - shift;
    vec f = x - n * 0.693359375f;  // log 2 in two parts; the first is exact in few bits
    f = f - n * -2.12194440e-4f;
    vec p = all(1.38145394e-3f);
    p = p * f + 8.36874545e-3f;
    p = p * f + 4.16683890e-2f;
    p = p * f + 1.66665211e-1f;
    p = p * f + 4.99999940e-1f;
    p = p * f + 1.0f;
    scale = (vec)(((ivec)shifted << 23) + 0x3f800000);
    excess = p * f;
  }
};

// e^x for |x| <= 87, beyond that its value there; NaN stays NaN.
inline vec exponential(vec x) {
  const Power power(clamped(x, 87.0f));
  return power.scale * (1.0f + power.excess);
}

// 1 / x for 1 <= x < 2^126, to one unit in the last place: a quarter of a division's time.
inline vec reciprocal(vec x) {
#ifdef __AVX512F__
  const vec near = (vec)_mm512_rcp14_ps((__m512)x);
  return near + near * (1.0f - x * near);
#else
  return 1.0f / x;
#endif
}

// a / b for 1 <= b < 2^126, in the same way.
inline vec quotient(vec a, vec b) {
#ifdef __AVX512F__
  const vec near = (vec)_mm512_rcp14_ps((__m512)b), found = a * near;
  return found + near * (a - found * b);
#else
  return a / b;
#endif
}

// 0 below -87, so that a closed gate times infinity is NaN, as in torch.
inline vec sigmoid(vec x) {
  const vec open = reciprocal(1.0f + exponential(-x));
  return x < all(-87.0f) ? vec{} : open;
}

// (e^2x - 1) / (e^2x + 1), which is 1 from |x| = 9 on; e^2x - 1 is exact to rounding for small x.
inline vec hyperbolic_tangent(vec x) {
  const Power power(clamped(2.0f * x, 18.0f));
  const vec a = power.scale * power.excess + (power.scale - 1.0f);
  return quotient(a, a + 2.0f);
}

}  // namespace
