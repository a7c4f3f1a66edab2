// All time steps of a batch-normalised LSTM, GRU or RNN in one launch of one cluster, forward (see
// batch.h). Blocks exchange states alone.

#include "batch.h"

struct Arguments {
  const uint4 *high, *low;  // weights in fragments, [block][warp][tile][lane]
  const float* scale;       // factor of products
  const Stored* v;          // products of the inputs, (rows, GATES * H); of a batch centred
  Operands operands;
  Sequence sequence;
  float *h, *c;             // states, (N, H), updated
  Stored *out, *u;          // u: saved for the backward pass, or null, as cells
  float* cells;             // (rows, H)
  Statistics statistics;    // written, unless GIVEN; an RNN's mean is added
};

// Shared memory.
typedef BatchSums<GATES * (1 + INPUT)> First;
typedef BatchSums<GATES> Squares;
typedef BatchSums<1> OfCell;
constexpr int AT_STATES = 0;
constexpr int AT_TERMS = after(AT_STATES, 2 * EIGHTS * OPERANDS);
constexpr int AT_VECTORS = after(AT_TERMS, WARPS_K * GATES * ALL_ROWS * TERM_PITCH * 4);
constexpr int AT_FIRST = after(AT_VECTORS, VECTORS_BYTES);
constexpr int AT_SQUARES = after(AT_FIRST, First::BYTES);
constexpr int AT_CELLS = after(AT_SQUARES, Squares::BYTES);
constexpr int AT_CELL_SQUARES = after(AT_CELLS, OfCell::BYTES);
constexpr int AT_BARRIERS = after(AT_CELL_SQUARES, OfCell::BYTES);
constexpr int AT_WEIGHTS = after(AT_BARRIERS, 64);
static_assert(AT_WEIGHTS + WEIGHTS_BYTES == SHARED_BYTES, "the host computes the same layout");

DEVICE void read_terms(float (&to)[MINE][GATES], const Arguments& a, int t, const Owner& o) {
  const long long first = a.sequence.first(t);
  const int n = rows_of_step(a.sequence, t);
#pragma unroll
  for (int j = 0; j < MINE; ++j)
#pragma unroll
    for (int k = 0; k < GATES; ++k)
      to[j][k] = o.owns(j, n) ? load(a.v[(first + o.row(j)) * WIDTH + k * HIDDEN + o.unit]) : 0.0f;
}

KERNEL(THREADS, BLOCKS) void batch_forward(const Arguments a) {
  SHARED_MEMORY(memory);
  const Place p;
  const Owner o(p);
  const float scale = *a.scale;
  const Multiplier multiplier(a.high, a.low, memory + AT_WEIGHTS, p);
  const Weights& weights = multiplier.weights;
  float* terms = (float*)(memory + AT_TERMS);
  const AtUnit at((const float*)(memory + AT_VECTORS), o.local);
  const u32 base = shared_address(memory), states_barrier = base + AT_BARRIERS;
  constexpr u32 STATES_BYTES = SENT * ALL_ROWS * 2 * PIECES;
  const int steps = a.sequence.steps, examples = a.sequence.examples;

  for (int i = p.thread; i < AT_BARRIERS / 4; i += THREADS) ((u32*)memory)[i] = 0;
  block_barrier();
  a.operands.load((float*)(memory + AT_VECTORS), p);
  if (p.thread == 0 && BLOCKS > 1) {
    for (int parity = 0; parity < 2; ++parity)
      Inbox{states_barrier + 8 * parity, STATES_BYTES}.start();
    barrier_init_fence();
  }
  // The states before the first step: every block reads all of them.
  for (int i = p.thread; i < ALL_ROWS * SENT / 4; i += THREADS) {
    const int row = i / (SENT / 4), unit = i % (SENT / 4) * 4;
    float h[4];
    for (int e = 0; e < 4; ++e) {
      const bool there = unit + e < HIDDEN && row < examples;
      h[e] = there ? a.h[row * HIDDEN + unit + e] : 0.0f;
    }
    Quartet(h).write(memory + AT_STATES + row / 8 * OPERANDS + operand_offset(row % 8, unit));
  }
  float h[MINE], c[MINE], v[MINE][GATES];
#pragma unroll
  for (int j = 0; j < MINE; ++j) {
    const bool there = o.owns(j, examples);
    const int place = o.row(j) * HIDDEN + o.unit;
    h[j] = there ? a.h[place] : 0.0f;
    c[j] = there && CELL == LSTM ? a.c[place] : 0.0f;
  }
  read_terms(v, a, 0, o);
  // No block may send before all are ready to receive.
  block_barrier();
  if (BLOCKS > 1) cluster_barrier();

  for (int t = 0; t < steps; ++t) {
    const int n = rows_of_step(a.sequence, t);
    const Step step(n, a.statistics.correction);
    AtStep of;
    if (GIVEN) of.read(a.statistics, t, o);
    float removed = 0.0f;  // the mean that v has lost, where it is part of u
    if (!GIVEN && MERGED && RECURRENT && o.leads())
      removed = a.statistics.mean_recurrent[(long long)t * HIDDEN + o.unit];
    if (t) Inbox{states_barrier + 8 * (t & 1), STATES_BYTES}.wait((t - 1) >> 1);
    const unsigned char* states = memory + AT_STATES + (t & 1) * EIGHTS * OPERANDS;
    multiplier.multiply(states, [&](int tile, const Weights::Sums& sums) {
#pragma unroll
      for (int m = 0; m < OWN_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int output = (weights.warp_m * OWN_M + m) * 16 + (p.lane >> 2) + 8 * half;
          if (output >= PRODUCED) continue;
          const int gate = weights.warp_k * GATES + output / UNITS;
          float* to = terms + (gate * ALL_ROWS + tile * 8 + 2 * (p.lane & 3)) * TERM_PITCH +
                      output % UNITS;
          to[0] = sums(m, 2 * half, 1.0f) * scale;
          to[TERM_PITCH] = sums(m, 2 * half + 1, 1.0f) * scale;
        }
    });
    block_barrier();

    float u[MINE][GATES];
    float first[GATES * (1 + INPUT)];
#pragma unroll
    for (int i = 0; i < GATES * (1 + INPUT); ++i) first[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < MINE; ++j)
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        float sum = 0.0f;
        if (o.owns(j, n))
#pragma unroll
          for (int part = 0; part < WARPS_K; ++part)
            sum += terms[((part * GATES + k) * ALL_ROWS + o.row(j)) * TERM_PITCH + o.local];
        u[j][k] = MERGED ? v[j][k] + sum : sum;
        first[k] += u[j][k];
        if (INPUT) first[INPUTS + k] += v[j][k] * v[j][k];
      }

    float of_u[GATES], of_v[GATES], squares[GATES];  // reciprocal deviations of both terms
    if (!GIVEN) {
      if (INPUT || RECURRENT) First::sum(first, memory + AT_FIRST, o);
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        of.mean_input[k] = squares[k] = 0.0f;
        of.mean_recurrent[k] = RECURRENT ? first[k] * step.inverse : 0.0f;
        if (INPUT) of.var_input[k] = first[INPUTS + k] * step.inverse;
      }
    }
    if (RECURRENT && !GIVEN) {
#pragma unroll
      for (int j = 0; j < MINE; ++j)
#pragma unroll
        for (int k = 0; k < GATES; ++k) {
          u[j][k] = o.owns(j, n) ? u[j][k] - of.mean_recurrent[k] : 0.0f;
          squares[k] += u[j][k] * u[j][k];
        }
      Squares::sum(squares, memory + AT_SQUARES, o);
#pragma unroll
      for (int k = 0; k < GATES; ++k) of.var_recurrent[k] = squares[k] * step.inverse;
    }
#pragma unroll
    for (int k = 0; k < GATES; ++k) {
      of_v[k] = INPUT ? step.reciprocal(of.var_input[k], a.statistics.eps_input) : 1.0f;
      of_u[k] = RECURRENT ? step.reciprocal(of.var_recurrent[k], a.statistics.eps_recurrent) : 1.0f;
    }

    float now[MINE], gate[MINE], sum[1] = {0.0f}, square[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      float s[GATES], x[GATES];
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        s[k] = at.recurrent(k, GIVEN ? u[j][k] - of.mean_recurrent[k] : u[j][k], of_u[k]);
        x[k] = MERGED ? at[BIAS + k] : at.input(k, v[j][k] - of.mean_input[k], of_v[k]);
        if (CELL != GRU || k < 2) s[k] += x[k];
      }
      if constexpr (CELL == LSTM) {
        const LSTMGates<float> gates = lstm_gates(s[0], s[1], s[2], s[3]);
        now[j] = next_cell(gates.i, gates.f, gates.g, c[j]);
        gate[j] = gates.o;
        sum[0] += o.owns(j, n) ? now[j] : 0.0f;
      } else if constexpr (CELL == GRU) {
        now[j] = gru_state(gru_gates(s[0], s[1], x[2], s[2] + at[BIAS_CANDIDATE]), h[j]);
      } else {
        now[j] = hyperbolic_tangent(s[0]);
      }
    }
    if constexpr (CELL == LSTM) {
      float of_c = 1.0f;
      if (OUT && !GIVEN) {
        OfCell::sum(sum, memory + AT_CELLS, o);
        of.mean_out = sum[0] * step.inverse;
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
          const float apart = o.owns(j, n) ? now[j] - of.mean_out : 0.0f;
          square[0] += apart * apart;
        }
        OfCell::sum(square, memory + AT_CELL_SQUARES, o);
        of.var_out = square[0] * step.inverse;
      }
      if (OUT) of_c = step.reciprocal(of.var_out, a.statistics.eps_out);
#pragma unroll
      for (int j = 0; j < MINE; ++j) {
        if (o.owns(j, n)) c[j] = now[j];
        const float shown =
            OUT ? at[GAIN_OUT] * (now[j] - of.mean_out) * of_c + at[SHIFT_OUT] : now[j];
        now[j] = gate[j] * hyperbolic_tangent(shown);
      }
    }
#pragma unroll
    for (int j = 0; j < MINE; ++j)
      if (o.owns(j, n)) h[j] = now[j];

    if (t + 1 < steps) {
      const u32 parity = (t + 1) & 1, barrier = states_barrier + 8 * parity;
#pragma unroll
      for (int j = 0; j < MINE; ++j) {
        const Quartet four = Quartet::gather(h[j], p.lane);
        const u32 to = base + AT_STATES + (parity * EIGHTS + o.tile(j)) * OPERANDS +
                       operand_offset(o.row(j) % 8, o.unit);
        // The four lanes of a quartet send it to different blocks.
        if (o.there(j) && o.unit < SENT)
#pragma unroll
          for (int block = p.lane & 3; block < BLOCKS; block += 4) four.send(to, barrier, block);
      }
    }

    if (t + 1 < steps) read_terms(v, a, t + 1, o);
    const long long row = a.sequence.first(t);
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
      if (!o.owns(j, n)) continue;
      const long long place = (row + o.row(j)) * HIDDEN + o.unit;
      store(a.out + place, h[j]);
      if (!a.u) continue;
#pragma unroll
      for (int k = 0; k < GATES; ++k)
        store(a.u + (row + o.row(j)) * WIDTH + k * HIDDEN + o.unit, u[j][k]);
      if (CELL == LSTM) a.cells[place] = c[j];
    }
    if (!GIVEN && o.leads()) {
      const Statistics& to = a.statistics;
      const long long wide = (long long)t * WIDTH + o.unit, narrow = (long long)t * HIDDEN + o.unit;
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        if (INPUT) to.var_input[wide + k * HIDDEN] = of.var_input[k];
        if (!RECURRENT) continue;
        to.mean_recurrent[wide + k * HIDDEN] = removed + of.mean_recurrent[k];
        to.var_recurrent[wide + k * HIDDEN] = of.var_recurrent[k];
      }
      if (OUT) to.mean_out[narrow] = of.mean_out, to.var_out[narrow] = of.var_out;
    }
  }

#pragma unroll
  for (int j = 0; j < MINE; ++j)
    if (o.owns(j, examples)) {
      const int place = o.row(j) * HIDDEN + o.unit;
      a.h[place] = h[j];
      if (CELL == LSTM) a.c[place] = c[j];
    }
  // No block may exit while others may still send to it.
  if (BLOCKS > 1) cluster_barrier();
}
