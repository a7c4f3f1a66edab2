// Products with a weight as it is, for calls of so few rows that packing it would take longer.

#pragma once

#include <type_traits>

#include "../native/vectors.h"

namespace {

// Rows of A, and columns or vectors of columns of B, whose sums are in registers.
constexpr int64_t HIGH = L == 16 ? 4 : 2, WIDE = 4;

// Sum of pairs of lanes at distance D, of two vectors in turn.
template <int D>
vec fold(vec a, vec b) {
  const auto lanes = std::make_integer_sequence<int, LANES>();
  return exchanged<D, false>(a, b, lanes) + exchanged<D, true>(a, b, lanes);
}

// The sums of four vectors, in the first lanes; a sum of one takes as many operations.
inline vec totals(const vec (&a)[WIDE]) {
  vec found = fold<2>(fold<1>(a[0], a[1]), fold<1>(a[2], a[3]));
  if constexpr (LANES > 4) found = fold<4>(found, found);
  if constexpr (LANES > 8) found = fold<8>(found, found);
  return found;
}

template <class Body>
void for_tiles(int64_t M, int64_t first, int64_t end, int64_t wide, Body body) {
  for (int64_t n = first; n < end; n += wide) {
    int64_t m = 0;
    for (; m + HIGH <= M; m += HIGH) body(std::integral_constant<int64_t, HIGH>(), m, n);
    for (; m < M; m++) body(std::integral_constant<int64_t, 1>(), m, n);
  }
}

// C (M, N) = A (M, K) B, or C +=, for columns `first` to `end`; B's columns are rows of `w`.
inline void dot_products(int64_t M, int64_t K, int64_t first, int64_t end, const float* a,
                         int64_t row, const float* w, int64_t of_column, float* c, int64_t ldc,
                         bool add) {
  for_tiles(M, first, end, WIDE, [&](auto high, int64_t m, int64_t n) {
    const int64_t wide = std::min(WIDE, end - n);
    const float* columns[WIDE];
    for (int64_t j = 0; j < WIDE; j++) columns[j] = w + (n + std::min(j, wide - 1)) * of_column;
    vec sums[high][WIDE]{};
    for_units(K, [&](int64_t k, auto block) {
      vec of[WIDE];
      for (int64_t j = 0; j < WIDE; j++) of[j] = block.read(columns[j] + k);
      for (int64_t i = 0; i < high; i++) {
        const vec from = block.read(a + (m + i) * row + k);
        for (int64_t j = 0; j < WIDE; j++) sums[i][j] += from * of[j];
      }
    });
    for (int64_t i = 0; i < high; i++) {
      float* const to = c + (m + i) * ldc + n;
      const vec found = totals(sums[i]);
      for (int64_t j = 0; j < wide; j++) to[j] = found[j] + (add ? to[j] : 0.0f);
    }
  });
}

// The same for rows of B that are rows of `w`.
inline void sums_of_rows(int64_t M, int64_t K, int64_t first, int64_t end, const float* a,
                         int64_t row, const float* w, int64_t of_row, float* c, int64_t ldc,
                         bool add) {
  const int64_t whole = first + (end - first) / (WIDE * L) * (WIDE * L);
  for_tiles(M, first, whole, WIDE * L, [&](auto high, int64_t m, int64_t n) {
    vec sums[high][WIDE]{};
    for (int64_t k = 0; k < K; k++) {
      vec of[WIDE];
      for (int64_t j = 0; j < WIDE; j++) of[j] = load(w + k * of_row + n + j * L);
      for (int64_t i = 0; i < high; i++) {
        const vec factor = all(a[(m + i) * row + k]);
        for (int64_t j = 0; j < WIDE; j++) sums[i][j] += factor * of[j];
      }
    }
    for (int64_t i = 0; i < high; i++) {
      float* const to = c + (m + i) * ldc + n;
      for (int64_t j = 0; j < WIDE; j++) {
        store(to + j * L, add ? sums[i][j] + load(to + j * L) : sums[i][j]);
      }
    }
  });
  for (int64_t m = 0; m < M; m++) {
    float* const to = c + m * ldc + whole;
    for_units(end - whole, [&](int64_t j, auto block) {
      vec sum{};
      for (int64_t k = 0; k < K; k++) {
        sum += all(a[m * row + k]) * block.read(w + k * of_row + whole + j);
      }
      block.write(to + j, add ? sum + block.read(to + j) : sum);
    });
  }
}

}  // namespace
