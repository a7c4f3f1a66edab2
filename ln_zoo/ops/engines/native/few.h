// Products of matrices with few rows or few columns, of float32, for which packing does not pay.

#pragma once

#include "cells.h"

namespace {

// Rows up to which reading the weights is what costs, and packing them does not pay.
constexpr int64_t FEW_ROWS = 4;
// Columns below which they fill too little of a product's tiles.
constexpr int64_t THIN = 16;

// y[n][i] = w[i] . x[n], for ROWS rows of a matrix (., K) and N vectors x.
template <int ROWS>
inline void dot_products(const float* w, const float* x, int64_t N, int64_t K, float* y,
                         int64_t stride) {
  for (int64_t n = 0; n < N; n++, x += K, y += stride) {
    vec even[ROWS] = {}, odd[ROWS] = {};
    int64_t k = 0;
    for (; k + 2 * L <= K; k += 2 * L) {
      const vec a = load(x + k), b = load(x + k + L);
      for (int i = 0; i < ROWS; i++) {
        even[i] += load(w + i * K + k) * a;
        odd[i] += load(w + i * K + k + L) * b;
      }
    }
    for_units(K - k, [&](int64_t j, auto block) {
      const vec a = block.read(x + k + j);
      for (int i = 0; i < ROWS; i++) even[i] += block.read(w + i * K + k + j) * a;
    });
    for (int i = 0; i < ROWS; i++) y[i] = total(even[i] + odd[i]);
  }
}

// Threads for a matrix of so many numbers, and the rows or columns of each.
template <class Body>
void by_parts(int64_t wanted, int64_t numbers, int64_t n, Body body) {
  const int64_t threads = threads_for(wanted, numbers / 131072 + 1);
  in_parallel(threads, [&](int64_t i) { body(n * i / threads, n * (i + 1) / threads); });
}

// y (N, G) = x (N, K) w^T, for a few rows and w (G, K) as it is.
void few_by_transposed(int64_t N, int64_t G, int64_t K, const float* x, const float* w, float* y,
                       int64_t threads) {
  constexpr int ROWS = 4;
  by_parts(threads, G * K, G, [&](int64_t from, int64_t to) {
    int64_t i = from;
    for (; i + ROWS <= to; i += ROWS) dot_products<ROWS>(w + i * K, x, N, K, y + i, G);
    for (; i < to; i++) dot_products<1>(w + i * K, x, N, K, y + i, G);
  });
}

// y (N, K) = d (N, G) w, or y += d w, for a few rows and w (G, K) as it is.
void few_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                   bool add, int64_t threads) {
  constexpr int64_t AT_ONCE = 4;
  by_parts(threads, G * K, K, [&](int64_t from, int64_t to) {
    for (int64_t n = 0; n < N && !add; n++) std::fill(y + n * K + from, y + n * K + to, 0.0f);
    for (int64_t g = 0; g < G; g += AT_ONCE) {
      const int64_t count = std::min(AT_ONCE, G - g);
      for (int64_t n = 0; n < N; n++) {
        float* to_row = y + n * K + from;
        vec factors[AT_ONCE] = {};
        for (int64_t i = 0; i < count; i++) factors[i] = all(d[n * G + g + i]);
        for_units(to - from, [&](int64_t j, auto block) {
          vec sum = block.read(to_row + j);
          for (int64_t i = 0; i < count; i++) {
            sum += factors[i] * block.read(w + (g + i) * K + from + j);
          }
          block.write(to_row + j, sum);
        });
      }
    }
  });
}

// w (G, K) = d^T a, for a few rows d (N, G) and a (N, K).
void few_outer(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w,
               int64_t threads) {
  by_parts(threads, G * K, G, [&](int64_t from, int64_t to) {
    for (int64_t g = from; g < to; g++) {
      vec factors[FEW_ROWS];
      for (int64_t n = 0; n < N; n++) factors[n] = all(d[n * G + g]);
      for_units(K, [&](int64_t j, auto block) {
        vec sum = factors[0] * block.read(a + j);
        for (int64_t n = 1; n < N; n++) sum += factors[n] * block.read(a + n * K + j);
        block.write(w + g * K + j, sum);
      });
    }
  });
}

// to (G,) = the sum of rows d (N, G), or to += it.
void few_sum(int64_t N, int64_t G, const float* d, float* to, bool add, int64_t threads) {
  by_parts(threads, N * G, G, [&](int64_t from, int64_t end) {
    if (!add) std::fill(to + from, to + end, 0.0f);
    for (int64_t n = 0; n < N; n++) {
      for_units(end - from, [&](int64_t j, auto block) {
        const int64_t k = from + j;
        block.write(to + k, block.read(to + k) + block.read(d + n * G + k));
      });
    }
  });
}

// Takes the mean off each group, where rows are centred.
void center(const Rows& rows, float* a, int64_t gates, int64_t H) {
  if (!rows.scale || !rows.center) return;
  for (int64_t q = 0, end; q < gates; q = end) {
    end = group_end(rows, gates, q);
    const int64_t n = (end - q) * H;
    vec sum{};
    for_units(n, [&](int64_t j, auto block) { sum += block.read(a + q * H + j); });
    const vec mean = all(total(sum) / float(n));
    for_units(n, [&](int64_t j, auto block) {
      block.write(a + q * H + j, block.read(a + q * H + j) - mean);
    });
  }
}

// w (G, K) = d^T a, or w += d^T a, for few columns of a (N, K), which would fill only a small part
// of a product's tile; `sums` has room for (K, G).
void thin_outer(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w, bool add,
                float* sums, int64_t threads) {
  by_parts(threads, N * G, G, [&](int64_t from, int64_t to) {
    for (int64_t k = 0; k < K; k++) std::fill(sums + k * G + from, sums + k * G + to, 0.0f);
    for (int64_t n = 0; n < N; n++) {
      for (int64_t k = 0; k < K; k++) {
        const vec factor = all(a[n * K + k]);
        const float* row = d + n * G + from;
        float* sum = sums + k * G + from;
        for_units(to - from, [&](int64_t j, auto block) {
          block.write(sum + j, block.read(sum + j) + factor * block.read(row + j));
        });
      }
    }
    for (int64_t g = from; g < to; g++) {
      for (int64_t k = 0; k < K; k++) {
        w[g * K + k] = sums[k * G + g] + (add ? w[g * K + k] : 0.0f);
      }
    }
  });
}

// y (N, K) = d (N, G) w, for few columns of w (G, K); `room` has room for (K, G).
void thin_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                    float* room, int64_t threads) {
  for (int64_t g = 0; g < G; g++) {
    for (int64_t k = 0; k < K; k++) room[k * G + g] = w[g * K + k];
  }
  by_parts(threads, N * G, N, [&](int64_t from, int64_t to) {
    for (int64_t k = 0; k < K; k++) {
      dot_products<1>(room + k * G, d + from * G, to - from, G, y + from * K + k, K);
    }
  });
}

}  // namespace
