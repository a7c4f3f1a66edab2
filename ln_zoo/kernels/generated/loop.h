// What generated kernels share: arguments of a call, packed matrices, and products of a step. The
// products are those of the native library, which Python passes by address.

#pragma once

#include <array>
#include <numeric>

#include "../native/scratch.h"
#include "../native/stages.h"
#include "functions.h"

extern "C" {

// Functions of native/matrices.h.
struct Products {
  int64_t (*kind)(int64_t rows, int64_t K, int64_t N, int64_t narrow);
  int64_t (*size)(int64_t kind, int64_t K, int64_t N);
  void (*pack)(int64_t kind, const float* from, int64_t row, int64_t column, int64_t K, int64_t N,
               float* to, const float* means, int64_t hidden, int64_t threads);
  void (*product)(int64_t kind, int64_t M, int64_t K, int64_t N, const float* a, int64_t row,
                  int64_t column, const float* packed, float* c, int64_t ldc, int64_t add,
                  int64_t share, int64_t shares);
  void (*in_place)(int64_t transposed, int64_t M, int64_t K, int64_t N, const float* a, int64_t lda,
                   const float* w, int64_t ldw, float* c, int64_t ldc, int64_t add);
  void (*outer)(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w,
                int64_t add, int64_t narrow, int64_t threads);
  int64_t (*thin)(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                  int64_t threads);
  int64_t (*shares)(int64_t numbers, int64_t hidden, int64_t examples, int64_t threads);
  int64_t (*parts)(int64_t steps, int64_t examples, int64_t inputs, int64_t G, int64_t hidden,
                   int64_t threads);
};

// Arguments of a call; Python mirrors them. Step t has sizes[t] rows, the first of the examples;
// sizes never grow. Widths of states, products and left operands are constants of the kernel.
struct Call {
  int64_t steps, examples, inputs, threads, narrow, chunk;
  const Products* products;
  const int64_t* sizes;
  // x (rows, I), w_ih (G, I), w_hh, w_hr, states before the first step (N, width), parameters,
  // the mask of recurrent dropout (N, width), resets (rows,), masks of zoneout (rows, width); null
  // where absent. Without w_ih, x (rows, G) are the input terms.
  const float* const* given;
  float* output;         // (rows, width)
  float* const* finals;  // states after the last step, (N, width) each
  float* kept;           // ln_zoo_cell_keeps() numbers for the backward pass, or null
  // Backward only.
  const float* dout;            // (rows, width), or null
  const float* const* dfinals;  // (N, width) each, or null
  float* const* gradients;      // of `given` up to the parameters; null where not needed
  // Null, or of a single step whose gradients of weights are computed later: memory for dv, x, and
  // for du and the left operand of each product. Sums are added to the gradients of parameters.
  float* const* rooms;
};
}

namespace {

// A cut product of a step: the first of the rows of its weight, which has `rows` in all. In blocks,
// a weight is stored by blocks, and its width is that of a block.
struct Product {
  int64_t weight, first, rows, width, inner, blocks, unit;
  int64_t left_state;            // the state that is its left operand, or -1
  int64_t gradient_state, adds;  // the state to whose gradient it is written, or -1, or added
  std::vector<int64_t> groups;   // first block of the group of each block, or -1: not centred
};

// A packed matrix (K, N); or, without data, one in place with these strides, one of which is 1.
struct Matrix {
  const Products* of;
  int64_t kind, K, N;
  float* data;
  const float* from = nullptr;
  int64_t of_row = 0, of_column = 0;

  // C (M, N) = A (M, K) times the matrix, or C +=, or a share of its columns, on this thread.
  void multiply(int64_t M, const float* a, int64_t row, int64_t column, float* c, int64_t ldc,
                bool add, int64_t share = 0, int64_t shares = 1) const {
    if (data) return of->product(kind, M, K, N, a, row, column, data, c, ldc, add, share, shares);
    const int64_t first = N * share / shares, end = N * (share + 1) / shares;
    of->in_place(of_row == 1, M, K, end - first, a, row, from + first * of_column,
                 std::max(of_row, of_column), c + first, ldc, add);
  }
};

// A part of a product: columns of its left operand times rows of its weight are columns of the
// product. A block of units has one for each gate.
struct Piece {
  int64_t from, row, to, inner, width;  // first of each, and the size of the part of the weight
  bool first;                           // of those with the same columns of the left operand
};

// The arguments of a call, or of a part of its examples, with what one pass allocates.
struct Work : Call {
  // Whether a backward pass follows; whether each step multiplies its own inputs.
  bool saves = false, each_step = false;
  int64_t skipped = 0;  // rows of other parts between the steps of x, output and their gradients
  // Of a part.
  std::vector<int64_t> own_sizes;
  std::vector<const float*> own_given, own_dfinals;
  std::vector<float*> own_finals, own_gradients, own_rooms;

  std::vector<int64_t> offsets;               // first row of each step
  std::vector<std::vector<Matrix>> matrices;  // of the pieces of products
  Matrix w_ih;
  const float* const* parameters;
  const float* dropped;
  const bool* reset;
  float *v, *stats, *hoisted;  // v: see `term`
  std::vector<float*> states, terms, lefts;
  // Backward only; of a chunk.
  float* dv;
  const float* zeros;
  std::vector<float*> du, dlefts, dstates;

  int64_t outer_row(int64_t t) const;
  float* term(int64_t t) const;
  const bool* held(int64_t i) const;
  const float* before(int64_t t, int64_t i) const;
  float* after(int64_t t, int64_t i) const;
  float* gradient(int64_t t, int64_t i) const;
  float* product(int64_t t, int64_t k) const;
  float* left(int64_t t, int64_t k) const;
  const float* left_of(int64_t t, int64_t k) const;
  void multiply_input(int64_t t, int64_t first, int64_t end) const;
  void multiply_forward(int64_t k, int64_t t, int64_t first, int64_t end, int64_t share,
                        int64_t shares) const;
  void multiply_backward(int64_t k, int64_t t, int64_t first, int64_t end, int64_t share,
                         int64_t shares) const;
};

// Examples of a thread, memory for vectors and numbers of rows, and sums of the gradients of
// parameters: over the last `summed` rows, and over all before.
struct Part {
  int64_t first, last;
  float *spills, *crossing;
  std::vector<float*> sums, totals;
  int64_t summed;
};

// What rows of a part compute at step t before, between or after products.
using Level = void (*)(const Work& a, const Part& part, int64_t t);

struct Pass {
  std::vector<Level> levels;  // null where there is nothing to do
  int64_t spills, crossing;   // numbers per row
  bool rows_apart, backward;  // whether each row has its spills
};

}  // namespace
