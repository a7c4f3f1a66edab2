// float32 products without packing, for few rows, few columns or a single step, where packing costs
// more than it saves.

#pragma once

#include "cells.h"

namespace {

// Maximum rows of a call whose weights are not packed, for any number of steps.
constexpr int64_t FEW_ROWS = 4;
// Maximum rows for writing weight gradients row by row.
constexpr int64_t OUTER_ROWS = 8;
// Maximum steps of a call whose weights are not packed, for any number of rows.
constexpr int64_t FEW_STEPS = 1;
// Minimum rows for copying the columns of a matrix into product order.
constexpr int64_t MANY_ROWS = 24;
// Columns below which a product's tiles are mostly empty.
constexpr int64_t THIN = 16;

// A thread's scratch memory, aligned to a cache line.
class Room {
 public:
  float* take(int64_t n) {
    constexpr int64_t LINE = CACHE_LINE / sizeof(float);
    if (int64_t(memory_.size()) < n + LINE) memory_.resize(n + LINE);
    const intptr_t address = reinterpret_cast<intptr_t>(memory_.data()) / 4;
    return memory_.data() + (-address & (LINE - 1));
  }

 private:
  std::vector<float> memory_;
};

// Sum the lanes of COUNT vectors, a power of two up to L: lane i of the first becomes the total of
// vector i modulo COUNT.
template <int COUNT, int D = 1>
__attribute__((always_inline)) inline void fold(vec* sums) {
  if constexpr (D < LANES) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    constexpr int LEFT = COUNT > 1 ? COUNT / 2 : 1;
#pragma GCC unroll 16
    for (int i = 0; i < LEFT; i++) {
      const vec upper = sums[COUNT > 1 ? 2 * i : 0], lower = sums[COUNT > 1 ? 2 * i + 1 : 0];
      sums[i] = exchanged<D, false>(upper, lower, lanes) + exchanged<D, true>(upper, lower, lanes);
    }
    fold<LEFT, 2 * D>(sums);
  }
}

// y[n][i] = total of vector n * ROWS + i, or y += it, for XS rows of y.
template <int ROWS, int XS>
__attribute__((always_inline)) inline void write_totals(const vec* sums, float* y, int64_t ldy,
                                                        bool add) {
  constexpr int COUNT = XS * ROWS;
  constexpr int POWER = COUNT > 8 ? 16 : COUNT > 4 ? 8 : COUNT > 2 ? 4 : COUNT;
  vec part[POWER];
#pragma GCC unroll 16
  for (int i = 0; i < POWER; i++) part[i] = i < COUNT ? sums[i] : vec{};
  fold<POWER>(part);
  float found[LANES];
  store(found, part[0]);
  for (int n = 0; n < XS; n++) {
    const float* const from = found + n * ROWS;
    add ? ::add(from, y + n * ldy, ROWS) : copy(from, ROWS, y + n * ldy);
  }
}

// y[n][i] = w[i] . x[n], or y += it, for ROWS rows of w (., K) and XS rows of x; `ldx` and `ldy`
// are strides of rows. Sums, ROWS vectors of w and one of x fit the registers.
template <int ROWS, int XS>
__attribute__((noinline)) void dot_products(int64_t K, const float* w, const float* x, int64_t ldx,
                                            float* y, int64_t ldy, bool add) {
  vec sums[XS * ROWS] = {};
  for_units(K, [&](int64_t k, auto block) {
    vec a[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      a[i] = block.read(w + i * K + k);
      if constexpr (XS > 1) ahead(w + i * K + k, ROWS * K);
      if constexpr (XS > 1) KEEP(a[i]);
    }
#pragma GCC unroll 6
    for (int n = 0; n < XS; n++) {
      const vec b = block.read(x + n * ldx + k);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) sums[n * ROWS + i] += a[i] * b;
    }
  });
  constexpr int AT_ONCE = LANES / ROWS, LAST = XS % AT_ONCE, WHOLE = XS - LAST;
#pragma GCC unroll 6
  for (int n = 0; n < WHOLE; n += AT_ONCE) {
    write_totals<ROWS, AT_ONCE>(sums + n * ROWS, y + n * ldy, ldy, add);
  }
  if constexpr (LAST > 0) {
    write_totals<ROWS, LAST>(sums + WHOLE * ROWS, y + WHOLE * ldy, ldy, add);
  }
}

template <int ROWS, int XS = HEIGHT, class... Arguments>
void dot_products_of(int64_t count, Arguments... arguments) {
  if (count == XS) return dot_products<ROWS, XS>(arguments...);
  if constexpr (XS > 1) dot_products_of<ROWS, XS - 1>(count, arguments...);
}

// Columns of y from g on, as `few_by_transposed`, ROWS at a time; returns the first that is left.
template <int ROWS>
int64_t dot_products_from(int64_t g, int64_t N, int64_t G, int64_t K, const float* x, int64_t ldx,
                          const float* w, float* y, int64_t ldy, bool add) {
  for (; g + ROWS <= G; g += ROWS) {
    for (int64_t n = 0, height; n < N; n += height) {
      height = block_height(N - n);
      dot_products_of<ROWS>(height, K, w + g * K, x + n * ldx, ldx, y + n * ldy + g, ldy, add);
    }
  }
  return g;
}

// y (N, G) = x (N, K) w^T, or y += it, for w (G, K) in place, on the calling thread; `ldx` and
// `ldy` are strides of rows.
void few_by_transposed(int64_t N, int64_t G, int64_t K, const float* x, int64_t ldx, const float* w,
                       float* y, int64_t ldy, bool add) {
  // Latency of additions: few rows of x need more sums.
  constexpr int MANY = L < 8 ? L : 8;
  int64_t g = 0;
  if (N == 1) g = dot_products_from<MANY>(g, N, G, K, x, ldx, w, y, ldy, add);
  if (N == 2) g = dot_products_from<4>(g, N, G, K, x, ldx, w, y, ldy, add);
  g = dot_products_from<WIDTH>(g, N, G, K, x, ldx, w, y, ldy, add);
  dot_products_from<1>(g, N, G, K, x, ldx, w, y, ldy, add);
}

// Write a (M, N), transposed, to columns of y (N, .) with row stride `stride`; N whole vectors.
void transpose_to(const float* a, int64_t M, int64_t N, float* y, int64_t stride) {
  for (int64_t n = 0; n < N; n += L) {
    int64_t m = 0;
    for (; m + L <= M; m += L) {
      vec block[L];
#pragma GCC unroll 16
      for (int64_t i = 0; i < L; i++) block[i] = load(a + (m + i) * N + n);
      transpose(block);
#pragma GCC unroll 16
      for (int64_t i = 0; i < L; i++) store(y + (n + i) * stride + m, block[i]);
    }
    for (; m < M; m++) {
      for (int64_t i = 0; i < L; i++) y[(n + i) * stride + m] = a[m * N + n + i];
    }
  }
}

// Run threads for a matrix of this size, and assign rows or columns to each.
template <class Body>
void by_parts(int64_t wanted, int64_t numbers, int64_t n, Body body) {
  const int64_t threads = threads_for(wanted, std::min(n, numbers / 131072 + 1));
  in_parallel(threads, [&](int64_t i) { body(n * i / threads, n * (i + 1) / threads); });
}

// y (N, G) = x (N, K) w^T, for w (G, K) in place.
//
// For many rows x is packed instead, as the transposed right operand; remaining and few rows are
// dot products.
void in_place_by_transposed(int64_t N, int64_t G, int64_t K, const float* x, const float* w,
                            float* y, int64_t threads) {
  constexpr int64_t BLOCK = 16 * HEIGHT;
  thread_local Room packed_rows;
  const int64_t whole = N < 2 * L ? 0 : N / L * L;
  float* const packed = whole ? packed_rows.take(K * whole) : nullptr;
  if (whole) pack(x, int64_t(1), K, K, whole, packed, threads, Center{});
  by_parts(threads, G * K * ((N + 3) / 4), G, [&](int64_t from, int64_t to) {
    thread_local Room room;
    float* const block = whole ? room.take(BLOCK * whole) : nullptr;
    for (int64_t g = from; whole && g < to; g += BLOCK) {
      const int64_t rows = std::min(BLOCK, to - g);
      vector_product(rows, whole, K, Left<float>{w + g * K, K, 1}, packed, block, whole, false);
      transpose_to(block, rows, whole, y + g, G);
    }
    few_by_transposed(N - whole, to - from, K, x + whole * K, K, w + from * K, y + whole * G + from,
                      G, false);
  });
}

// As `tile`, for a right operand with row stride `ldb`. A lambda that captured the sums would keep
// them in memory.
template <int ROWS, int VECTORS, class Block>
__attribute__((noinline)) void tile_in_place(int64_t K, Left<float> a, const float* b, int64_t ldb,
                                             float* c, int64_t ldc, bool add, Block last) {
  vec sums[ROWS][VECTORS] = {};
  const float* left = a.data;
#pragma GCC unroll 4
  for (int64_t k = 0; k < K; k++, b += ldb, left += a.column) {
    vec right[VECTORS];
    for (int j = 0; j < VECTORS - 1; j++) right[j] = load(b + j * L);
    right[VECTORS - 1] = last.read(b + (VECTORS - 1) * L);
    for (int j = 0; ROWS > 1 && j < VECTORS; j++) ahead(b + j * L, 8 * ldb);
    for (int j = 0; j < VECTORS; j++) KEEP(right[j]);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      const vec factor = all(left[i * a.row]);
      for (int j = 0; j < VECTORS; j++) sums[i][j] += factor * right[j];
    }
  }
  for (int i = 0; i < ROWS; i++) {
    float* const to = c + i * ldc;
    constexpr int LAST = VECTORS - 1;
    for (int j = 0; j < LAST; j++) {
      store(to + j * L, add ? load(to + j * L) + sums[i][j] : sums[i][j]);
    }
    last.write(to + LAST * L, add ? last.read(to + LAST * L) + sums[i][LAST] : sums[i][LAST]);
  }
}

template <int ROWS, int VECTORS, class... Arguments>
void tile_in_place_of(int64_t height, int64_t vectors, Arguments... arguments) {
  if (height == ROWS && vectors == VECTORS) return tile_in_place<ROWS, VECTORS>(arguments...);
  if constexpr (VECTORS > 1) {
    if (vectors < VECTORS)
      return tile_in_place_of<ROWS, VECTORS - 1>(height, vectors, arguments...);
  }
  if constexpr (ROWS > 1) tile_in_place_of<ROWS - 1, VECTORS>(height, vectors, arguments...);
}

// y (N, K) = d (N, G) w, or y += d w, for K columns of w (G, .) in place, on the calling thread;
// `ldd`, `ldw` and `ldy` are strides of rows.
void few_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, int64_t ldd, const float* w,
                   int64_t ldw, float* y, int64_t ldy, bool add) {
  // Rows of w at a time: they are pages apart, and the first-level TLB has few entries.
  constexpr int64_t AT_ONCE = 128, PANEL = WIDTH * L;
  for (int64_t g = 0; g < G; g += AT_ONCE) {
    const int64_t depth = std::min(AT_ONCE, G - g);
    for (int64_t k = 0; k < K; k += PANEL) {
      const int64_t columns = std::min(PANEL, K - k), vectors = (columns + L - 1) / L;
      const int64_t lanes = columns - (vectors - 1) * L;
      for (int64_t n = 0, height; n < N; n += height) {
        height = block_height(N - n);
        const auto run = [&](auto last) {
          tile_in_place_of<HEIGHT, WIDTH>(height, vectors, depth,
                                          Left<float>{d + n * ldd + g, ldd, 1}, w + g * ldw + k,
                                          ldw, y + n * ldy + k, ldy, add || g > 0, last);
        };
        lanes == L ? run(Whole{}) : run(Rest(lanes));
      }
    }
  }
}

// y (N, K) = d (N, G) w, or y += d w, for w (G, K) in place.
void in_place_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                        bool add, int64_t threads) {
  constexpr int64_t PANEL = WIDTH * L;
  const int64_t panels = (K + PANEL - 1) / PANEL;
  by_parts(threads, G * K * ((N + 3) / 4), panels, [&](int64_t from, int64_t to) {
    const int64_t first = from * PANEL, end = std::min(to * PANEL, K);
    if (N < MANY_ROWS)
      return few_by_matrix(N, G, end - first, d, G, w + first, K, y + first, K, add);
    // Copy each part of a panel, which then stays in the cache.
    thread_local Room room;
    float* const copied = room.take(DEPTH * PANEL);
    for (int64_t k = first; k < end; k += PANEL) {
      const int64_t columns = std::min(PANEL, end - k);
      for (int64_t g = 0; g < G; g += DEPTH) {
        const int64_t depth = std::min(DEPTH, G - g);
        pack_panel(w + g * K + k, K, int64_t(1), depth, 0, columns, copied, Center{});
        vector_product(N, columns, depth, Left<float>{d + g, G, 1}, copied, y + k, K, add || g > 0);
      }
    }
  });
}

// Rows [from, to) of w (G, K) = d^T a, for N rows d (N, G) and a (N, K).
template <int N>
void outer_rows(int64_t from, int64_t to, int64_t G, int64_t K, const float* d, const float* a,
                float* w) {
  for (int64_t g = from; g < to; g++) {
    vec factors[N];
    for (int n = 0; n < N; n++) factors[n] = all(d[n * G + g]);
    for_units(K, [&](int64_t j, auto block) {
      vec sum = factors[0] * block.read(a + j);
      for (int n = 1; n < N; n++) sum += factors[n] * block.read(a + n * K + j);
      block.write(w + g * K + j, sum);
    });
  }
}

template <int MOST = OUTER_ROWS>
void outer_rows_of(int64_t N, int64_t from, int64_t to, int64_t G, int64_t K, const float* d,
                   const float* a, float* w) {
  if (N == MOST) return outer_rows<MOST>(from, to, G, K, d, a, w);
  if constexpr (MOST > 1) outer_rows_of<MOST - 1>(N, from, to, G, K, d, a, w);
}

// w (G, K) = d^T a, for at most OUTER_ROWS rows d (N, G) and a (N, K).
void few_outer(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w,
               int64_t threads) {
  by_parts(threads, G * K, G,
           [&](int64_t from, int64_t to) { outer_rows_of(N, from, to, G, K, d, a, w); });
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

// Subtract the mean of each group, if rows are centred.
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

// w (G, K) = d^T a, or w += d^T a, for few columns of a (N, K), which would leave a product's tiles
// mostly empty; `sums` has size (K, G).
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

// y (N, K) = d (N, G) w, for few columns of w (G, K); `room` has size (K, G).
void thin_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                    float* room, int64_t threads) {
  for (int64_t g = 0; g < G; g++) {
    for (int64_t k = 0; k < K; k++) room[k * G + g] = w[g * K + k];
  }
  by_parts(threads, N * G, N, [&](int64_t from, int64_t to) {
    for (int64_t k = 0; k < K; k++) {
      few_by_transposed(to - from, 1, G, d + from * G, G, room + k * G, y + from * K + k, K, false);
    }
  });
}

}  // namespace
