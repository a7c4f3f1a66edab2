// Elementary functions of generated kernels, for vectors and for single numbers, with the infinities
// and NaN of torch. Subnormal results are zero.

#pragma once

#include "../native/vectors.h"

namespace {

// Conditions

inline vec chosen(ivec c, vec a, vec b) { return c ? a : b; }
inline float chosen(bool c, float a, float b) { return c ? a : b; }
inline ivec negated(ivec c) { return ~c; }
inline bool negated(bool c) { return !c; }
inline ivec all_flags(bool c) { return ivec{} - int32_t(c); }

inline ivec flags_of(Whole, const bool* p) { return flags(p, L) != 0; }
inline ivec flags_of(Rest rest, const bool* p) {
#if defined(__AVX512F__) && LN_ZOO_MASKED
  return flags(p, __builtin_popcount(rest.mask)) != 0;
#else
  return flags(p, rest.n) != 0;
#endif
}

// Vectors with another value in the lanes past the end.
inline vec only(Whole, vec a, float) { return a; }
inline vec only(Rest rest, vec a, float other) {
  const ivec inside = (ivec)rest.keep((vec)all_flags(true));
  return inside ? a : all(other);
}

// Functions

inline vec of_abs(vec a) { return (vec)((ivec)a & 0x7fffffff); }
inline vec of_maximum(vec a, vec b) { return ((a > b) | (a != a)) ? a : b; }
inline vec of_minimum(vec a, vec b) { return ((a < b) | (a != a)) ? a : b; }
inline vec of_relu(vec a) { return a <= vec{} ? vec{} : a; }
inline vec of_sign(vec a) {
  const vec zero{};
  return a > zero ? all(1.0f) : a < zero ? all(-1.0f) : a;
}
inline vec of_reciprocal(vec a) { return 1.0f / a; }
inline vec of_tanh(vec a) { return hyperbolic_tangent(a); }
inline vec of_sigmoid(vec a) { return sigmoid(a); }

inline vec of_sqrt(vec a) {
#if defined(__AVX512F__)
  return (vec)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX__)
  return (vec)_mm256_sqrt_ps((__m256)a);
#else
  for (int64_t i = 0; i < L; i++) a[i] = std::sqrt(a[i]);
  return a;
#endif
}
inline vec of_rsqrt(vec a) { return 1.0f / of_sqrt(a); }

// Arguments beyond which e^x is infinite or below the normal numbers.
constexpr float MOST = 88.72283f, LEAST = -87.0f;

inline vec of_exp(vec x) {
  const vec inside = x > all(MOST) ? all(MOST) : x < all(LEAST) ? all(LEAST) : x;
  const Power power(inside);
  // 2^128 is no float32: half of the scale, twice.
  const vec half = (vec)((ivec)power.scale - 0x00800000);
  const vec found = half * (1.0f + power.excess) * 2.0f;
  return x > all(MOST) ? all(INFINITY) : x < all(LEAST) ? vec{} : found;
}

inline vec of_expm1(vec x) {
  const vec inside = x > all(MOST) ? all(MOST) : x < all(-30.0f) ? all(-30.0f) : x;
  const Power power(inside);
  const vec half = (vec)((ivec)power.scale - 0x00800000);
  const vec found = (half * power.excess + (half - 0.5f)) * 2.0f;
  return x > all(MOST) ? all(INFINITY) : found;
}

// log(2^n (1 + m)) for 1 + m in [sqrt 1/2, sqrt 2) (Cephes).
inline vec log_of_parts(ivec n, vec m) {
  vec p = all(7.0376836292e-2f);
  p = p * m + -1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m + -1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m + -1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m + -2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const vec square = m * m, e = __builtin_convertvector(n, vec);
  return m + (m * square * p + e * -2.12194440e-4f - 0.5f * square) + e * 0.693359375f;
}

// `found`, or the logarithm of an x without one: zero, subnormal, negative, infinite or NaN.
inline vec log_or_limit(vec x, vec found) {
  const vec small = x < vec{} ? all(NAN) : all(-INFINITY);
  const vec large = x < all(INFINITY) ? found : x;
  return x < all(1.17549435e-38f) ? small : large;
}

// x = 2^n (1 + m).
inline ivec log_n(vec x) { return ((ivec)x - 0x3f3504f3) >> 23; }
inline vec log_m(vec x, ivec n) { return (vec)((ivec)x - (n << 23)) - 1.0f; }

inline vec of_log(vec x) {
  const ivec n = log_n(x);
  return log_or_limit(x, log_of_parts(n, log_m(x, n)));
}

// log(1 + x): the rounding of 1 + x does not enter m = 2^-n x + (2^-n - 1).
inline vec of_log1p(vec x) {
  const vec u = 1.0f + x;
  const ivec n = log_n(u);
  const vec scale = (vec)(0x3f800000 - (n << 23)), m = x * scale + (scale - 1.0f);
  return log_or_limit(u, log_of_parts(n, x < all(0x1p25f) ? m : log_m(u, n)));
}

template <class Function>
inline vec each(vec a, Function function) {
  for (int64_t i = 0; i < L; i++) a[i] = function(a[i]);
  return a;
}
inline vec of_erf(vec a) {
  return each(a, [](float x) { return std::erf(x); });
}
inline vec of_sin(vec a) {
  return each(a, [](float x) { return std::sin(x); });
}
inline vec of_cos(vec a) {
  return each(a, [](float x) { return std::cos(x); });
}
inline vec of_pow(vec a, vec b) {
  for (int64_t i = 0; i < L; i++) a[i] = std::pow(a[i], b[i]);
  return a;
}

inline float of_abs(float a) { return std::fabs(a); }
inline float of_maximum(float a, float b) { return a > b || a != a ? a : b; }
inline float of_minimum(float a, float b) { return a < b || a != a ? a : b; }
inline float of_relu(float a) { return a <= 0.0f ? 0.0f : a; }
inline float of_sign(float a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a; }
inline float of_reciprocal(float a) { return 1.0f / a; }
inline float of_tanh(float a) { return std::tanh(a); }
inline float of_sigmoid(float a) { return 1.0f / (1.0f + std::exp(-a)); }
inline float of_sqrt(float a) { return std::sqrt(a); }
inline float of_rsqrt(float a) { return 1.0f / std::sqrt(a); }
inline float of_exp(float a) { return std::exp(a); }
inline float of_expm1(float a) { return std::expm1(a); }
inline float of_log(float a) { return std::log(a); }
inline float of_log1p(float a) { return std::log1p(a); }
inline float of_erf(float a) { return std::erf(a); }
inline float of_sin(float a) { return std::sin(a); }
inline float of_cos(float a) { return std::cos(a); }
inline float of_pow(float a, float b) { return std::pow(a, b); }

inline vec of_atan(vec a) {
  return each(a, [](float x) { return std::atan(x); });
}
inline float of_atan(float a) { return std::atan(a); }
inline vec of_tan(vec a) {
  return each(a, [](float x) { return std::tan(x); });
}
inline float of_tan(float a) { return std::tan(a); }
inline vec of_sinh(vec a) {
  return each(a, [](float x) { return std::sinh(x); });
}
inline float of_sinh(float a) { return std::sinh(a); }
inline vec of_cosh(vec a) {
  return each(a, [](float x) { return std::cosh(x); });
}
inline float of_cosh(float a) { return std::cosh(a); }
inline vec of_exp2(vec a) {
  return each(a, [](float x) { return std::exp2(x); });
}
inline float of_exp2(float a) { return std::exp2(a); }
inline vec of_log2(vec a) {
  return each(a, [](float x) { return std::log2(x); });
}
inline float of_log2(float a) { return std::log2(a); }
inline vec of_floor(vec a) {
  return each(a, [](float x) { return std::floor(x); });
}
inline float of_floor(float a) { return std::floor(a); }
inline vec of_ceil(vec a) {
  return each(a, [](float x) { return std::ceil(x); });
}
inline float of_ceil(float a) { return std::ceil(a); }
inline vec of_trunc(vec a) {
  return each(a, [](float x) { return std::trunc(x); });
}
inline float of_trunc(float a) { return std::trunc(a); }
inline vec of_round(vec a) {
  return each(a, [](float x) { return std::nearbyint(x); });
}
inline float of_round(float a) { return std::nearbyint(a); }

// Rows

inline float largest(vec a) {
  float found = a[0];
  for (int64_t i = 1; i < L; i++) found = of_maximum(found, float(a[i]));
  return found;
}

// Sums of all elements up to each, after `before`, which becomes the last sum.
inline vec cumulated(vec a, float& before) {
  for (int64_t i = 0; i < L; i++) a[i] = before += a[i];
  return a;
}

template <class Block>
inline void accumulate(Block block, float* to, vec a) {
  block.write(to, block.read(to) + a);
}

}  // namespace
