// Backward pass through all time steps of a batch-normalised LSTM, GRU or RNN in one launch of one
// cluster (see batch.h). As in backward.cu, each block sends each other block the part of dh of its
// units.

#include "batch.h"

// Gradients of vectors, added to; null where not needed.
struct Totals {
  float *bias, *bias_candidate, *gain_input, *gain_recurrent, *gain_out, *shift_out;
};

struct Arguments {
  const uint4 *high, *low;  // weights in fragments, [block][warp][tile][lane]
  const float* scale;       // factor of products
  const Stored *v, *u;      // saved by the forward pass, (rows, GATES * H); of a batch centred
  Operands operands;
  Sequence sequence;
  const Stored *dout;       // (rows, H), or null for 0
  const Stored *h_before;   // a GRU's states before each step, (rows, H)
  const float *c_before, *c_after;  // an LSTM's cell states before and after each step, (rows, H)
  float *dh, *dc;           // gradients of states, (N, H), updated
  Stored *du, *dv;          // (rows, GATES * H); dv unless MERGED
  Totals totals;
  Statistics statistics;
};

// Shared memory.
constexpr int PART_BYTES = BLOCKS * WARPS_K * UNITS * ROWS * 4;  // of a tile
// Sums over rows: gradients of biases, a GRU's second one, of gains.
constexpr int BIASES = GATES + (CELL == GRU), GAINS = BIASES, SUMS = BIASES + INPUTS + RECURRENTS;
typedef BatchSums<SUMS> All;
typedef BatchSums<2> OfCell;
constexpr int AT_OPERANDS = 0;  // [parity][tile]
constexpr int AT_PARTS = after(AT_OPERANDS, 2 * EIGHTS * OPERANDS);  // of dh: [parity][tile]
constexpr int AT_VECTORS = after(AT_PARTS, 2 * EIGHTS * PART_BYTES);
constexpr int AT_CELLS = after(AT_VECTORS, VECTORS_BYTES);
constexpr int AT_SUMS = after(AT_CELLS, OfCell::BYTES);
constexpr int AT_MAXIMA = after(AT_SUMS, All::BYTES);  // [parity][row]
constexpr int AT_SCALES = after(AT_MAXIMA, 2 * ALL_ROWS * 4);
constexpr int AT_BARRIERS = after(AT_SCALES, 2 * ALL_ROWS * 4);
constexpr int AT_WEIGHTS = after(AT_BARRIERS, 64);
static_assert(AT_WEIGHTS + WEIGHTS_BYTES == SHARED_BYTES, "the host computes the same layout");
static_assert((BLOCKS - 1) * UNITS < HIDDEN, "each block has units, and so waits for its parts");

// What a step reads from memory.
struct Read {
  float u[MINE][GATES], v[MINE][MERGED ? 1 : GATES], dout[MINE], before[MINE], cell[MINE];
  AtStep of;

  MEMBER void load_step(const Arguments& a, int t, const Owner& o) {
    const long long first = a.sequence.first(t);
    const int n = rows_of_step(a.sequence, t);
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      const bool there = o.owns(j, n);
      const long long row = first + o.row(j), place = row * HIDDEN + o.unit;
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        const long long wide = row * WIDTH + k * HIDDEN + o.unit;
        u[j][k] = there ? load(a.u[wide]) : 0.0f;
        if (!MERGED) v[j][MERGED ? 0 : k] = there ? load(a.v[wide]) : 0.0f;
      }
      dout[j] = there && a.dout ? load(a.dout[place]) : 0.0f;
      if (CELL == LSTM) before[j] = there ? a.c_before[place] : 0.0f;
      if (CELL == LSTM) cell[j] = there ? a.c_after[place] : 0.0f;
      if (CELL == GRU) before[j] = there ? load(a.h_before[place]) : 0.0f;
    }
    of.read(a.statistics, t, o);
  }
};

DEVICE void add(float* total, int at, float a) {
  if (total) total[at] += a;
}

KERNEL(THREADS, BLOCKS) void batch_backward(const Arguments a) {
  SHARED_MEMORY(memory);
  const Place p;
  const Owner o(p);
  const float scale = *a.scale;
  const Multiplier multiplier(a.high, a.low, memory + AT_WEIGHTS, p);
  const Weights& weights = multiplier.weights;
  const AtUnit at((const float*)(memory + AT_VECTORS), o.local);
  float* scales = (float*)(memory + AT_SCALES);
  const u32 base = shared_address(memory), parts_barrier = base + AT_BARRIERS;
  // Units of this block for which others send parts.
  const int received = smaller(SENT - p.rank * UNITS, UNITS);
  const u32 parts_bytes = BLOCKS * ALL_ROWS * 4 * WARPS_K * received;
  const int steps = a.sequence.steps, examples = a.sequence.examples;

  for (int i = p.thread; i < AT_BARRIERS / 4; i += THREADS) ((u32*)memory)[i] = 0;
  block_barrier();
  a.operands.load((float*)(memory + AT_VECTORS), p);
  if (p.thread == 0 && BLOCKS > 1) {
    for (int parity = 0; parity < 2; ++parity)
      Inbox{parts_barrier + 8 * parity, parts_bytes}.start();
    barrier_init_fence();
  }
  // Gradients of the states after a step, and the part that bypasses the products.
  float dh[MINE], dc[MINE], passed[MINE], totals[SUMS], out_totals[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < MINE; ++j) {
    const bool there = o.owns(j, examples);
    const int place = o.row(j) * HIDDEN + o.unit;
    dh[j] = there ? a.dh[place] : 0.0f;
    dc[j] = there && CELL == LSTM ? a.dc[place] : 0.0f;
    passed[j] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < SUMS; ++i) totals[i] = 0.0f;
  Read read;
  read.load_step(a, steps - 1, o);
  block_barrier();
  if (BLOCKS > 1) cluster_barrier();

  int later = 0;  // rows of the step before this one in the loop
  for (int i = 0; i <= steps; ++i) {
    const int t = steps - 1 - i, parity = i & 1, old = parity ^ 1;
    const int n = t < 0 ? 1 + a.statistics.correction : rows_of_step(a.sequence, t);
    const Step step(n, a.statistics.correction);

    // Values that depend on the forward pass only.
    float x[MINE][INPUT ? GATES : 1], y[MINE][RECURRENT ? GATES : 1];  // normalised terms
    float of_v[GATES], of_u[GATES], of_c = 1.0f;                       // reciprocal deviations
    LSTMGates<float> lstm[MINE];
    GRUGates<float> gru[MINE];
    float w[MINE], normal[MINE], tau[MINE], before[MINE], dout[MINE];
#pragma unroll
    for (int k = 0; k < GATES; ++k) {
      of_v[k] = INPUT ? step.reciprocal(read.of.var_input[k], a.statistics.eps_input) : 1.0f;
      of_u[k] =
          RECURRENT ? step.reciprocal(read.of.var_recurrent[k], a.statistics.eps_recurrent) : 1.0f;
    }
    if (OUT) of_c = step.reciprocal(read.of.var_out, a.statistics.eps_out);
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      float s[GATES], in[GATES];
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        const float v = read.v[j][MERGED ? 0 : k] - read.of.mean_input[k];
        const float u = read.u[j][k] - read.of.mean_recurrent[k];
        if (INPUT) x[j][INPUT ? k : 0] = v * of_v[k];
        if (RECURRENT) y[j][RECURRENT ? k : 0] = u * of_u[k];
        s[k] = at.recurrent(k, u, of_u[k]);
        in[k] = MERGED ? at[BIAS + k] : at.input(k, v, of_v[k]);
        if (CELL != GRU || k < 2) s[k] += in[k];
      }
      dout[j] = read.dout[j], before[j] = read.before[j];
      if constexpr (CELL == LSTM) {
        lstm[j] = lstm_gates(s[0], s[1], s[2], s[3]);
        normal[j] = (read.cell[j] - read.of.mean_out) * of_c;
        tau[j] = hyperbolic_tangent(OUT ? at[GAIN_OUT] * normal[j] + at[SHIFT_OUT] : read.cell[j]);
      } else if constexpr (CELL == GRU) {
        w[j] = s[2] + at[BIAS_CANDIDATE];
        gru[j] = gru_gates(s[0], s[1], in[2], w[j]);
      } else {
        tau[j] = hyperbolic_tangent(s[0]);
      }
    }
    if (t > 0) read.load_step(a, t - 1, o);

    if (i) {
      Inbox{parts_barrier + 8 * old, parts_bytes}.wait((i - 1) >> 1);
#pragma unroll
      for (int j = 0; j < MINE; ++j) {
        float through = 0.0f;
        if (o.there(j) && o.local < received) {
          const float* from =
              (const float*)(memory + AT_PARTS + (old * EIGHTS + o.tile(j)) * PART_BYTES) +
              o.local * ROWS + o.row(j) % 8;
#pragma unroll
          for (int e = 0; e < BLOCKS * WARPS_K; ++e) through += from[e * UNITS * ROWS];
        }
        if (o.owns(j, later)) dh[j] = passed[j] + through;
      }
    }
    if (t < 0) break;
    later = n;

    float dm[MINE], d_o[MINE], sums_c[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      dm[j] = o.owns(j, n) ? dh[j] + dout[j] : 0.0f;
      passed[j] = 0.0f;
      if constexpr (CELL == LSTM) {
        const OutputGrads<float> grads = lstm_output_back(dm[j], lstm[j].o, tau[j]);
        d_o[j] = grads.gate, dm[j] = grads.cell;
        sums_c[0] += dm[j], sums_c[1] += dm[j] * normal[j];
      }
    }
    if (CELL == LSTM && OUT) {
      OfCell::sum(sums_c, memory + AT_CELLS, o);
      out_totals[0] += sums_c[0], out_totals[1] += sums_c[1];
    }

    // Gradients of both normalised terms, each times its gain.
    float d[MINE][GATES], candidate[MINE], sums[SUMS];
#pragma unroll
    for (int k = 0; k < SUMS; ++k) sums[k] = 0.0f;
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      if constexpr (CELL == LSTM) {
        const float through = step.through(dm[j], normal[j], sums_c[0], sums_c[1], of_c);
        const float cell = o.owns(j, n) ? dc[j] + (OUT ? at[GAIN_OUT] * through : dm[j]) : 0.0f;
        const CellGrads<float> grads =
            next_cell_back(cell, lstm[j].i, lstm[j].f, lstm[j].g, before[j]);
        d[j][0] = grads.i, d[j][1] = grads.f, d[j][2] = grads.g, d[j][3] = d_o[j];
        if (o.owns(j, n)) dc[j] = cell * lstm[j].f;
      } else if constexpr (CELL == GRU) {
        const GRUGrads<float> grads = gru_back(dm[j], gru[j], w[j], before[j]);
        d[j][0] = grads.r, d[j][1] = grads.z, d[j][2] = grads.w;
        candidate[j] = grads.n;
        passed[j] = dm[j] * gru[j].z;
        sums[BIASES - 1] += grads.w;
      } else {
        d[j][0] = dm[j] * (1.0f - tau[j] * tau[j]);
      }
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        const float d_in = CELL == GRU && k == 2 ? candidate[j] : d[j][k];
        sums[k] += d_in;
        if (INPUT) sums[GAINS + k] += d_in * x[j][INPUT ? k : 0];
        if (RECURRENT) sums[GAINS + INPUTS + k] += d[j][k] * y[j][RECURRENT ? k : 0];
      }
    }
    All::sum(sums, memory + AT_SUMS, o);
#pragma unroll
    for (int k = 0; k < SUMS; ++k) totals[k] += sums[k];

    // Gradients of both terms before normalisation.
    float d_v[MINE][MERGED ? 1 : GATES];
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      const bool there = o.owns(j, n);
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        const float d_in = CELL == GRU && k == 2 ? candidate[j] : d[j][k];
        if (!MERGED)
          d_v[j][MERGED ? 0 : k] =
              INPUT ? step.through(d_in, x[j][INPUT ? k : 0], sums[k], sums[GAINS + k],
                                   of_v[k] * at[GAIN_INPUT + k])
                    : d_in;
        if (RECURRENT)
          d[j][k] = step.through(d[j][k], y[j][RECURRENT ? k : 0],
                                 sums[CELL == GRU && k == 2 ? BIASES - 1 : k],
                                 sums[GAINS + INPUTS + k], of_u[k] * at[GAIN_RECURRENT + k]);
        if (!there) d[j][k] = 0.0f;
        largest = larger(largest, magnitude(d[j][k]));
      }
      // Limited range of halves: each row has its own power-of-two scale.
      if (BRAIN) continue;
      largest = row_max(largest);
      if (o.there(j) && (p.lane & 3) == 0)
        shared_max(base + AT_MAXIMA + (parity * ALL_ROWS + o.row(j)) * 4, float_bits(largest));
    }
    if (p.thread < ALL_ROWS) ((u32*)(memory + AT_MAXIMA))[old * ALL_ROWS + p.thread] = 0;
    if (!BRAIN) block_barrier();
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      if (!o.there(j)) continue;
      float up = 1.0f, down = scale;
      if (!BRAIN) {
        const u32 bits = ((const u32*)(memory + AT_MAXIMA))[parity * ALL_ROWS + o.row(j)];
        int exponent = bits >> 23;
        exponent = exponent < 2 ? 2 : exponent > 252 ? 252 : exponent;
        up = bits_float((254 - exponent) << 23), down = bits_float(exponent << 23) * scale;
      }
      if (o.local == 0) scales[parity * ALL_ROWS + o.row(j)] = down;
      unsigned char* operands = memory + AT_OPERANDS + (parity * EIGHTS + o.tile(j)) * OPERANDS;
      if constexpr (GATES == 4) {
        const float four[4] = {d[j][0] * up, d[j][1] * up, d[j][2] * up, d[j][3] * up};
        Quartet(four).write(operands + operand_offset(o.row(j) % 8, 4 * o.local));
      } else {
#pragma unroll
        for (int k = 0; k < GATES; ++k)
          write_operand(operands, o.row(j) % 8, GATES * o.local + k, d[j][k] * up);
      }
    }
    block_barrier();
    const unsigned char* operands = memory + AT_OPERANDS + parity * EIGHTS * OPERANDS;
    multiplier.multiply(operands, [&](int tile, const Weights::Sums& products) {
      const int place = parity * EIGHTS + tile;
      send_parts(weights, products, scales + place * ROWS, base + AT_PARTS + place * PART_BYTES,
                 parts_barrier + 8 * parity, p);
    });
    // Late, so that nothing waits behind these stores.
    const long long row = a.sequence.first(t);
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      if (!o.owns(j, n)) continue;
      const long long to = (row + o.row(j)) * WIDTH + o.unit;
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        store(a.du + to + k * HIDDEN, d[j][k]);
        if (!MERGED) store(a.dv + to + k * HIDDEN, d_v[j][MERGED ? 0 : k]);
      }
    }
  }

#pragma unroll
  for (int j = 0; j < MINE; ++j)
    if (o.owns(j, examples)) {
      const int place = o.row(j) * HIDDEN + o.unit;
      a.dh[place] = dh[j];
      if (CELL == LSTM) a.dc[place] = dc[j];
    }
  if (o.leads()) {
#pragma unroll
    for (int k = 0; k < GATES; ++k) {
      const int to = k * HIDDEN + o.unit;
      add(a.totals.bias, to, totals[k]);
      if (INPUT) add(a.totals.gain_input, to, totals[GAINS + k]);
      if (RECURRENT) add(a.totals.gain_recurrent, to, totals[GAINS + INPUTS + k]);
    }
    if (CELL == GRU) add(a.totals.bias_candidate, o.unit, totals[BIASES - 1]);
    if (OUT) add(a.totals.shift_out, o.unit, out_totals[0]);
    if (OUT) add(a.totals.gain_out, o.unit, out_totals[1]);
  }
  if (BLOCKS > 1) cluster_barrier();
}
