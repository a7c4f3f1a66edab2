// What generated kernels share: arguments of a call, packed matrices, and products of a step. The
// products are those of the native library, which Python passes by address.

#pragma once

#include <array>

#include "../native/scratch.h"
#include "../native/threads.h"
#include "functions.h"

extern "C" {

// Functions of native/matrices.h.
struct Products {
  int64_t (*kind)(int64_t rows, int64_t K, int64_t N, int64_t in_columns, int64_t narrow);
  int64_t (*size)(int64_t kind, int64_t K, int64_t N);
  void (*pack)(int64_t kind, const float* from, int64_t row, int64_t column, int64_t K, int64_t N,
               float* to, const float* means, int64_t hidden, int64_t threads);
  void (*product)(int64_t kind, int64_t M, int64_t K, int64_t N, const float* a, int64_t row,
                  int64_t column, const float* packed, float* c, int64_t add);
};

// Arguments of a call; Python mirrors them. Step t has sizes[t] rows, the first of the examples;
// sizes never grow. Widths of states, products and left operands are constants of the kernel.
struct Call {
  int64_t steps, examples, inputs, threads, saves, narrow, chunk;
  const Products* products;
  const int64_t* sizes;
  const float *x, *w_ih;           // (rows, I), (G, I)
  const float* const* weights;     // w_hh and w_hr
  float* v;                        // (rows, G), or null unless saved
  const float* const* initial;     // states before the first step, (N, width) each
  float* const* states;            // after each step, (rows, width) each; or (2 N, width), in turn
  const int64_t* kept;             // whether all steps of a state are kept
  float* const* finals;            // (N, width) each
  float* const* terms;             // products, (rows, width) each; (N, width) unless saved
  float* const* lefts;             // their left operands, likewise; null where it is a state
  float* stats;                    // (rows, STATS), (N, STATS) unless saved
  const float* const* parameters;
  const float* dropped;            // mask of recurrent dropout, (N, width), or null
  const bool* const* held;         // masks of zoneout, (rows, width) each, or null
  const bool* reset;               // (rows,), or null
  // Backward only.
  const float* dout;               // (rows, width), or null
  float* const* gradients;         // of states, (2, N, width) each, in turn; both start as the last
  float *dx, *dw_ih;               // or null
  float* const* dweights;
  float* const* dparameters;
};

}

namespace {

// A cut product of a step; the first of the rows of its weight.
struct Product {
  int64_t weight, first, width, inner, unit, left_state;
  std::vector<int64_t> groups;  // first block of the group of each block, or -1: not centred
};

struct Matrix {
  const Products* of;
  int64_t kind, K, N;
  float* data;

  // C (M, N) = A (M, K) times the matrix, or C +=, on this thread.
  void multiply(int64_t M, const float* a, int64_t row, int64_t column, float* c, bool add) const {
    of->product(kind, M, K, N, a, row, column, data, c, add);
  }
};

// The arguments with what one pass allocates.
struct Work : Call {
  std::vector<int64_t> offsets;  // first row of each step
  std::vector<Matrix> forward, transposed;
  std::vector<float*> du;
  float *dv = nullptr, *hoisted = nullptr;

  const float* before(int64_t t, int64_t i) const;
  float* after(int64_t t, int64_t i) const;
  float* gradient(int64_t t, int64_t i) const;
  float* product(int64_t t, int64_t k) const;
  float* left(int64_t t, int64_t k) const;
  const float* left_of(int64_t t, int64_t k) const;
  void multiply_forward(int64_t k, int64_t t, int64_t first, int64_t end) const;
  void multiply_backward(int64_t k, int64_t t, int64_t first, int64_t end, float* to,
                         bool add) const;
};

}  // namespace
