// Argument structures of the kernels; Python mirrors them field by field.

#pragma once

#include "float32_on_tiles.h"

namespace {

enum Cell : int64_t { LSTM, GRU, RNN_TANH, RNN_RELU, LIGHT_GRU };
constexpr int64_t MAX_GATES = 4;

}  // namespace

extern "C" {

// Normalisation of rows; groups[q] is the first gate that shares statistics with gate q.
struct Rows {
  int64_t scale, center;
  double eps;
  int64_t groups[MAX_GATES];
};

// Arguments of consecutive steps. T is float, or bfloat if `narrow`. In simple RNNs and joint cells
// u is the sum of both terms and shares the memory of v, du that of dv.
struct Steps {
  int64_t cell, narrow, steps, examples, hidden, threads;
  int64_t shares;        // of units (see split_units.h); 1: threads split the examples
  int64_t parts;         // whether `pack_parts` packed the weight
  int64_t joint;         // one norm of both terms, `recurrent`; u is their sum, as in a simple RNN
  int64_t carried;       // an LSTM carries on the normalised cell state
  const int64_t* sizes;  // (steps,)
  Rows input, recurrent, out;
  // If x is given, each step computes its rows of v, with the packed float weight (I, G); v is null
  // where it is not saved.
  int64_t inputs;
  int64_t skipped;   // rows after each step of x, output and output_gradient
  int64_t to_start;  // backward: whether the gradient of h before the first step is needed
  const float *x, *input_weight;  // x: (rows, I)
  const float *bias, *bias_hn, *gain_input, *gain_recurrent;  // (G,), (H,), (G,), (G,)
  const float *gain_out, *shift_out;                          // (H,)
  const void* weight;    // packed T: forward (H, G), backward (G, H); or packed by shares
  void *v, *u;           // T (rows, G); forward: u null where nothing is saved
  float *cells, *stats;  // (rows, H), (rows, STATS); forward: null where nothing is saved
  // Recurrent dropout mask, (N, H), or null. Zoneout masks of h and c, (rows, H), or null and the
  // expected shares.
  const float* dropout;
  const bool *zoneout_h, *zoneout_c;
  double share_h, share_c;
  const bool* reset;  // whether h and c are reset before the step, (rows,), or null
  // Forward only.
  void* output;  // T (rows, H)
  float *h, *c;  // (N, H)
  // Backward only; output_gradient may be null.
  const void *output_gradient, *h_prev;  // T (rows, H)
  const float* c_prev;                   // (rows, H)
  float *dh, *dc;                        // (N, H)
  void *du, *dv;                         // T (rows, G)
  float *dbias, *dbias_hn, *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out;
};

// A window over a text (equations: loops/window.py): K Gaussians, U characters of size E; float
// only.
struct Window {
  int64_t components, characters, letters;
  const float *text, *bias;            // (N, U, E), (3K,)
  const float *input_weight, *weight;  // packed: forward (E, G), (H, 3K), backward (G, E), (3K, H)
  float* terms;                        // (rows, 4K): alpha, beta, exp of kappa^, kappa
  // Forward only.
  float *windows, *window, *kappa;  // (rows, E), (N, E), (N, K)
  // Backward only; windows_gradient may be null.
  const float* windows_gradient;  // (rows, E)
  float *dwindow, *dkappa;        // (N, E), (N, K)
  float* dparameters;             // (rows, 3K)
};

// Statistics of one place over the examples of each step; all null if it does not normalise.
struct Statistics {
  int64_t batch;      // batch statistics, written by the forward pass, or given ones
  float *mean, *var;  // (steps, F); null mean: zero; var: forward only, if `batch`
  float* factor;      // (steps, F): reciprocal deviation
};

// Batch normalisation of all places (see batch.h). Under batch statistics u is saved centred.
struct Batch {
  int64_t correction;
  Statistics input, recurrent, out;  // G, G and H features
};

// Source of a place's statistics over the examples of each step.
enum Source : int64_t { NONE, GIVEN, OWN };

// Constants of padded float32 calls.
struct Call {
  int64_t cell, steps, examples, inputs, hidden, threads;
  int64_t shares;  // of units (see split_units.h); 1: threads split the examples
  // Rows of a chunk, with and without a backward pass.
  int64_t chunk_kept, chunk_alone;
  Rows input, recurrent, out;
  double share_h, share_c;
  // Source of `input`, `recurrent` and `out` (over examples, only their eps is used), and the
  // correction of the variance (see Batch).
  int64_t sources[3], correction;
  int64_t joint, carried;  // see Steps
  // Whether a GRU's update gate weights the new state, and its offset.
  int64_t negated;
  double update_offset;
};

// Rows for `ln_zoo_call_weights`, which computes weight gradients for several steps at once:
// gradients of the products, (rows, G), and left operands, (rows, I) and (rows, H). A null dv is
// du.
struct Rooms {
  float *dv, *du, *x, *h;
};

// Null stands for biases of 0, gains of 1, zero states, nothing saved, and gradients that are 0 or
// not needed.
struct Tensors {
  const float *x, *h0, *c0;                                      // (rows, I), (N, H), (N, H)
  const float *w_ih, *w_hh;                                      // (G, I), (G, H)
  const float *bias_ih, *bias_hh, *gain_input, *gain_recurrent;  // (G,)
  const float *gain_out, *shift_out;                             // (H,)
  const float* bias_inner;  // (G,), added to products with w_ih before their norm
  // (rows, H), null for a single step; (N, H), (N, H), (ln_zoo_call_keeps(),)
  float *output, *h, *c, *kept;
  const float *d_output, *d_h, *d_c;  // backward only, as all below
  float *dx, *dh0, *dc0, *dw_ih, *dw_hh, *dbias_ih, *dbias_hh;
  float *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out, *dbias_inner;
  const float* dropout;               // (N, H)
  const bool *zoneout_h, *zoneout_c;  // (rows, H)
  const bool* reset;                  // (rows,)
  // For each place, means and biased variances: batch statistics, two of (T, F), written by the
  // forward pass; or given ones, two of (K, F), of which step t uses row min(t, K - 1).
  float* statistics;
  const float* given[3];
  int64_t given_rows[3];
  Rooms rooms;
};

}  // extern "C"

namespace {

// Saved statistics per row: reciprocal deviations of the gates of both products, then mean and
// reciprocal deviation of the output site.
constexpr int64_t STATS = 2 * MAX_GATES + 2;

int64_t gates_of(int64_t cell) {
  return cell == LSTM ? 4 : cell == GRU ? 3 : cell == LIGHT_GRU ? 2 : 1;
}

// Whether an update gate carries h past the products.
inline bool has_update(int64_t cell) { return cell == GRU || cell == LIGHT_GRU; }

// Whether only the sum of both terms is saved.
inline bool keeps_sum(int64_t cell, int64_t joint) { return joint || gates_of(cell) == 1; }

struct Shape {
  int64_t H, gates, G;
  int64_t units;  // H, or a thread's units; then its rows start at the first of them
  explicit Shape(const Steps& s) : H(s.hidden), gates(gates_of(s.cell)), G(gates * H), units(H) {}
};

}  // namespace
