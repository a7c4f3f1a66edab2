// Packed matrices and their products for generated kernels (ln_zoo/kernels/generated), which call
// these functions by address.

#pragma once

#include "layer_call.h"

namespace {

enum MatrixKind : int64_t { ON_VECTORS, IN_PARTS, NARROW };

// Rows of a left operand that are rounded to bfloat16 at a time.
constexpr int64_t ROUNDED_ROWS = 96;

// C (M, N) = A (M, K) B, or C += A B, with both factors in bfloat16; `packed` has padded(K) rows.
void narrow_product(int64_t M, int64_t K, int64_t N, Left<float> a, const bfloat* packed, float* c,
                    int64_t ldc, bool add) {
  const int64_t wide = padded<bfloat>(K);
  thread_local std::vector<bfloat> rounded;
  rounded.resize(std::max(int64_t(rounded.size()), ROUNDED_ROWS * wide));
  for (int64_t m0 = 0; m0 < M; m0 += ROUNDED_ROWS) {
    const int64_t rows = std::min(ROUNDED_ROWS, M - m0);
    const float* const from = a.data + m0 * a.row;
    if (a.column == 1) {
      for (int64_t m = 0; m < rows; m++) {
        narrow(from + m * a.row, K, rounded.data() + m * wide);
        std::fill(rounded.data() + m * wide + K, rounded.data() + (m + 1) * wide, bfloat(0));
      }
    } else {
      for (int64_t k = 0; k < wide; k++) {
        for (int64_t m = 0; m < rows; m++) {
          rounded[m * wide + k] = k < K ? narrow(from[m * a.row + k * a.column]) : bfloat(0);
        }
      }
    }
    product(rows, N, wide, Left<bfloat>{rounded.data(), wide, 1}, packed, c + m0 * ldc, ldc, add);
  }
}

}  // namespace

extern "C" {

// How to pack a matrix (K, N) for products with `rows` rows.
int64_t ln_zoo_matrix_kind(int64_t rows, int64_t K, int64_t N, int64_t narrow) {
  if (narrow) return NARROW;
  return suits_parts(rows, K, N, false) ? IN_PARTS : ON_VECTORS;
}

// Size of a packed matrix (K, N), in floats.
int64_t ln_zoo_matrix_size(int64_t kind, int64_t K, int64_t N) {
  if (kind == IN_PARTS) return parts_size(K, N);
  const int64_t size = ln_zoo_packed_size(K, N, kind == NARROW);
  return kind == NARROW ? (size + 1) / 2 : size;
}

// Pack a strided (K, N). `means` (gates, F), or null, are subtracted (see Center): the matrix is
// then a transposed weight (gates * hidden, F), in float32.
void ln_zoo_matrix_pack(int64_t kind, const float* from, int64_t row, int64_t column, int64_t K,
                        int64_t N, float* to, const float* means, int64_t hidden, int64_t threads) {
  const Center center{means, hidden, K, true};
  if (kind == IN_PARTS) return pack_parts(from, row, column, K, N, to, center, threads);
  if (kind == ON_VECTORS) return pack(from, row, column, K, N, to, threads, center);
  std::vector<bfloat> rounded(K * N);
  by_parts(threads, K * N, K, [&](int64_t first, int64_t end) {
    for (int64_t k = first; k < end; k++) {
      for (int64_t n = 0; n < N; n++) rounded[k * N + n] = narrow(from[k * row + n * column]);
    }
  });
  pack(rounded.data(), N, int64_t(1), K, N, reinterpret_cast<bfloat*>(to), threads, Center{});
}

// C (M, N) = A (M, K) B, or C += A B, on the calling thread; B (K, N) packed, C with row stride
// `ldc`. On vectors, of several shares of the columns one only.
void ln_zoo_matrix_product(int64_t kind, int64_t M, int64_t K, int64_t N, const float* a,
                           int64_t row, int64_t column, const float* packed, float* c, int64_t ldc,
                           int64_t add, int64_t share, int64_t shares) {
  const Left<float> left{a, row, column};
  if (kind == IN_PARTS) return parts_product(M, K, left, {{packed, N, c, ldc}}, add);
  if (kind == NARROW) {
    return narrow_product(M, K, N, left, reinterpret_cast<const bfloat*>(packed), c, ldc, add);
  }
  constexpr int64_t wide = WIDTH * L;  // of a panel
  const int64_t panels = (N + wide - 1) / wide, first = panels * share / shares * wide;
  const int64_t columns = std::min(N, panels * (share + 1) / shares * wide) - first;
  if (columns > 0) product(M, columns, K, left, packed + first * K, c + first, ldc, add);
}

// C (M, N) = A (M, K) B, or C += A B, on the calling thread, for few rows and B in place: `w`
// (K, N), or its transpose (N, K), with row stride `ldw`, which is K for a transpose.
void ln_zoo_matrix_in_place(int64_t transposed, int64_t M, int64_t K, int64_t N, const float* a,
                            int64_t lda, const float* w, int64_t ldw, float* c, int64_t ldc,
                            int64_t add) {
  if (transposed) return few_by_transposed(M, N, K, a, lda, w, c, ldc, add);
  few_by_matrix(M, K, N, a, lda, w, ldw, c, ldc, add);
}

// w (G, K) = d^T a, or w += d^T a, for rows d (N, G) and a (N, K).
void ln_zoo_matrix_outer(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w,
                         int64_t add, int64_t narrow, int64_t threads) {
  Arena arena;
  if (!narrow) {
    float* const room = arena.take(Direction::weight_room(N, G, K, 0));
    return Direction::weight_gradient(N, G, d, a, K, w, add, room, threads);
  }
  float* const packed = arena.take(ln_zoo_matrix_size(NARROW, N, K));
  ln_zoo_matrix_pack(NARROW, a, K, 1, N, K, packed, nullptr, 1, threads);
  by_parts(threads, G * N * K, G, [&](int64_t from, int64_t to) {
    ln_zoo_matrix_product(NARROW, to - from, N, K, d + from, 1, G, packed, w + from * K, K, add, 0,
                          1);
  });
}

// y (N, K) = d (N, G) w, if the columns of w (G, K) are few; returns whether they are.
int64_t ln_zoo_matrix_thin(int64_t N, int64_t G, int64_t K, const float* d, const float* w,
                           float* y, int64_t threads) {
  if (K >= THIN) return false;
  Arena arena;
  thin_by_matrix(N, G, K, d, w, y, arena.take(K * G), threads);
  return true;
}

// `ln_zoo_shares` for products with `numbers` weights in all, whose columns are shared.
int64_t ln_zoo_matrix_shares(int64_t numbers, int64_t H, int64_t examples, int64_t threads) {
  return ln_zoo_shares((numbers + H * H - 1) / (H * H), H, examples, threads);
}

// Parts of the examples that threads run from end to end, of which each step multiplies its own
// inputs; 0: a chunk's inputs are multiplied at once.
int64_t ln_zoo_matrix_parts(int64_t steps, int64_t examples, int64_t inputs, int64_t G, int64_t H,
                            int64_t threads) {
  if (!multiplies_each_step(steps, examples, inputs, G, threads)) return 0;
  return parts_of_examples(steps, examples, inputs, H, threads);
}

}  // extern "C"
