// Batch normalisation at each time step. Statistics are over examples, so threads split the units
// (split_units.h) and synchronise once per step (twice in the backward pass), since the next
// product needs every h or du. Results do not depend on the number of threads.

#pragma once

#include "steps.h"

namespace {

// Mean, biased variance and reciprocal deviation of each column of a (n, width) block with row
// stride `stride`; a null mean is 0 and not computed.
void column_statistics(const float* a, int64_t n, int64_t stride, int64_t width, double eps,
                       int64_t correction, float* mean, float* var, float* factor) {
  const float share = 1.0f / float(n), spread = float(n) / float(n - correction);
  if (mean) {
    std::fill(mean, mean + width, 0.0f);
    for (int64_t i = 0; i < n; i++) {
      for_units(width, [&](int64_t j, auto block) {
        block.write(mean + j, block.read(mean + j) + block.read(a + i * stride + j));
      });
    }
    for (int64_t j = 0; j < width; j++) mean[j] *= share;
  }
  std::fill(var, var + width, 0.0f);
  for (int64_t i = 0; i < n; i++) {
    for_units(width, [&](int64_t j, auto block) {
      vec d = block.read(a + i * stride + j);
      if (mean) d -= block.read(mean + j);
      block.write(var + j, block.read(var + j) + d * d);
    });
  }
  const float small = float(eps);
  for (int64_t j = 0; j < width; j++) {
    var[j] *= share;
    factor[j] = 1.0f / std::sqrt(var[j] * spread + small);
  }
}

// Statistics of a place at step t, from a unit on.
Columns at_step(const Statistics& s, int64_t t, int64_t features, int64_t unit, const float* zeros,
                const float* ones) {
  const int64_t at = t * features + unit;
  return {s.mean ? s.mean + at : zeros, s.factor ? s.factor + at : ones};
}

// The places of a step for one share; a simple RNN's products are not normalised.
struct BatchPlaces {
  Columns input, recurrent, out;
  BatchPlaces(const Batch& b, const Shape& shape, const Team& team, int64_t t, const float* zeros,
              const float* ones)
      : input(at_step(b.input, t, shape.G, team.first, zeros, ones)),
        recurrent(at_step(b.recurrent, t, shape.G, team.first, zeros, ones)),
        out(at_step(b.out, t, shape.H, team.first, zeros, ones)) {}
  // Terms of a row; `apart` is the stride of u's gates.
  Terms<Columns> terms(const Steps& s, const Shape& shape, const float* v, const float* u,
                       int64_t apart) const {
    Terms<Columns> found{s, shape.H, shape.G, apart, v, u, {}, {}};
    for (int64_t q = 0; q < shape.gates; q++) {
      found.of_v[q] = input.from(q * shape.H), found.of_u[q] = recurrent.from(q * shape.H);
    }
    return found;
  }
};

// Compute the statistics of step t, for a share's units of each gate.
void gather(const Batch& b, const Statistics& to, int64_t t, double eps, const Team& team,
            int64_t gates, const float* a, int64_t n, int64_t stride) {
  if (!to.batch) return;
  for (int64_t q = 0; q < gates; q++) {
    const int64_t k = t * gates * team.H + team.wide(q);
    column_statistics(a + q * team.count, n, stride, team.count, eps, b.correction, to.mean + k,
                      to.var + k, to.factor + k);
  }
}

// Variances and reciprocal deviations of centred v (rows, G) over the examples of each step.
void batch_inputs(const Steps& s, const Batch& b, const std::vector<int64_t>& offsets) {
  const int64_t G = gates_of(s.cell) * s.hidden, threads = threads_for(s.shares, s.steps);
  in_parallel(threads, [&](int64_t i) {
    for (int64_t t = s.steps * i / threads; t < s.steps * (i + 1) / threads; t++) {
      column_statistics(static_cast<float*>(s.v) + offsets[t] * G, s.sizes[t], G, G, s.input.eps,
                        b.correction, nullptr, b.input.var + t * G, b.input.factor + t * G);
    }
  });
}

void batch_forward(const Steps& s, const Batch& b) {
  const Shape shape(s);
  const int64_t gates = shape.gates, H = shape.H, G = shape.G;
  const bool merged = gates == 1;
  const std::vector<float> zeros(G), ones(G, 1.0f);
  const std::vector<int64_t> offsets = first_rows(s);
  if (b.input.batch) batch_inputs(s, b, offsets);
  struct Own : Share {
    using Share::Share;
    std::vector<float> u, o;
  };
  std::vector<Own> owns;
  const float* weights = static_cast<const float*>(s.weight);
  for (int64_t i = 0; i < s.shares; i++) {
    Own& own = owns.emplace_back(s, shape, i, weights, false);
    own.u.resize(s.examples * own.team.width()), own.o.resize(s.examples * own.team.count);
  }
  float *const output = static_cast<float*>(s.output), *const kept = static_cast<float*>(s.u);
  const auto step = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const Team& team = own.team;
    const int64_t n = s.sizes[t], w = team.count, W = team.width(), first = team.first;
    const float* before = t ? output + offsets[t - 1] * H : s.h;
    const float* v = static_cast<float*>(s.v) + offsets[t] * G + first;
    float *u = own.u.data(), *o = own.o.data(), *c = s.c + first;
    float* h = output + offsets[t] * H + first;
    product(n, W, H, Left<float>{before, H, 1}, own.weight, u, W, false);
    for (int64_t i = 0; merged && i < n; i++) add(v + i * G, u + i * w, w);
    const BatchPlaces places(b, shape, team, t, zeros.data(), ones.data());
    const Statistics& last = merged ? b.out : b.recurrent;
    gather(b, last, t, merged ? s.out.eps : s.recurrent.eps, team, gates, u, n, W);
    for (int64_t i = 0; i < n; i++) {
      const Terms<Columns> terms = places.terms(own.s, own.shape, v + i * G, u + i * W, w);
      if (s.cell == LSTM) {
        lstm_gates(own.shape, terms, c + i * H, c + i * H, o + i * w);
      } else if (s.cell == GRU) {
        gru_gates(own.s, own.shape, terms, before + i * H + first, h + i * H);
      } else {
        rnn_out(own.s, own.shape, places.out, u + i * w, h + i * H);
      }
    }
    if (s.cell == LSTM) {
      gather(b, b.out, t, s.out.eps, team, 1, c, n, H);
      for (int64_t i = 0; i < n; i++) {
        lstm_out(own.s, own.shape, places.out, c + i * H, o + i * w, h + i * H);
      }
    }
    if (!kept) return;
    const Columns& place = merged ? places.out : places.recurrent;
    const float* mean = last.batch ? place.mean : zeros.data();
    for (int64_t i = 0; i < n; i++) {
      const int64_t row = offsets[t] + i;
      for (int64_t q = 0; q < gates; q++) {
        float* to = kept + row * G + team.wide(q);
        for_units(w, [&](int64_t j, auto block) {
          const int64_t k = last.batch ? q * H + j : j;
          block.write(to + j, block.read(u + i * W + q * w + j) - block.read(mean + k));
        });
      }
      if (s.cells) copy(c + i * H, w, s.cells + row * H + first);
    }
  };
  by_steps(s.shares, s.steps, false, {step});
  // Each example's last output is its last state.
  for (int64_t t = 0; t < s.steps; t++) {
    const int64_t from = t + 1 < s.steps ? s.sizes[t + 1] : 0;
    copy(output + (offsets[t] + from) * H, H * (s.sizes[t] - from), s.h + from * H);
  }
}

// Sums over the examples of a step of columns d and d a; then the two means of the adjoint, times
// the gain.
struct ColumnSums {
  std::vector<float> d, da;
  explicit ColumnSums(int64_t width) : d(width), da(width) {}
  void clear() {
    std::fill(d.begin(), d.end(), 0.0f);
    std::fill(da.begin(), da.end(), 0.0f);
  }
  template <class Block>
  void add(Block block, int64_t j, vec d_j, vec a) {
    accumulate(block, d.data(), j, d_j);
    accumulate(block, da.data(), j, d_j * a);
  }
  // Add to `bias_sum`, unless null, and `gain_sum`.
  void finish(int64_t from, int64_t count, bool computed, int64_t n, int64_t correction,
              const float* gain, float* bias_sum, float* gain_sum) {
    for (int64_t j = 0; j < count; j++) {
      float &x = d[from + j], &y = da[from + j];
      if (bias_sum) bias_sum[j] += x;
      gain_sum[j] += y;
      x = computed ? gain[j] * x / float(n) : 0.0f;
      y = computed ? gain[j] * y / float(n - correction) : 0.0f;
    }
  }
  OfColumns of(int64_t from) const { return {d.data() + from, da.data() + from}; }
};

// Sums over the rows of a step, as `RowTotals`.
struct ColumnTotals {
  int64_t count;
  ColumnSums v, u, out;
  explicit ColumnTotals(const Team& team)
      : count(team.count), v(team.width()), u(team.width()), out(team.count) {}
  void clear() { v.clear(), u.clear(), out.clear(); }

  template <class Block>
  void at_out(Block block, int64_t j, vec d, vec, vec a) {
    out.add(block, j, d, a);
  }
  template <class Block>
  void at_gate(Block block, int64_t q, int64_t j, vec dv, vec a, vec du, vec b) {
    v.add(block, q * count + j, dv, a), u.add(block, q * count + j, du, b);
  }
  template <class Block>
  void at_bias_hn(Block, int64_t, vec) {}
};

void batch_backward(const Steps& s, const Batch& b) {
  const Shape shape(s);
  const int64_t gates = shape.gates, H = shape.H, G = shape.G;
  const std::vector<float> zeros(G), ones(G, 1.0f);
  const std::vector<int64_t> offsets = first_rows(s);
  struct Own : Share {
    ColumnTotals totals;
    std::vector<float> scratch;  // (N, 4, units)
    Own(const Steps& call, const Shape& whole, int64_t share, const float*& weights)
        : Share(call, whole, share, weights, true),
          totals(team),
          scratch(call.cell == LSTM ? call.examples * 4 * team.count : 0) {}
  };
  std::vector<Own> owns;
  const float* weights = static_cast<const float*>(s.weight);
  for (int64_t i = 0; i < s.shares; i++) owns.emplace_back(s, shape, i, weights);
  const auto step = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const Team& team = own.team;
    ColumnTotals& totals = own.totals;
    const int64_t n = s.sizes[t], w = team.count, first = team.first;
    const int64_t g = offsets[t] * G + first, h = offsets[t] * H + first;
    const float *v = static_cast<const float*>(s.v) + g, *u = static_cast<const float*>(s.u) + g;
    float *du = static_cast<float*>(s.du) + g, *dv = static_cast<float*>(s.dv) + g;
    const float* douts = static_cast<const float*>(s.output_gradient);
    const float* h_prev = static_cast<const float*>(s.h_prev);
    const BatchPlaces places(b, shape, team, t, zeros.data(), ones.data());
    totals.clear();
    for (int64_t i = 0; i < n; i++) {
      const int64_t k = i * G, j = i * H;
      const Terms<Columns> terms = places.terms(own.s, own.shape, v + k, u + k, H);
      const float* dout = douts ? douts + h + j : zeros.data();
      float* dh = s.dh + j + first;
      if (s.cell == LSTM) {
        lstm_out_back<KEPT>(own.s, own.shape, terms, places.out, s.cells + h + j, s.c_prev + h + j,
                             dout, dh, nullptr, du + k, own.scratch.data() + i * 4 * w, totals);
      } else if (s.cell == GRU) {
        gru_gates_back(own.s, own.shape, terms, h_prev + h + j, dout, dh, dv + k, du + k, totals);
      } else {
        rnn_out_back(own.s, own.shape, places.out, u + k, dout, dh, du + k, totals);
      }
    }
    if (s.cell == GRU) {
      for (int64_t j = 0; j < w; j++) s.dbias_hn[first + j] += totals.u.d[2 * w + j];
    } else {
      float* shift = s.cell == LSTM ? s.dshift_out : s.dbias;
      totals.out.finish(0, w, b.out.batch, n, b.correction, own.s.gain_out, shift + first,
                        s.dgain_out + first);
    }
    for (int64_t i = 0; i < n; i++) {
      const int64_t k = i * G, j = h + i * H;
      if (s.cell == LSTM) {
        const Terms<Columns> terms = places.terms(own.s, own.shape, v + k, u + k, H);
        lstm_gates_back<KEPT>(own.shape, terms, places.out, totals.out.of(0), s.cells + j,
                               s.c_prev + j, s.dc + i * H + first, du + k,
                               own.scratch.data() + i * 4 * w, totals);
      } else if (gates == 1) {
        adjoint(w, places.out, totals.out.of(0), own.s.gain_out, u + k, du + k, du + k);
      }
    }
    const float* pv = s.cell == GRU ? dv : du;
    for (int64_t q = 0; gates > 1 && q < gates; q++) {
      const int64_t k = q * H, wide = k + first;
      const float *gain_v = own.s.gain_input + k, *gain_u = own.s.gain_recurrent + k;
      totals.v.finish(q * w, w, b.input.batch, n, b.correction, gain_v, s.dbias + wide,
                      s.dgain_input + wide);
      totals.u.finish(q * w, w, b.recurrent.batch, n, b.correction, gain_u, nullptr,
                      s.dgain_recurrent + wide);
      for (int64_t i = k; i < n * G + k; i += G) {
        adjoint(w, places.input.from(k), totals.v.of(q * w), gain_v, v + i, pv + i, dv + i);
        adjoint(w, places.recurrent.from(k), totals.u.of(q * w), gain_u, u + i, du + i, du + i);
      }
    }
  };
  const auto state = [&](int64_t share, int64_t t) {
    const Own& own = owns[share];
    const Left<float> du{static_cast<float*>(s.du) + offsets[t] * G, G, 1};
    product(s.sizes[t], own.team.count, G, du, own.weight, s.dh + own.team.first, H, s.cell == GRU);
  };
  by_steps(s.shares, s.steps, true, {step, state});
}

}  // namespace

extern "C" {

void ln_zoo_batch_forward(const Steps* s, const Batch* b) { batch_forward(*s, *b); }

void ln_zoo_batch_backward(const Steps* s, const Batch* b) { batch_backward(*s, *b); }

}  // extern "C"
