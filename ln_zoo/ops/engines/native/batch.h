// Batch normalisation at each time step. Statistics are over examples, so that here threads share
// the units (shared.h): each takes its units of all examples, and all meet once a step, since the
// next product needs every h, or every du. No number depends on how many threads there are.

#pragma once

#include "steps.h"

// The statistics of one place, a row for each step; null where the place is not normalised.
struct Statistics {
  int64_t batch;      // whether they are the examples' own, which the forward fills in, or given
  float *mean, *var;  // (steps, F); mean null: it is zero; var: the forward's, where `batch`
  float* factor;      // (steps, F): reciprocal deviation
};

// What a call on consecutive steps reads and writes, in float32.
struct BatchSteps {
  int64_t cell, steps, examples, hidden, shares, correction;
  const int64_t* sizes;  // (steps,)
  double eps_recurrent, eps_out;
  Statistics input, recurrent, out;                           // of G, G and H features
  const float *bias, *bias_hn, *gain_input, *gain_recurrent;  // (G,), (H,), (G,), (G,)
  const float *gain_out, *shift_out;                          // (H,)
  const float* weight;                                        // packed by ln_zoo_share_pack
  // In a simple RNN u is the sum, where v was, and du is dv. What is kept of u is without its mean
  // where that is the examples' own.
  const float* v;    // (rows, G)
  float *u, *cells;  // (rows, G), (rows, H); forward: null where nothing is kept
  // The forward; h and c become the last states.
  float *output, *h, *c;  // (rows, H), (N, H), (N, H)
  // The backward; output_gradient may be null.
  const float *output_gradient, *h_prev, *c_prev;  // (rows, H)
  float *dh, *dc, *du, *dv;                        // (N, H), (N, H), (rows, G), (rows, G)
  float *dbias, *dbias_hn, *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out;
};

namespace {

// Mean, biased variance and reciprocal deviation of each column of a (n, width) block, rows
// `stride` apart; a mean of null stands for zeros, which then are not looked for.
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

// Means and reciprocal deviations at a place and step, of all its features.
struct Place {
  const float *mean, *factor;
};

Place place(const Statistics& s, int64_t t, int64_t features, const float* zeros,
            const float* ones) {
  return {s.mean ? s.mean + t * features : zeros, s.factor ? s.factor + t * features : ones};
}

// Fills in the statistics of step t, for a share's units of each gate of (n, ...) rows.
void gather(const BatchSteps& s, const Statistics& to, int64_t t, double eps, const Team& team,
            int64_t gates, const float* a, int64_t n, int64_t stride) {
  if (!to.batch) return;
  for (int64_t q = 0; q < gates; q++) {
    const int64_t k = t * gates * team.H + team.wide(q);
    column_statistics(a + q * team.count, n, stride, team.count, eps, s.correction, to.mean + k,
                      to.var + k, to.factor + k);
  }
}

// What the forward does to n examples once the products are there. `u` is the thread's (n, width).
void batch_lstm(const BatchSteps& s, const Team& team, const Place& pv, const Place& pu, int64_t n,
                const float* v, const float* u, float* c, float* o) {
  const int64_t G = 4 * team.H, w = team.count;
  for (int64_t i = 0; i < n; i++) {
    for_units(w, [&](int64_t j, auto block) {
      vec p[4];
      for (int64_t q = 0; q < 4; q++) {
        const int64_t k = team.wide(q) + j;
        vec a = (block.read(v + i * G + k) - block.read(pv.mean + k)) * block.read(pv.factor + k);
        vec b = (block.read(u + i * 4 * w + q * w + j) - block.read(pu.mean + k)) *
                block.read(pu.factor + k);
        p[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a +
               block.read(s.gain_recurrent + k) * b;
      }
      float* state = c + i * team.H + team.first + j;
      block.write(state,
                  sigmoid(p[1]) * block.read(state) + sigmoid(p[0]) * hyperbolic_tangent(p[2]));
      block.write(o + i * w + j, sigmoid(p[3]));
    });
  }
}

void batch_lstm_out(const BatchSteps& s, const Team& team, const Place& pc, int64_t n,
                    const float* c, const float* o, float* h) {
  for (int64_t i = 0; i < n; i++) {
    for_units(team.count, [&](int64_t j, auto block) {
      const int64_t k = team.first + j;
      vec a =
          (block.read(c + i * team.H + k) - block.read(pc.mean + k)) * block.read(pc.factor + k);
      vec z = block.read(s.gain_out + k) * a + block.read(s.shift_out + k);
      block.write(h + i * team.H + k, block.read(o + i * team.count + j) * hyperbolic_tangent(z));
    });
  }
}

void batch_gru(const BatchSteps& s, const Team& team, const Place& pv, const Place& pu, int64_t n,
               const float* v, const float* u, float* h) {
  const int64_t G = 3 * team.H, w = team.count;
  for (int64_t i = 0; i < n; i++) {
    for_units(w, [&](int64_t j, auto block) {
      vec x[3], y[3];
      for (int64_t q = 0; q < 3; q++) {
        const int64_t k = team.wide(q) + j;
        vec a = (block.read(v + i * G + k) - block.read(pv.mean + k)) * block.read(pv.factor + k);
        vec b = (block.read(u + i * 3 * w + q * w + j) - block.read(pu.mean + k)) *
                block.read(pu.factor + k);
        x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a;
        y[q] = block.read(s.gain_recurrent + k) * b;
      }
      float* state = h + i * team.H + team.first + j;
      vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
      vec c = hyperbolic_tangent(x[2] + reset * (y[2] + block.read(s.bias_hn + team.first + j)));
      block.write(state, c + update * (block.read(state) - c));
    });
  }
}

void batch_rnn(const BatchSteps& s, const Team& team, const Place& p, int64_t n, const float* u,
               float* h) {
  const vec zero{};
  for (int64_t i = 0; i < n; i++) {
    for_units(team.count, [&](int64_t j, auto block) {
      const int64_t k = team.first + j;
      vec a =
          (block.read(u + i * team.count + j) - block.read(p.mean + k)) * block.read(p.factor + k);
      vec z = block.read(s.gain_out + k) * a + block.read(s.bias + k);
      vec next = s.cell == RNN_RELU ? (z <= zero ? zero : z) : hyperbolic_tangent(z);
      block.write(h + i * team.H + k, next);
    });
  }
}

// Adds the columns of (n, count) blocks d and d a to sums over this step, and those to `bias` and
// `gain`; afterwards the sums hold the two means of the adjoint, with the gain in them.
struct ColumnSums {
  std::vector<float> d, da;
  explicit ColumnSums(int64_t width) : d(width), da(width) {}
  void clear() {
    std::fill(d.begin(), d.end(), 0.0f);
    std::fill(da.begin(), da.end(), 0.0f);
  }
  template <class Block>
  void add(Block block, int64_t j, vec d_j, vec a) {
    block.write(d.data() + j, block.read(d.data() + j) + d_j);
    block.write(da.data() + j, block.read(da.data() + j) + d_j * a);
  }
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
};

// du (or dv) = factor (gain p - mean - a mean_a) for one thread's units of one gate.
void batch_adjoint(int64_t n, int64_t count, const float* gain, const Place& at, int64_t k,
                   const float* mean, const float* mean_a, const float* a, int64_t a_stride,
                   const float* p, int64_t p_stride, float* to, int64_t stride) {
  for (int64_t i = 0; i < n; i++) {
    for_units(count, [&](int64_t j, auto block) {
      vec r = block.read(at.factor + k + j);
      vec x = (block.read(a + i * a_stride + j) - block.read(at.mean + k + j)) * r;
      vec d = block.read(gain + k + j) * block.read(p + i * p_stride + j);
      block.write(to + i * stride + j, r * (d - block.read(mean + j) - x * block.read(mean_a + j)));
    });
  }
}

void batch_forward(const BatchSteps& s) {
  const int64_t gates = gates_of(s.cell), H = s.hidden, G = gates * H;
  const std::vector<float> zeros(G), ones(G, 1.0f);
  struct Own {
    Team team;
    const float* weight;
    std::vector<float> u, o;
  };
  std::vector<Own> owns;
  const float* weight = s.weight;
  for (int64_t i = 0; i < s.shares; i++) {
    const Team team = team_of(i, s.shares, gates, H);
    owns.push_back({team, weight, std::vector<float>(s.examples * team.width()),
                    std::vector<float>(s.examples * team.count)});
    weight += packed_columns(H, team.width());
  }
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  const auto step = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const Team& team = own.team;
    const int64_t n = s.sizes[t], w = team.count, W = team.width();
    const float* before = t ? s.output + offsets[t - 1] * H : s.h;
    const float* v = s.v + offsets[t] * G;
    float *u = own.u.data(), *out = s.output + offsets[t] * H;
    product(n, W, H, Left<float>{before, H, 1}, own.weight, u, W, false);
    if (gates == 1) {
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          block.write(u + i * w + j,
                      block.read(u + i * w + j) + block.read(v + i * G + team.first + j));
        });
      }
    }
    const Place pv = place(s.input, t, G, zeros.data(), ones.data());
    const Place pu = place(s.recurrent, t, G, zeros.data(), ones.data());
    const Place pc = place(s.out, t, H, zeros.data(), ones.data());
    if (s.cell == LSTM) {
      gather(s, s.recurrent, t, s.eps_recurrent, team, 4, u, n, W);
      batch_lstm(s, team, pv, pu, n, v, u, s.c, own.o.data());
      gather(s, s.out, t, s.eps_out, team, 1, s.c + team.first, n, H);
      batch_lstm_out(s, team, pc, n, s.c, own.o.data(), out);
    } else if (s.cell == GRU) {
      gather(s, s.recurrent, t, s.eps_recurrent, team, 3, u, n, W);
      for (int64_t i = 0; i < n; i++) {
        std::memcpy(out + i * H + team.first, before + i * H + team.first, 4 * w);
      }
      batch_gru(s, team, pv, pu, n, v, u, out);
    } else {
      gather(s, s.out, t, s.eps_out, team, 1, u, n, W);
      batch_rnn(s, team, pc, n, u, out);
    }
    if (!s.u) return;
    const bool centered = gates == 1 ? s.out.batch : s.recurrent.batch;
    const float* mean = !centered ? zeros.data() : gates == 1 ? pc.mean : pu.mean;
    for (int64_t i = 0; i < n; i++) {
      for (int64_t q = 0; q < gates; q++) {
        const int64_t k = team.wide(q);
        for_units(w, [&](int64_t j, auto block) {
          block.write(s.u + (offsets[t] + i) * G + k + j,
                      block.read(u + i * W + q * w + j) - block.read(mean + k + j));
        });
      }
      if (s.cells) {
        std::memcpy(s.cells + (offsets[t] + i) * H + team.first, s.c + i * H + team.first, 4 * w);
      }
    }
  };
  by_steps(s.shares, s.steps, false, {step});
  // Each example's last output is its last state.
  for (int64_t t = 0; t < s.steps; t++) {
    const int64_t from = t + 1 < s.steps ? s.sizes[t + 1] : 0;
    std::memcpy(s.h + from * H, s.output + (offsets[t] + from) * H, 4 * H * (s.sizes[t] - from));
  }
}

void batch_backward(const BatchSteps& s) {
  const int64_t gates = gates_of(s.cell), H = s.hidden, G = gates * H, N = s.examples;
  const std::vector<float> zeros(G), ones(G, 1.0f);
  struct Own {
    Team team;
    const float* weight;
    // Of every example: gates, the gradient after the output's norm, and what goes into the sums.
    std::vector<float> act, e, dp, dq;
    ColumnSums sv, su, sc;
  };
  std::vector<Own> owns;
  const float* weight = s.weight;
  for (int64_t i = 0; i < s.shares; i++) {
    const Team team = team_of(i, s.shares, gates, H);
    const int64_t w = team.count, W = team.width();
    const auto rows = [&](int64_t width) { return std::vector<float>(N * width); };
    owns.push_back({team, weight, rows(3 * w), rows(w), rows(W), rows(W), ColumnSums(W),
                    ColumnSums(W), ColumnSums(w)});
    weight += packed_columns(G, w);
  }
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  const auto step = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const Team& team = own.team;
    const int64_t w = team.count, W = team.width(), first = team.first;
    std::vector<float>&act = own.act, &e = own.e, &dp = own.dp, &dq = own.dq;
    ColumnSums &sv = own.sv, &su = own.su, &sc = own.sc;
    const int64_t n = s.sizes[t], row = offsets[t];
    const float *v = s.v + row * G, *u = s.u + row * G;
    const float* dout = s.output_gradient ? s.output_gradient + row * H : nullptr;
    const Place pv = place(s.input, t, G, zeros.data(), ones.data());
    const Place pu = place(s.recurrent, t, G, zeros.data(), ones.data());
    const Place pc = place(s.out, t, H, zeros.data(), ones.data());
    const bool of_v = s.input.batch, of_u = s.recurrent.batch, of_c = s.out.batch;
    sv.clear(), su.clear(), sc.clear();
    const auto normal = [&](auto block, const Place& at, const float* a, int64_t k) {
      return (block.read(a + k) - block.read(at.mean + k)) * block.read(at.factor + k);
    };
    const auto gradient = [&](auto block, int64_t i, int64_t k) {
      vec d = block.read(s.dh + i * H + k);
      return dout ? d + block.read(dout + i * H + k) : d;
    };
    if (s.cell == LSTM) {
      const float *c = s.cells + row * H, *c_prev = s.c_prev + row * H;
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec p[4];
          for (int64_t q = 0; q < 4; q++) {
            const int64_t k = team.wide(q) + j;
            p[q] = block.read(s.bias + k) +
                   block.read(s.gain_input + k) * normal(block, pv, v + i * G, k) +
                   block.read(s.gain_recurrent + k) * normal(block, pu, u + i * G, k);
          }
          vec o = sigmoid(p[3]), a = normal(block, pc, c + i * H, unit);
          vec tau = hyperbolic_tangent(block.read(s.gain_out + unit) * a +
                                       block.read(s.shift_out + unit));
          float* at = act.data() + i * 3 * w + j;
          block.write(at, sigmoid(p[0]));
          block.write(at + w, sigmoid(p[1]));
          block.write(at + 2 * w, hyperbolic_tangent(p[2]));
          vec d = gradient(block, i, unit), dm = d * o * (1.0f - tau * tau);
          sc.add(block, j, dm, a);
          block.write(e.data() + i * w + j, dm);
          block.write(dp.data() + i * W + 3 * w + j, d * tau * o * (1.0f - o));
        });
      }
      sc.finish(0, w, of_c, n, s.correction, s.gain_out + first, s.dshift_out + first,
                s.dgain_out + first);
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec a = normal(block, pc, c + i * H, unit), r = block.read(pc.factor + unit);
          vec dm = block.read(s.gain_out + unit) * block.read(e.data() + i * w + j);
          float* dc = s.dc + i * H + unit;
          vec d = block.read(dc) +
                  r * (dm - block.read(sc.d.data() + j) - a * block.read(sc.da.data() + j));
          const float* at = act.data() + i * 3 * w + j;
          vec in = block.read(at), f = block.read(at + w), g = block.read(at + 2 * w);
          block.write(dc, d * f);
          float* to = dp.data() + i * W + j;
          const vec p[4] = {d * g * in * (1.0f - in),
                            d * block.read(c_prev + i * H + unit) * f * (1.0f - f),
                            d * in * (1.0f - g * g), block.read(to + 3 * w)};
          for (int64_t q = 0; q < 4; q++) {
            const int64_t k = team.wide(q) + j;
            block.write(to + q * w, p[q]);
            sv.add(block, q * w + j, p[q], normal(block, pv, v + i * G, k));
            su.add(block, q * w + j, p[q], normal(block, pu, u + i * G, k));
          }
        });
      }
    } else if (s.cell == GRU) {
      const float* h_prev = s.h_prev + row * H;
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec a[3], b[3], x[3], y[3];
          for (int64_t q = 0; q < 3; q++) {
            const int64_t k = team.wide(q) + j;
            a[q] = normal(block, pv, v + i * G, k), b[q] = normal(block, pu, u + i * G, k);
            x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a[q];
            y[q] = block.read(s.gain_recurrent + k) * b[q];
          }
          y[2] += block.read(s.bias_hn + unit);
          vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
          vec c = hyperbolic_tangent(x[2] + reset * y[2]), d = gradient(block, i, unit);
          block.write(s.dh + i * H + unit, d * update);
          vec dc = d * (1.0f - update) * (1.0f - c * c);
          vec dz = d * (block.read(h_prev + i * H + unit) - c) * update * (1.0f - update);
          vec dr = dc * y[2] * reset * (1.0f - reset);
          const vec dx[3] = {dr, dz, dc}, dy[3] = {dr, dz, dc * reset};
          for (int64_t q = 0; q < 3; q++) {
            block.write(dp.data() + i * W + q * w + j, dx[q]);
            block.write(dq.data() + i * W + q * w + j, dy[q]);
            sv.add(block, q * w + j, dx[q], a[q]);
            su.add(block, q * w + j, dy[q], b[q]);
          }
        });
      }
      for (int64_t j = 0; j < w; j++) s.dbias_hn[first + j] += su.d[2 * w + j];
    } else {
      const vec zero{};
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec a = normal(block, pc, u + i * H, unit);
          vec z = block.read(s.gain_out + unit) * a + block.read(s.bias + unit);
          vec tau = hyperbolic_tangent(z), d = gradient(block, i, unit);
          vec p = s.cell == RNN_RELU ? (z > zero ? d : zero) : d * (1.0f - tau * tau);
          block.write(dp.data() + i * w + j, p);
          sc.add(block, j, p, a);
        });
      }
      sc.finish(0, w, of_c, n, s.correction, s.gain_out + first, s.dbias + first,
                s.dgain_out + first);
      batch_adjoint(n, w, s.gain_out, pc, first, sc.d.data(), sc.da.data(), u + first, H, dp.data(),
                    w, s.du + row * G + first, G);
    }
    if (gates > 1) {
      const float* second = s.cell == GRU ? dq.data() : dp.data();
      for (int64_t q = 0; q < gates; q++) {
        const int64_t k = team.wide(q);
        sv.finish(q * w, w, of_v, n, s.correction, s.gain_input + k, s.dbias + k,
                  s.dgain_input + k);
        su.finish(q * w, w, of_u, n, s.correction, s.gain_recurrent + k, nullptr,
                  s.dgain_recurrent + k);
        batch_adjoint(n, w, s.gain_input, pv, k, sv.d.data() + q * w, sv.da.data() + q * w, v + k,
                      G, dp.data() + q * w, W, s.dv + row * G + k, G);
        batch_adjoint(n, w, s.gain_recurrent, pu, k, su.d.data() + q * w, su.da.data() + q * w,
                      u + k, G, second + q * w, W, s.du + row * G + k, G);
      }
    }
  };
  const auto state = [&](int64_t share, int64_t t) {
    const Own& own = owns[share];
    const Left<float> du{s.du + offsets[t] * G, G, 1};
    product(s.sizes[t], own.team.count, G, du, own.weight, s.dh + own.team.first, H, s.cell == GRU);
  };
  by_steps(s.shares, s.steps, true, {step, state});
}

}  // namespace

extern "C" {

// Variances and reciprocal deviations of v (rows, G), whose means are zero, over the examples of
// each step.
void ln_zoo_batch_inputs(const BatchSteps* call, const float* v, double eps) {
  const BatchSteps& s = *call;
  const int64_t G = gates_of(s.cell) * s.hidden;
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  const int64_t threads = threads_for(s.shares, s.steps);
  in_parallel(threads, [&](int64_t i) {
    for (int64_t t = s.steps * i / threads; t < s.steps * (i + 1) / threads; t++) {
      column_statistics(v + offsets[t] * G, s.sizes[t], G, G, eps, s.correction, nullptr,
                        s.input.var + t * G, s.input.factor + t * G);
    }
  });
}

void ln_zoo_batch_forward(const BatchSteps* s) { batch_forward(*s); }

void ln_zoo_batch_backward(const BatchSteps* s) { batch_backward(*s); }

}  // extern "C"
