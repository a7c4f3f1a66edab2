// The arguments of a call on consecutive steps.

#pragma once

#include "float32_on_tiles.h"

namespace {

enum Cell : int64_t { LSTM, GRU, RNN_TANH, RNN_RELU, LIGHT_GRU };
constexpr int64_t MAX_GATES = 4;

}  // namespace

extern "C" {

// One normalisation of rows; groups[q] is the first gate that shares statistics with gate q.
struct Rows {
  int64_t scale, center;
  double eps;
  int64_t groups[MAX_GATES];
};

// What a call on consecutive steps reads and writes. T* stands for float*, or bfloat* where
// `narrow`. In simple RNNs and joint cells u is the sum of both terms and the same memory as v, du
// the same as dv.
struct Steps {
  int64_t cell, narrow, steps, examples, hidden, threads;
  int64_t shares;        // of units (see split_units.h); 1: threads share the examples
  int64_t parts;         // whether the weight is packed by `pack_parts`
  int64_t joint;         // one norm of both terms, `recurrent`; u is their sum, as in a simple RNN
  int64_t carried;       // an LSTM's normalised cell state is carried on
  const int64_t* sizes;  // (steps,)
  Rows input, recurrent, out;
  const float *bias, *bias_hn, *gain_input, *gain_recurrent;  // (G,), (H,), (G,), (G,)
  const float *gain_out, *shift_out;                          // (H,)
  const void* weight;    // packed T: forward (H, G), backward (G, H); or packed by shares
  void *v, *u;           // T (rows, G); forward: u null where nothing is saved
  float *cells, *stats;  // (rows, H), (rows, STATS); forward: null where nothing is saved
  // What h is multiplied by in products, (N, H), or null. Where h and c stay as they were, (rows,
  // H), or null, and then the share of them that does.
  const float* dropout;
  const bool *zoneout_h, *zoneout_c;
  double share_h, share_c;
  const bool* reset;  // where h and c are zeros before a step, (rows,), or null
  // The forward alone.
  void* output;  // T (rows, H)
  float *h, *c;  // (N, H)
  // The backward alone; output_gradient may be null.
  const void *output_gradient, *h_prev;  // T (rows, H)
  const float* c_prev;                   // (rows, H)
  float *dh, *dc;                        // (N, H)
  void *du, *dv;                         // T (rows, G)
  float *dbias, *dbias_hn, *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out;
};

// A window over a text, moved by h and read by the next step (loops/window.py has the equations): K
// Gaussians, U characters of E numbers. Such a layer has rows of float alone.
struct Window {
  int64_t components, characters, letters;
  const float *text, *bias;            // (N, U, E), (3K,)
  const float *input_weight, *weight;  // packed: forward (E, G), (H, 3K), backward (G, E), (3K, H)
  float* terms;                        // (rows, 4K): alpha, beta, exp of kappa^, kappa
  // The forward alone.
  float *windows, *window, *kappa;  // (rows, E), (N, E), (N, K)
  // The backward alone; windows_gradient may be null.
  const float* windows_gradient;  // (rows, E)
  float *dwindow, *dkappa;        // (N, E), (N, K)
  float* dparameters;             // (rows, 3K)
};

// The statistics of one place over the examples of each step; all null where it normalises none.
struct Statistics {
  int64_t batch;      // whether they are the examples' own, which the forward fills in, or given
  float *mean, *var;  // (steps, F); mean null: it is zero; var: the forward's, where `batch`
  float* factor;      // (steps, F): reciprocal deviation
};

// Batch normalisation of all places (see batch.h). What is kept of u is without its mean where that
// is the examples' own.
struct Batch {
  int64_t correction;
  Statistics input, recurrent, out;  // of G, G and H features
};

// Where the statistics of a place over the examples of each step come from, if it has any.
enum Source : int64_t { NONE, GIVEN, OWN };

// What does not change from call to call, of a padded call in float32.
struct Call {
  int64_t cell, steps, examples, inputs, hidden, threads;
  int64_t shares;  // of units (see split_units.h); 1: threads share the examples
  // Rows of a chunk: where the backward reads what is kept of all rows, and where nothing is.
  int64_t chunk_kept, chunk_alone;
  Rows input, recurrent, out;
  double share_h, share_c;
  // Of `input`, `recurrent` and `out`, which then say no more than their eps; what is taken off the
  // number of examples (see Batch).
  int64_t sources[3], correction;
  int64_t joint, carried;  // see Steps
  // Whether a GRU's update gate is that of the new state, and what is added to it.
  int64_t negated;
  double update_offset;
};

// Rows from which the gradients of both weights are computed later, for several steps at once
// (`ln_zoo_call_weights`): gradients of the products, (rows, G), and what the weights were
// multiplied by, (rows, I) and (rows, H). Without a place of its own, dv is du.
struct Rooms {
  float *dv, *du, *x, *h;
};

// Null where there is none: biases and gains of 0 and 1, states of 0, nothing kept, a gradient of 0
// or one that nobody wants.
struct Tensors {
  const float *x, *h0, *c0;                                      // (rows, I), (N, H), (N, H)
  const float *w_ih, *w_hh;                                      // (G, I), (G, H)
  const float *bias_ih, *bias_hh, *gain_input, *gain_recurrent;  // (G,)
  const float *gain_out, *shift_out;                             // (H,)
  const float* bias_inner;  // (G,), added to products with w_ih before their norm
  // (rows, H), not wanted of a single step; (N, H), (N, H), (ln_zoo_call_keeps(),)
  float *output, *h, *c, *kept;
  const float *d_output, *d_h, *d_c;  // the backward alone, as are all below
  float *dx, *dh0, *dc0, *dw_ih, *dw_hh, *dbias_ih, *dbias_hh;
  float *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out, *dbias_inner;
  const float* dropout;               // (N, H)
  const bool *zoneout_h, *zoneout_c;  // (rows, H)
  const bool* reset;                  // (rows,)
  // Of each place in turn, if its statistics are the examples' own, means and biased variances, two
  // of (T, F), which the forward fills in; if they are given, two of (K, F), of which step t uses
  // row min(t, K - 1).
  float* statistics;
  const float* given[3];
  int64_t given_rows[3];
  Rooms rooms;
};

}  // extern "C"

namespace {

// Reciprocal deviations of the input's and the recurrent product's gates, then mean and reciprocal
// deviation of the site at the output.
constexpr int64_t STATS = 2 * MAX_GATES + 2;

int64_t gates_of(int64_t cell) {
  return cell == LSTM ? 4 : cell == GRU ? 3 : cell == LIGHT_GRU ? 2 : 1;
}

// Whether an update gate lets h pass by the products.
inline bool has_update(int64_t cell) { return cell == GRU || cell == LIGHT_GRU; }

// Whether only the sum of both terms is kept.
inline bool keeps_sum(int64_t cell, int64_t joint) { return joint || gates_of(cell) == 1; }

struct Shape {
  int64_t H, gates, G;
  int64_t units;  // H, or those of one thread; then its rows begin at the first of them
  explicit Shape(const Steps& s) : H(s.hidden), gates(gates_of(s.cell)), G(gates * H), units(H) {}
};

}  // namespace
