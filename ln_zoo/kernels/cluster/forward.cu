// All time steps of LSTM, GRU or RNN in one launch, forward (see layout.h).
//
// In a step, the states of all units arrive, and each block multiplies them by its weights. Blocks
// exchange sums of squares of normalised rows, compute the gates, exchange sums over an LSTM's cell
// state, and send the new states to all blocks.

#include "exchange.h"
#include "terms.h"
#include "weights.h"

struct Arguments {
  const uint4 *high, *low;  // weights in fragments, [block][warp][tile][lane]
  const float* scale;       // factor of products
  const Stored* v;          // products of the inputs, (rows, GATES * H)
  float* stats;             // (rows, STATS); input statistics are read, the others written
  Operands operands;
  const float* dropout;     // (N, H)
  Held held;
  const u8* reset;          // (rows,)
  Sequence sequence;
  float *h, *c;             // states, (N, H), updated
  Stored *out, *u;          // u: saved for the backward pass, or null, as cells
  float* cells;             // (rows, H)
  float eps_recurrent, eps_out;
};

// Shared memory.
constexpr int GATE_PITCH = 8 * PITCH + 4;
constexpr int STAGE_RECIPROCALS = GATES * ROWS * STORED_PITCH * (int)sizeof(Stored);
constexpr int STAGE_BYTES = after(STAGE_RECIPROCALS, ROWS * INPUT_GROUPS * 4);
typedef RowSums<GROUPS> Squares;
typedef RowSums<2> Moments;
constexpr int AT_STATES = 0;
constexpr int AT_TERMS = after(AT_STATES, 2 * OPERANDS);
constexpr int AT_VECTORS = after(AT_TERMS, WARPS_K * GATES * GATE_PITCH * 4);
constexpr int AT_STAGES = after(AT_VECTORS, VECTORS_BYTES);
constexpr int AT_SQUARE_PARTS = after(AT_STAGES, STAGES * STAGE_BYTES);
constexpr int AT_MOMENT_PARTS = after(AT_SQUARE_PARTS, Squares::PART_BYTES);
constexpr int AT_SQUARES = after(AT_MOMENT_PARTS, Moments::PART_BYTES);
constexpr int AT_MOMENTS = after(AT_SQUARES, Squares::ALL_BYTES);
constexpr int AT_BARRIERS = after(AT_MOMENTS, Moments::ALL_BYTES);
constexpr int AT_WEIGHTS = after(AT_BARRIERS, 64);
static_assert(AT_WEIGHTS + WEIGHTS_BYTES == SHARED_BYTES, "the host computes the same layout");

// Prefetches v of later steps.
struct Inputs {
  static constexpr int COPIES = (GATES * ROWS * UNITS / COPIED + THREADS - 1) / THREADS;
  int from[COPIES];  // element within a step, or -1
  int to[COPIES];    // byte within a stage

  MEMBER Inputs(const Place& p, int examples) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int n = p.thread + i * THREADS, chunk = n % (UNITS / COPIED) * COPIED;
      const int row = n / (UNITS / COPIED) % ROWS, gate = n / (UNITS / COPIED) / ROWS;
      const int unit = p.rank * UNITS + chunk;
      const bool there = gate < GATES && unit < HIDDEN && p.first_row + row < examples;
      from[i] = there ? (p.first_row + row) * WIDTH + gate * HIDDEN + unit : -1;
      to[i] = ((gate * ROWS + row) * STORED_PITCH + chunk) * (int)sizeof(Stored);
    }
  }

  MEMBER void fetch(const Arguments& a, int t, int steps, unsigned char* stage,
                    const Place& p) const {
    if (t < steps) {
      const int first = a.sequence.first(t);
      const Stored* step = a.v + (long long)first * WIDTH;
#pragma unroll
      for (int i = 0; i < COPIES; ++i)
        if (from[i] >= 0 && (!LENGTHS || a.sequence.active(t, from[i] / WIDTH)))
          copy_ahead<COPY_BYTES>(shared_address(stage) + to[i], stage + to[i], step + from[i]);
      if (INPUT && p.thread < ROWS * INPUT_GROUPS) {
        const int example = p.first_row + p.thread / GROUPS;
        if (a.sequence.active(t, example))
          copy_async4(shared_address(stage) + STAGE_RECIPROCALS + p.thread * 4,
                      a.stats + (long long)(first + example) * STATS + p.thread % GROUPS);
      }
    }
    copy_commit();
  }
};

KERNEL(THREADS, BLOCKS) void forward(const Arguments a) {
  SHARED_MEMORY(memory);
  const Place p;
  const int example = p.example();
  const float scale = *a.scale;
  const Weights weights(a.high, a.low, memory + AT_WEIGHTS, p);
  float* terms = (float*)(memory + AT_TERMS);
  const float* vectors = (const float*)(memory + AT_VECTORS);
  const u32 base = shared_address(memory);
  const Inbox squares_in = {base + AT_BARRIERS, BLOCKS * Squares::COUNT * 4};
  const Inbox moments_in = {base + AT_BARRIERS + 8, BLOCKS * Moments::COUNT * 4};
  const u32 states_barrier = base + AT_BARRIERS + 16;
  constexpr u32 STATES_BYTES = SENT * ROWS * 2 * PIECES;

  for (int i = p.thread; i < AT_BARRIERS / 4; i += THREADS) ((u32*)memory)[i] = 0;
  block_barrier();
  a.operands.load((float*)(memory + AT_VECTORS), p);
  if (p.thread == 0 && BLOCKS > 1) {
    squares_in.start();
    moments_in.start();
    for (int parity = 0; parity < 2; ++parity)
      Inbox{states_barrier + 8 * parity, STATES_BYTES}.start();
    barrier_init_fence();
  }
  // The states before the first step: every block reads all of them.
  for (int i = p.thread; i < ROWS * SENT / 4; i += THREADS) {
    const int row = i / (SENT / 4), unit = i % (SENT / 4) * 4;
    float h[4];
    for (int e = 0; e < 4; ++e) {
      const bool there = unit + e < HIDDEN && p.first_row + row < a.sequence.examples;
      const int at = (p.first_row + row) * HIDDEN + unit + e;
      h[e] = there ? a.h[at] * (DROPOUT ? a.dropout[at] : 1.0f) : 0.0f;
    }
    Quartet(h).write(memory + AT_STATES + operand_offset(row, unit));
  }

  const int steps = a.sequence.length(p.first_row);
  const Inputs inputs(p, a.sequence.examples);
  inputs.fetch(a, 0, steps, memory + AT_STAGES, p);
  inputs.fetch(a, 1, steps, memory + AT_STAGES + STAGE_BYTES, p);
  float h[PAIRS], c[PAIRS], kept[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const bool there = p.owns(j) && example < a.sequence.examples;
    const int at = example * HIDDEN + p.global(j);
    h[j] = there ? a.h[at] : 0.0f;
    c[j] = there && CELL == LSTM ? a.c[at] : 0.0f;
    kept[j] = there && DROPOUT ? a.dropout[at] : 1.0f;
  }
  bool reset = RESETS && a.sequence.active(0, example) && a.reset[example];
  HeldAt<PAIRS> held;
  if (a.sequence.active(0, example)) held.load(a.held, 0, p);
  // No block may send before all are ready to receive.
  block_barrier();
  if (BLOCKS > 1) cluster_barrier();

  int stage = 0;
  float mean = 0.0f;  // of the cell states
  for (int t = 0; t < steps; ++t, stage = stage == STAGES - 1 ? 0 : stage + 1) {
    const int first = a.sequence.first(t);
    const bool active = a.sequence.active(t, example);
    if (t) Inbox{states_barrier + 8 * (t & 1), STATES_BYTES}.wait((t - 1) >> 1);
    if (weights.works) {
      const Weights::Sums sums = weights.product(memory + AT_STATES + (t & 1) * OPERANDS);
#pragma unroll
      for (int m = 0; m < OWN_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = (weights.warp_m * OWN_M + m) * 16 + (p.lane >> 2) + 8 * half;
          if (n >= PRODUCED) continue;
          float* to = terms + (weights.warp_k * GATES + n / UNITS) * GATE_PITCH +
                      2 * (p.lane & 3) * PITCH + n % UNITS;
          to[0] = sums(m, 2 * half, weights.column_scale) * scale;
          to[PITCH] = sums(m, 2 * half + 1, weights.column_scale) * scale;
        }
    }
    copy_wait<1>();
    block_barrier();

    const unsigned char* staged = memory + AT_STAGES + stage * STAGE_BYTES;
    float u[PAIRS][GATES], x[PAIRS][GATES];
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        float sum = 0.0f, v = 0.0f;
        if (p.inside(j)) {
#pragma unroll
          for (int part = 0; part < WARPS_K; ++part) {
            const float* from = terms + (part * GATES + k) * GATE_PITCH + p.local(j);
            sum += from[p.row * PITCH];
            if (SPLIT) sum += from[(p.row + 4) * PITCH];
          }
          v = load(((const Stored*)staged)[(k * ROWS + p.row) * STORED_PITCH + p.local(j)]);
        }
        if (RESETS && reset) sum = 0.0f;
        u[j][k] = MERGED ? v + sum : sum;
        x[j][k] = v;
      }
    if (RESETS && reset)
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) h[j] = 0.0f, c[j] = 0.0f;

    float ru[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) ru[n] = 1.0f;
    if (RECURRENT) {
      float squares[GROUPS];
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) squares[n] = 0.0f;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j)
#pragma unroll
        for (int k = 0; k < GATES; ++k) squares[group(k)] += p.owns(j) ? u[j][k] * u[j][k] : 0.0f;
      Squares::write(memory + AT_SQUARE_PARTS, p, squares);
      block_barrier();
      Squares::send(memory + AT_SQUARE_PARTS, base + AT_SQUARES, squares_in.barrier, p);
    }
    // Input terms need no other block.
    if (!MERGED) {
      const float* rv = (const float*)(staged + STAGE_RECIPROCALS) + p.row * GROUPS;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j)
#pragma unroll
        for (int k = 0; k < GATES; ++k)
          x[j][k] = AtUnit(vectors, p.inside(j) ? p.local(j) : 0)
                        .input(k, x[j][k], INPUT ? rv[group(k)] : 1.0f);
    }
    if (RECURRENT) {
      if (BLOCKS > 1) squares_in.wait(t);
      Squares::read(memory + AT_SQUARE_PARTS, memory + AT_SQUARES, p, ru);
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
        ru[n] = reciprocal_root(ru[n] * (1.0f / features(n)) + a.eps_recurrent);
    }

    float now[PAIRS], o[PAIRS], rc = 1.0f;
    // Relative to the mean of the previous step, to avoid cancellation in the variance. With one
    // unit, the mean is exact and the variance 0.
    const float centre = OUT == 2 && HIDDEN > 1 ? mean : 0.0f;
    float moments[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const AtUnit at(vectors, p.inside(j) ? p.local(j) : 0);
      float s[GATES];
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        s[k] = at.recurrent(k, u[j][k], ru[group(k)]);
        if (MERGED) x[j][k] = at[BIAS + k];
        if (CELL != GRU || k < 2) s[k] += x[j][k];
      }
      if constexpr (CELL == LSTM) {
        const LSTMGates<float> gates = lstm_gates(s[0], s[1], s[2], s[3]);
        now[j] = p.owns(j) ? next_cell(gates.i, gates.f, gates.g, c[j]) : 0.0f;
        o[j] = gates.o;
        const float apart = p.owns(j) ? now[j] - centre : 0.0f;
        moments[0] += apart, moments[1] += apart * apart;
      } else if constexpr (CELL == GRU) {
        const float w = s[2] + at[BIAS_CANDIDATE];
        now[j] = gru_state(gru_gates(s[0], s[1], x[j][2], w), h[j]);
      } else {
        now[j] = hyperbolic_tangent(s[0]);
      }
    }
    if constexpr (CELL == LSTM) {
      if (OUT) {
        Moments::write(memory + AT_MOMENT_PARTS, p, moments);
        block_barrier();
        Moments::send(memory + AT_MOMENT_PARTS, base + AT_MOMENTS, moments_in.barrier, p);
        if (BLOCKS > 1) moments_in.wait(t);
        Moments::read(memory + AT_MOMENT_PARTS, memory + AT_MOMENTS, p, moments);
        const float moved = OUT == 2 ? moments[0] * (1.0f / HIDDEN) : 0.0f;
        const float variance = moments[1] * (1.0f / HIDDEN) - moved * moved;
        mean = centre + moved;
        rc = reciprocal_root(larger(variance, 0.0f) + a.eps_out);
      }
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const AtUnit at(vectors, p.inside(j) ? p.local(j) : 0);
        const float cell = now[j];
        const float sum = OUT ? at[GAIN_OUT] * (cell - mean) * rc + at[SHIFT_OUT] : cell;
        now[j] = o[j] * hyperbolic_tangent(sum);
        if (active) c[j] = mixed(c[j], CARRIED ? sum : cell, held.of_c(a.held, j));
      }
    }
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
      if (active) h[j] = p.owns(j) ? mixed(h[j], now[j], held.of_h(a.held, j)) : 0.0f;

    if (t + 1 < steps) {
      const u32 states = base + AT_STATES + ((t + 1) & 1) * OPERANDS;
      const u32 barrier = states_barrier + 8 * ((t + 1) & 1);
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const Quartet four = Quartet::gather(DROPOUT ? h[j] * kept[j] : h[j], p.lane);
        const u32 to = states + operand_offset(p.row, p.global(j));
        // The four lanes of a quartet send it to different blocks.
        if (p.inside(j) && p.global(j) < SENT)
#pragma unroll
          for (int block = p.lane & 3; block < BLOCKS; block += 4) four.send(to, barrier, block);
      }
    }

    const int free = stage == 0 ? STAGES - 1 : stage - 1;  // the stage of the previous step
    inputs.fetch(a, t + 2, steps, memory + AT_STAGES + free * STAGE_BYTES, p);
    if (active) {
      const int row = first + example;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        if (!p.owns(j)) continue;
        const int unit = p.global(j);
        store(a.out + (row * HIDDEN + unit), h[j]);
        if (!a.u) continue;
#pragma unroll
        for (int k = 0; k < GATES; ++k) store(a.u + (row * WIDTH + k * HIDDEN + unit), u[j][k]);
        if (CELL == LSTM) a.cells[row * HIDDEN + unit] = c[j];
      }
      if (a.u && (RECURRENT || OUT) && p.rank == 0 && p.warp == 0 && p.leads()) {
        float* to = a.stats + row * STATS + INPUT_GROUPS;
#pragma unroll
        for (int n = 0; n < RECURRENT_GROUPS; ++n) to[n] = ru[n];
        if (OUT) to[RECURRENT_GROUPS] = rc;
        if (OUT == 2) to[RECURRENT_GROUPS + 1] = mean;
      }
    }
    // Keep the states of an ended sequence, even if its last step was a reset.
    reset = false;
    if (t + 1 < steps && a.sequence.active(t + 1, example)) {
      const int next = a.sequence.first(t + 1);
      if (RESETS) reset = a.reset[next + example];
      held.load(a.held, next, p);
    }
  }

#pragma unroll
  for (int j = 0; j < PAIRS; ++j)
    if (p.owns(j) && example < a.sequence.examples) {
      const int at = example * HIDDEN + p.global(j);
      a.h[at] = h[j];
      if (CELL == LSTM) a.c[at] = c[j];
    }
  // No block may exit while others may still send to it.
  if (BLOCKS > 1) cluster_barrier();
}
