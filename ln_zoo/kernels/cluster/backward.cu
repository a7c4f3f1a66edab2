// Backward pass through all time steps of LSTM, GRU or RNN in one launch (see layout.h).
//
// In a step, each block multiplies the gradients of its gates by its weights and sends each other
// block the part of dh of its units. Meanwhile, values of the forward pass are recomputed from v
// and u.
//
// With u = R h, r its reciprocal deviation, a = r u, and d the gradient of a:
//   R' du = R' (r d) - r^2 mean(d a) (R' u)
// The product needs no sum over the row, so the mean is exchanged concurrently; R' u is given.

#include "exchange.h"
#include "terms.h"
#include "weights.h"

struct Arguments {
  const uint4 *high, *low;  // weights in fragments, [block][warp][tile][lane]
  const float* scale;       // factor of products
  const Stored *v, *u;      // saved by the forward pass, (rows, GATES * H)
  const float* stats;       // (rows, STATS)
  Operands operands;
  const float* dropout;     // (N, H)
  Held held;
  const u8* reset;          // (rows,)
  Sequence sequence;
  const Stored *dout;       // (rows, H), or null for 0
  const Stored *h_before;   // a GRU's states before each step, (rows, H)
  const float* c_before;    // an LSTM's cell states before each step, (rows, H)
  const float* c_after;     // and after it
  const Stored *back;       // R' u, (rows, GROUPS, H), where the recurrent site normalises
  float *dh, *dc;           // gradients of states, (N, H), updated
  float* work;              // gradients of the gates' sums, (rows, WORK, H); or, unnormalised:
  Stored *du, *dv;          // (rows, GATES * H); dv only of a GRU that is not joint
  float* biases;            // gradients of biases by example, (N, WORK, H), unless normalised
  float *gain_out, *shift_out;  // gradients by example, (N, H)
};

constexpr bool NORMALIZED = INPUT || RECURRENT;
constexpr int WORK = CELL == GRU ? 4 : GATES;

// A recomputed cell state differs by rounding from the one whose statistics were saved, and
// division by its deviation may amplify that. Under zoneout, or after a norm, another state is
// saved.
constexpr bool KEEPS_CELL = OUT && !ZONEOUT && !CARRIED;
constexpr int CELL_PLANES = CELL == LSTM ? 1 + KEEPS_CELL : 0;

// Shared memory. Planes of a stage: u, v, dout, the GRU's h, R' u; then the LSTM's cell states.
constexpr int PLANE_V = GATES, PLANE_DOUT = MERGED ? GATES : 2 * GATES;
constexpr int PLANE_H = PLANE_DOUT + 1, PLANE_BACK = PLANE_H + (CELL == GRU ? 1 : 0);
constexpr int PLANES = PLANE_BACK + RECURRENT_GROUPS;
constexpr int STAGE_CELLS = after(0, PLANES * ROWS * STORED_PITCH * (int)sizeof(Stored));
constexpr int STAGE_STATS = after(STAGE_CELLS, CELL_PLANES * ROWS * PITCH * 4);
constexpr int STAGE_BYTES = after(STAGE_STATS, ROWS * STATS * 4);
constexpr int PART_BYTES = BLOCKS * WARPS_K * UNITS * ROWS * 4;
typedef RowSums<2> Moments;
typedef RowSums<GROUPS> Means;
constexpr int AT_OPERANDS = 0;
constexpr int AT_PARTS = after(AT_OPERANDS, 2 * OPERANDS);  // of dh: [parity][block][warp k][unit][row]
constexpr int AT_VECTORS = after(AT_PARTS, 2 * PART_BYTES);
constexpr int AT_STAGES = after(AT_VECTORS, VECTORS_BYTES);
constexpr int AT_MEAN_PARTS = after(AT_STAGES, STAGES * STAGE_BYTES);
constexpr int AT_MOMENT_PARTS = after(AT_MEAN_PARTS, 2 * Means::PART_BYTES);
constexpr int AT_MEANS = after(AT_MOMENT_PARTS, Moments::PART_BYTES);
constexpr int AT_MOMENTS = after(AT_MEANS, 2 * Means::ALL_BYTES);
constexpr int AT_MAXIMA = after(AT_MOMENTS, Moments::ALL_BYTES);  // [parity][row]
constexpr int AT_SCALES = after(AT_MAXIMA, 64);                   // [parity][row]
constexpr int AT_BARRIERS = after(AT_SCALES, 64);
constexpr int AT_WEIGHTS = after(AT_BARRIERS, 64);
static_assert(AT_WEIGHTS + WEIGHTS_BYTES == SHARED_BYTES, "the host computes the same layout");
static_assert((BLOCKS - 1) * UNITS < HIDDEN, "each block has units, and so waits for its parts");

// Prefetches saved tensors and output gradients of earlier steps.
struct Inputs {
  static constexpr int COPIES = (PLANES * ROWS * UNITS / COPIED + THREADS - 1) / THREADS;
  static constexpr int CELL_COPIES =
      (CELL_PLANES * ROWS * UNITS / COPY_FLOATS + THREADS - 1) / THREADS;
  const Stored* from[COPIES];
  int pitch[COPIES];  // elements from row to row
  int to[COPIES];     // byte within a stage
  int examples[LENGTHS ? COPIES : 1];

  MEMBER Inputs(const Arguments& a, const Place& p) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int n = p.thread + i * THREADS, chunk = n % (UNITS / COPIED) * COPIED;
      const int row = n / (UNITS / COPIED) % ROWS, plane = n / (UNITS / COPIED) / ROWS;
      const int unit = p.rank * UNITS + chunk, example = p.first_row + row;
      pitch[i] = HIDDEN;
      const Stored* start = nullptr;
      if (plane < PLANE_DOUT) {
        pitch[i] = WIDTH;
        start = plane < GATES ? a.u + plane * HIDDEN : a.v + (plane - GATES) * HIDDEN;
      } else if (plane == PLANE_DOUT) {
        start = a.dout;
      } else if (plane < PLANE_BACK) {
        start = a.h_before;
      } else if (plane < PLANES) {
        pitch[i] = RECURRENT_GROUPS * HIDDEN;
        start = a.back + (plane - PLANE_BACK) * HIDDEN;
      }
      if (unit >= HIDDEN || example >= a.sequence.examples) start = nullptr;
      from[i] = start ? start + (long long)example * pitch[i] + unit : nullptr;
      to[i] = ((plane * ROWS + row) * STORED_PITCH + chunk) * (int)sizeof(Stored);
      if (LENGTHS) examples[LENGTHS ? i : 0] = example;
    }
  }

  MEMBER void fetch(const Arguments& a, int t, unsigned char* stage, const Place& p) const {
    if (t >= 0) {
      const int first = a.sequence.first(t);
#pragma unroll
      for (int i = 0; i < COPIES; ++i)
        if (from[i] && (!LENGTHS || a.sequence.active(t, examples[LENGTHS ? i : 0])))
          copy_ahead<COPY_BYTES>(shared_address(stage) + to[i], stage + to[i],
                                 from[i] + (long long)first * pitch[i]);
#pragma unroll
      for (int i = 0; i < CELL_COPIES; ++i) {
        const int n = p.thread + i * THREADS, chunk = n % (UNITS / COPY_FLOATS) * COPY_FLOATS;
        const int plane = n / (UNITS / COPY_FLOATS) / ROWS, unit = p.rank * UNITS + chunk;
        const int row = n / (UNITS / COPY_FLOATS) % ROWS;
        const int to = STAGE_CELLS + ((plane * ROWS + row) * PITCH + chunk) * 4;
        const float* cells = plane ? a.c_after : a.c_before;
        if (plane < CELL_PLANES && unit < HIDDEN && a.sequence.active(t, p.first_row + row))
          copy_ahead<COPY_FLOATS * 4>(
              shared_address(stage) + to, stage + to,
              cells + (long long)(first + p.first_row + row) * HIDDEN + unit);
      }
      if (STATS && p.thread < ROWS * STATS) {
        const int example = p.first_row + p.thread / (STATS ? STATS : 1);
        if (a.sequence.active(t, example))
          copy_async4(shared_address(stage) + STAGE_STATS + p.thread * 4,
                      a.stats + (long long)(first + p.first_row) * STATS + p.thread);
      }
    }
    copy_commit();
  }
};

KERNEL(THREADS, BLOCKS) void backward(const Arguments a) {
  SHARED_MEMORY(memory);
  const Place p;
  const int example = p.example();
  const float scale = *a.scale;
  const Weights weights(a.high, a.low, memory + AT_WEIGHTS, p);
  const float* vectors = (const float*)(memory + AT_VECTORS);
  float* scales = (float*)(memory + AT_SCALES);
  const u32 base = shared_address(memory);
  // Units of this block for which others send parts.
  const int received = smaller(SENT - p.rank * UNITS, UNITS);
  const u32 parts_bytes = BLOCKS * ROWS * 4 * (WARPS_K * received + RECURRENT_GROUPS);
  const Inbox moments_in = {base + AT_BARRIERS, BLOCKS * Moments::COUNT * 4};
  const u32 parts_barrier = base + AT_BARRIERS + 8;

  for (int i = p.thread; i < AT_BARRIERS / 4; i += THREADS) ((u32*)memory)[i] = 0;
  block_barrier();
  a.operands.load((float*)(memory + AT_VECTORS), p);
  if (p.thread == 0 && BLOCKS > 1) {
    moments_in.start();
    for (int parity = 0; parity < 2; ++parity)
      Inbox{parts_barrier + 8 * parity, parts_bytes}.start();
    barrier_init_fence();
  }

  const int steps = a.sequence.length(p.first_row);
  const Inputs inputs(a, p);
  inputs.fetch(a, steps - 1, memory + AT_STAGES, p);
  inputs.fetch(a, steps - 2, memory + AT_STAGES + STAGE_BYTES, p);
  // Gradients of the states after a step; the part that bypasses the products; R' u of the next
  // step.
  float dh[PAIRS], dc[PAIRS], passed[PAIRS], back[PAIRS][GROUPS], kept[PAIRS];
  float gain_out[PAIRS], shift_out[PAIRS], biases[PAIRS][NORMALIZED ? 1 : WORK];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const bool there = p.owns(j) && example < a.sequence.examples;
    const int at = example * HIDDEN + p.global(j);
    dh[j] = there ? a.dh[at] : 0.0f;
    dc[j] = there && CELL == LSTM ? a.dc[at] : 0.0f;
    kept[j] = there && DROPOUT ? a.dropout[at] : 1.0f;
    passed[j] = gain_out[j] = shift_out[j] = 0.0f;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) back[j][n] = 0.0f;
    for (float& bias : biases[j]) bias = 0.0f;
  }
  bool reset = false, was_reset = false, was_active = false;
  HeldAt<PAIRS> held;
  if (a.sequence.active(steps - 1, example)) {
    const int first = a.sequence.first(steps - 1);
    if (RESETS) reset = a.reset[first + example];
    held.load(a.held, first, p);
  }
  copy_wait<1>();
  block_barrier();
  if (BLOCKS > 1) cluster_barrier();

  int stage = 0;
  for (int n = 0; n <= steps; ++n, stage = stage == STAGES - 1 ? 0 : stage + 1) {
    const int t = steps - 1 - n, parity = n & 1;
    const bool active = t >= 0 && a.sequence.active(t, example);
    const unsigned char* staged = memory + AT_STAGES + stage * STAGE_BYTES;
    const auto plane = [&](int k, int j) {
      const int unit = p.inside(j) ? p.local(j) : 0;
      return load(((const Stored*)staged)[(k * ROWS + p.row) * STORED_PITCH + unit]);
    };
    const float* stats = (const float*)(staged + STAGE_STATS) + p.row * STATS;

    // Values that depend on the forward pass only.
    float ru[GROUPS], rv[GROUPS], rc = 1.0f, mean = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      rv[g] = INPUT ? stats[g] : 1.0f;
      ru[g] = RECURRENT ? stats[INPUT_GROUPS + g] : 1.0f;
    }
    if (OUT) rc = stats[INPUT_GROUPS + RECURRENT_GROUPS];
    if (OUT == 2) mean = stats[INPUT_GROUPS + RECURRENT_GROUPS + 1];
    LSTMGates<float> lstm[PAIRS];
    GRUGates<float> gru[PAIRS];
    float w[PAIRS];  // of a GRU's candidate
    float normal[PAIRS], tau[PAIRS], before[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const AtUnit at(vectors, p.inside(j) ? p.local(j) : 0);
      float s[GATES], x[GATES];
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        s[k] = at.recurrent(k, plane(k, j), ru[group(k)]);
        x[k] = MERGED ? at[BIAS + k] : at.input(k, plane(PLANE_V + k, j), rv[group(k)]);
        if (CELL != GRU || k < 2) s[k] += x[k];
      }
      if constexpr (CELL == LSTM) {
        const int unit = p.inside(j) ? p.local(j) : 0;
        const float* cells = (const float*)(staged + STAGE_CELLS) + p.row * PITCH + unit;
        before[j] = cells[0];
        lstm[j] = lstm_gates(s[0], s[1], s[2], s[3]);
        const float cell = KEEPS_CELL ? cells[ROWS * PITCH]
                                      : next_cell(lstm[j].i, lstm[j].f, lstm[j].g, before[j]);
        normal[j] = (cell - mean) * rc;
        tau[j] = hyperbolic_tangent(OUT ? at[GAIN_OUT] * normal[j] + at[SHIFT_OUT] : normal[j]);
      } else if constexpr (CELL == GRU) {
        before[j] = plane(PLANE_H, j);
        w[j] = s[2] + at[BIAS_CANDIDATE];
        gru[j] = gru_gates(s[0], s[1], x[2], w[j]);
      } else {
        tau[j] = hyperbolic_tangent(s[0]);
      }
    }

    if (n) {
      Inbox{parts_barrier + 8 * (parity ^ 1), parts_bytes}.wait((n - 1) >> 1);
      const int old = parity ^ 1;
      float means[GROUPS];
      if (RECURRENT)
        Means::read(memory + AT_MEAN_PARTS + old * Means::PART_BYTES,
                    memory + AT_MEANS + old * Means::ALL_BYTES, p, means);
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        float even = 0.0f, odd = 0.0f;
        if (p.inside(j) && p.local(j) < received) {
          const float* from = (const float*)(memory + AT_PARTS + old * PART_BYTES) +
                              p.local(j) * ROWS + p.row;
#pragma unroll
          for (int e = 0; e < BLOCKS * WARPS_K; ++e)
            (e % 2 ? odd : even) += from[e * UNITS * ROWS];
        }
        float through = even + odd;
        if (RECURRENT)
#pragma unroll
          for (int g = 0; g < GROUPS; ++g) through -= means[g] * back[j][g];
        if (DROPOUT) through *= kept[j];
        if (!LENGTHS || was_active) dh[j] = RESETS && was_reset ? 0.0f : passed[j] + through;
      }
    }
    if (t < 0) break;

    float dm[PAIRS], d_o[PAIRS], moments[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const float share = held.of_h(a.held, j);
      const float d = active && p.owns(j) ? dh[j] + plane(PLANE_DOUT, j) : 0.0f;
      passed[j] = ZONEOUT ? d * share : 0.0f;
      dm[j] = passing(d, share);  // gradient of the new h
#pragma unroll
      for (int g = 0; g < RECURRENT_GROUPS; ++g)
        back[j][g] = active && p.owns(j) ? plane(PLANE_BACK + g, j) : 0.0f;
      if constexpr (CELL == LSTM) {
        const OutputGrads<float> grads = lstm_output_back(dm[j], lstm[j].o, tau[j]);
        d_o[j] = grads.gate, dm[j] = grads.cell;
        if (OUT) {
          if (CARRIED) dm[j] += passing(dc[j], held.of_c(a.held, j));
          if (active && p.owns(j)) gain_out[j] += dm[j] * normal[j], shift_out[j] += dm[j];
          // Rounded once, so that it cancels exactly with its mean if they are equal.
          dm[j] *= AtUnit(vectors, p.inside(j) ? p.local(j) : 0)[GAIN_OUT];
          moments[0] += dm[j], moments[1] += p.owns(j) ? dm[j] * normal[j] : 0.0f;
        }
      }
    }
    if (CELL == LSTM && OUT) {
      Moments::write(memory + AT_MOMENT_PARTS, p, moments);
      block_barrier();
      Moments::send(memory + AT_MOMENT_PARTS, base + AT_MOMENTS, moments_in.barrier, p);
    }
    const int free = stage == 0 ? STAGES - 1 : stage - 1;  // the stage of the next step
    inputs.fetch(a, t - 2, memory + AT_STAGES + free * STAGE_BYTES, p);
    if (CELL == LSTM && OUT) {
      if (BLOCKS > 1) moments_in.wait(n);
      Moments::read(memory + AT_MOMENT_PARTS, memory + AT_MOMENTS, p, moments);
      moments[0] = OUT == 2 ? moments[0] * (1.0f / HIDDEN) : 0.0f;
      moments[1] *= 1.0f / HIDDEN;
    }

    // Gradients of pre-activations, then of the normalised recurrent terms.
    float d[PAIRS][GATES], largest = 0.0f, sums[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) sums[g] = 0.0f;
    const int row = a.sequence.first(t) + example;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const AtUnit at(vectors, p.inside(j) ? p.local(j) : 0);
      const bool there = active && p.owns(j);
      float candidate = 0.0f;  // of a GRU's input term
      if constexpr (CELL == LSTM) {
        const float share = held.of_c(a.held, j), all = dc[j];
        float cell = CARRIED ? 0.0f : passing(all, share);
        cell += OUT ? rc * (dm[j] - moments[0] - normal[j] * moments[1]) : dm[j];
        if (!there) cell = 0.0f;
        const CellGrads<float> grads = 
            next_cell_back(cell, lstm[j].i, lstm[j].f, lstm[j].g, before[j]);
        d[j][0] = grads.i, d[j][1] = grads.f, d[j][2] = grads.g, d[j][3] = d_o[j];
        if (there) {
          dc[j] = cell * lstm[j].f + (ZONEOUT ? all * share : 0.0f);
          if (RESETS && reset) dc[j] = 0.0f;
        }
      } else if constexpr (CELL == GRU) {
        const GRUGrads<float> grads = gru_back(dm[j], gru[j], w[j], before[j]);
        d[j][0] = grads.r, d[j][1] = grads.z, d[j][2] = grads.w;
        candidate = grads.n;
        passed[j] += dm[j] * gru[j].z;
      } else {
        d[j][0] = dm[j] * (1.0f - tau[j] * tau[j]);
      }
      if (!there) {
#pragma unroll
        for (int k = 0; k < GATES; ++k) d[j][k] = 0.0f;
      } else if (NORMALIZED) {
        float* to = a.work + (long long)row * WORK * HIDDEN + p.global(j);
#pragma unroll
        for (int k = 0; k < GATES; ++k)
          to[k * HIDDEN] = CELL == GRU && k == 2 ? candidate : d[j][k];
        if (CELL == GRU) to[3 * HIDDEN] = d[j][2 < GATES ? 2 : 0];
      } else {
        const long long to = (long long)row * WIDTH + p.global(j);
#pragma unroll
        for (int k = 0; k < GATES; ++k) {
          const float d_in = CELL == GRU && !JOINT && k == 2 ? candidate : d[j][k];
          store(a.du + to + k * HIDDEN, d[j][k]);
          if (CELL == GRU && !JOINT) store(a.dv + to + k * HIDDEN, d_in);
          biases[j][NORMALIZED ? 0 : k] += d_in;
        }
        if (CELL == GRU) biases[j][NORMALIZED ? 0 : WORK - 1] += d[j][2 < GATES ? 2 : 0];
      }
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        if (RECURRENT && there) {
          const float through = d[j][k] * at[GAIN_RECURRENT + k] * ru[group(k)];
          sums[group(k)] += through * plane(k, j);
          d[j][k] = through;
        }
        largest = larger(largest, magnitude(d[j][k]));
      }
    }
    if (RECURRENT) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) sums[g] *= ru[g] * ru[g] * (1.0f / features(g));
      Means::write(memory + AT_MEAN_PARTS + parity * Means::PART_BYTES, p, sums);
    }
    // Limited range of halves: each row has its own power-of-two scale.
    if (!BRAIN) {
      largest = row_max(largest);
      if (p.leads())
        shared_max(base + AT_MAXIMA + (parity * ROWS + p.row) * 4, float_bits(largest));
      if (p.thread < ROWS) ((u32*)(memory + AT_MAXIMA))[(parity ^ 1) * ROWS + p.thread] = 0;
    }
    if (RECURRENT || !BRAIN) block_barrier();
    if (RECURRENT)
      Means::send(memory + AT_MEAN_PARTS + parity * Means::PART_BYTES,
                  base + AT_MEANS + parity * Means::ALL_BYTES, parts_barrier + 8 * parity, p);
    float up = 1.0f, down = scale;
    if (!BRAIN) {
      const u32 largest_bits = ((const u32*)(memory + AT_MAXIMA))[parity * ROWS + p.row];
      int exponent = largest_bits >> 23;
      exponent = exponent < 2 ? 2 : exponent > 252 ? 252 : exponent;
      up = bits_float((254 - exponent) << 23), down = bits_float(exponent << 23) * scale;
    }
    if (p.warp == 0 && p.leads()) scales[parity * ROWS + p.row] = down;
    unsigned char* operands = memory + AT_OPERANDS + parity * OPERANDS;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      if (!p.inside(j)) continue;
      if constexpr (GATES == 4) {
        const float four[4] = {d[j][0] * up, d[j][1] * up, d[j][2] * up, d[j][3] * up};
        Quartet(four).write(operands + operand_offset(p.row, 4 * p.local(j)));
      } else {
#pragma unroll
        for (int k = 0; k < GATES; ++k)
          write_operand(operands, p.row, GATES * p.local(j) + k, d[j][k] * up);
      }
    }

    was_active = active, was_reset = reset;
    if (t > 0 && a.sequence.active(t - 1, example)) {
      const int first = a.sequence.first(t - 1);
      if (RESETS) reset = a.reset[first + example];
      held.load(a.held, first, p);
    }
    copy_wait<1>();
    block_barrier();
    if (weights.works) {
      const Weights::Sums sums = weights.product(operands);
      send_parts(weights, sums, scales + parity * ROWS, base + AT_PARTS + parity * PART_BYTES,
                 parts_barrier + 8 * parity, p);
    }
  }

#pragma unroll
  for (int j = 0; j < PAIRS; ++j)
    if (p.owns(j) && example < a.sequence.examples) {
      const int at = example * HIDDEN + p.global(j);
      a.dh[at] = dh[j];
      if (CELL == LSTM) a.dc[at] = dc[j];
      if (OUT) a.gain_out[at] = gain_out[j], a.shift_out[at] = shift_out[j];
#pragma unroll
      for (int k = 0; k < WORK && !NORMALIZED; ++k)
        a.biases[(example * WORK + k) * HIDDEN + p.global(j)] = biases[j][NORMALIZED ? 0 : k];
    }
  if (BLOCKS > 1) cluster_barrier();
}
