// LSTM, GRUs and RNN between their products, forward and backward, for every norm. A row may be a
// part of one; all vectors over features then start at its first unit.

#pragma once

#include "arguments.h"

// Uses the functions of vectors.h.
#include "../equations.h"

namespace {

template <class Block>
inline void accumulate(Block block, float* to, int64_t j, vec a) {
  block.write(to + j, block.read(to + j) + a);
}

// d - a da. Without a norm da is 0, and the result is d for an infinite a too.
inline vec without(vec a, vec da, vec d) {
  return da == vec{} ? d : d - a * da;
}

// Norms of L units from unit j on, and the two means in the adjoint
// factor (d - mean d - a mean(d a)), with d the gradient of the normalised a.

struct OfRow {
  vec d, da;
  template <class Block>
  vec off(Block, vec d_j, vec a, int64_t) const {
    return without(a, da, d_j - d);
  }
};

struct OfColumns {
  const float *d, *da;
  template <class Block>
  vec off(Block block, vec d_j, vec a, int64_t j) const {
    return without(a, block.read(da + j), d_j - block.read(d + j));
  }
};

// A row whose mean is not subtracted.
struct Scaled {
  typedef OfRow Means;
  vec row_factor;
  Scaled() : Scaled(1.0f) {}
  explicit Scaled(float factor) : row_factor(all(factor)) {}
  template <class Block>
  vec factor(Block, int64_t) const {
    return row_factor;
  }
  template <class Block>
  vec normal(Block, vec a, int64_t) const {
    return row_factor * a;
  }
};

// A row whose mean is subtracted.
struct Centred : Scaled {
  vec mean;
  explicit Centred(const float* stats) : Scaled(stats[1]), mean(all(stats[0])) {}
  template <class Block>
  vec normal(Block, vec a, int64_t) const {
    return (a - mean) * row_factor;
  }
};

// Units that are normalised over examples.
struct Columns {
  typedef OfColumns Means;
  const float *mean, *factors;
  template <class Block>
  vec factor(Block block, int64_t j) const {
    return block.read(factors + j);
  }
  template <class Block>
  vec normal(Block block, vec a, int64_t j) const {
    return (a - block.read(mean + j)) * block.read(factors + j);
  }
  Columns from(int64_t unit) const { return {mean + unit, factors + unit}; }
};

// Norms of the products: one each, one of the sum, or none.
enum Norms { APART, JOINT, NO_NORMS };

// Pre-activations: rows of products, normalised by gate, with gain and bias. Strides of gates are H
// in v and `apart` in u. If norms are JOINT, u is the sum, and there is no v.
template <class Norm, Norms NORMS = APART>
struct Terms {
  static constexpr Norms norms = NORMS;
  const Steps& s;
  int64_t H, G, apart;
  const float *v, *u;
  Norm of_v[MAX_GATES], of_u[MAX_GATES];

  template <class Block>
  vec input(Block block, int64_t q, int64_t j) const {
    if constexpr (NORMS == JOINT) return vec{};
    return of_v[q].normal(block, block.read(v + q * H + j), j);
  }
  template <class Block>
  vec recurrent(Block block, int64_t q, int64_t j) const {
    return of_u[q].normal(block, block.read(u + q * apart + j), j);
  }
  template <class Block>
  vec scaled_input(Block block, int64_t q, vec a, int64_t j) const {
    const int64_t k = q * H + j;
    if constexpr (NORMS == JOINT) return block.read(s.bias + k);
    return block.read(s.bias + k) + block.read(s.gain_input + k) * a;
  }
  template <class Block>
  vec scaled_recurrent(Block block, int64_t q, vec b, int64_t j) const {
    return block.read(s.gain_recurrent + q * H + j) * b;
  }
  template <class Block>
  vec sum(Block block, int64_t q, int64_t j) const {
    return scaled_input(block, q, input(block, q, j), j) +
           scaled_recurrent(block, q, recurrent(block, q, j), j);
  }
  template <class Block>
  LSTMGates<vec> lstm(Block block, int64_t j) const {
    return lstm_gates(sum(block, 0, j), sum(block, 1, j), sum(block, 2, j), sum(block, 3, j));
  }
  void prefetch(int64_t j, bool kept) const {
    for (int64_t q = 0; q < G / H; q++) {
      if (NORMS != JOINT) ahead(v + q * H + j, G);
      if (kept) ahead(u + q * H + j, G);
    }
  }
};

// Sums (4H,) of both products without norms; replaced by the gates.
struct Summed {
  const float* bias;
  int64_t H;
  float* gates;
  template <class Block>
  LSTMGates<vec> lstm(Block block, int64_t j) const {
    const auto sum = [&](int64_t k) { return block.read(gates + k) + block.read(bias + k); };
    const LSTMGates<vec> p = lstm_gates(sum(j), sum(H + j), sum(2 * H + j), sum(3 * H + j));
    block.write(gates + j, p.i), block.write(gates + H + j, p.f);
    block.write(gates + 2 * H + j, p.g), block.write(gates + 3 * H + j, p.o);
    return p;
  }
  void prefetch(int64_t, bool) const {}
};

// The gates (4H,) written by `Summed`.
struct Gates {
  int64_t H;
  const float* gates;
  template <class Block>
  LSTMGates<vec> lstm(Block block, int64_t j) const {
    return {block.read(gates + j), block.read(gates + H + j), block.read(gates + 2 * H + j),
            block.read(gates + 3 * H + j)};
  }
  template <class Block>
  vec input(Block, int64_t, int64_t) const {
    return vec{};
  }
  template <class Block>
  vec recurrent(Block, int64_t, int64_t) const {
    return vec{};
  }
  void prefetch(int64_t, bool) const {}
};

// Write gradients of rows a to `to`, from gradients p of the normalised rows times a gain.
template <class Norm>
void adjoint(int64_t units, Norm norm, typename Norm::Means means, const float* gain,
             const float* a, const float* p, float* to) {
  for_units(units, [&](int64_t j, auto block) {
    vec x = norm.normal(block, block.read(a + j), j);
    vec d = block.read(gain + j) * block.read(p + j);
    block.write(to + j, norm.factor(block, j) * means.off(block, d, x, j));
  });
}

// LSTM (paper, eq. 20-22): gates i, f, g, o

template <class T>
void lstm_gates(const Shape& shape, T terms, const float* c_prev, float* c, float* o) {
  for_units(shape.units, [&](int64_t j, auto block) {
    terms.prefetch(j, false);
    const LSTMGates<vec> p = terms.lstm(block, j);
    block.write(c + j, next_cell(p.i, p.f, p.g, block.read(c_prev + j)));
    block.write(o + j, p.o);
  });
}

// If CARRIED, the normalised cell state replaces c.
template <bool CARRIED = false, class Norm>
void lstm_out(const Steps& s, const Shape& shape, Norm norm, float* c, const float* o, float* h) {
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a = norm.normal(block, block.read(c + j), j);
    vec z = block.read(s.gain_out + j) * a + block.read(s.shift_out + j);
    if (CARRIED) block.write(c + j, z);
    block.write(h + j, block.read(o + j) * hyperbolic_tangent(z));
  });
}

// The cell state before its norm: saved (KEPT), or recomputed because the saved one is after
// zoneout (ANEW) or normalised (CARRIED).
enum CellState { KEPT, ANEW, CARRIED };

// Gradients of o's pre-activation and the normalised cell state, from those of h; adds to
// `totals`. dc, the gradient of the carried state, is read if CARRIED.
template <CellState STATE, class T, class Norm, class Totals>
void lstm_out_back(const Steps& s, const Shape& shape, T terms, Norm norm, const float* c,
                   const float* c_prev, const float* dout, const float* dh, const float* dc,
                   float* dp, float* scratch, Totals& totals) {
  const int64_t H = shape.H, n = shape.units;
  float *gates = scratch, *e = scratch + 3 * n;
  for_units(n, [&](int64_t j, auto block) {
    terms.prefetch(j, true);
    ahead(c + j, H), ahead(c_prev + j, H), ahead(dout + j, H);
    const LSTMGates<vec> p = terms.lstm(block, j);
    block.write(gates + j, p.i);
    block.write(gates + n + j, p.f);
    block.write(gates + 2 * n + j, p.g);
    vec cell = STATE == KEPT ? block.read(c + j)
                             : next_cell(p.i, p.f, p.g, block.read(c_prev + j));
    vec a = block.keep(norm.normal(block, cell, j)), gain = block.read(s.gain_out + j);
    vec tau = hyperbolic_tangent(gain * a + block.read(s.shift_out + j));
    vec d = block.read(dout + j) + block.read(dh + j);
    OutputGrads<vec> grads = lstm_output_back(d, p.o, tau);
    if (STATE == CARRIED) grads.cell += block.read(dc + j);
    block.write(e + j, gain * grads.cell);
    totals.at_out(block, j, grads.cell, gain, a);
    block.write(dp + 3 * H + j, grads.gate);
  });
}

// Gradients dp (4H,) of all pre-activations and of the previous cell state, from these.
template <CellState STATE, class T, class Norm, class Totals>
void lstm_gates_back(const Shape& shape, T terms, Norm norm, typename Norm::Means means,
                     const float* c, const float* c_prev, float* dc, float* dp,
                     const float* scratch, Totals& totals) {
  const int64_t H = shape.H, n = shape.units;
  const float *gates = scratch, *e = scratch + 3 * n;
  for_units(n, [&](int64_t j, auto block) {
    vec i = block.read(gates + j), f = block.read(gates + n + j), g = block.read(gates + 2 * n + j);
    vec before = block.read(c_prev + j);
    vec cell = STATE == KEPT ? block.read(c + j) : next_cell(i, f, g, before);
    vec a = norm.normal(block, cell, j);
    vec d = norm.factor(block, j) * means.off(block, block.read(e + j), a, j);
    if (STATE != CARRIED) d += block.read(dc + j);
    block.write(dc + j, d * f);
    const CellGrads<vec> grads = next_cell_back(d, i, f, g, before);
    const vec p[4] = {grads.i, grads.f, grads.g, block.read(dp + 3 * H + j)};
    for (int64_t q = 0; q < 4; q++) {
      block.write(dp + q * H + j, p[q]);
      totals.at_gate(block, q, j, p[q], terms.input(block, q, j), p[q],
                     terms.recurrent(block, q, j));
    }
  });
}

// Light GRU: gates a, z

template <class T>
void light_gru_gates(const Shape& shape, T terms, const float* h_prev, float* h) {
  for_units(shape.units, [&](int64_t j, auto block) {
    const vec a = terms.sum(block, 0, j), z = terms.sum(block, 1, j);
    block.write(h + j, light_gru_state(a, z, block.read(h_prev + j)));
  });
}

// du (2H,), gradients of both pre-activations, and the part that bypasses them, from those of h.
template <class T, class Totals>
void light_gru_gates_back(const Shape& shape, T terms, const float* h_prev, const float* dout,
                          float* dh, float* du, Totals& totals) {
  for_units(shape.units, [&](int64_t j, auto block) {
    const vec a = terms.sum(block, 0, j), z = sigmoid(terms.sum(block, 1, j));
    vec d = block.read(dout + j) + block.read(dh + j);
    block.write(dh + j, d * z);
    const LightGRUGrads<vec> grads = light_gru_back(d, a, z, block.read(h_prev + j));
    const vec p[2] = {grads.a, grads.z};
    for (int64_t q = 0; q < 2; q++) {
      block.write(du + q * shape.H + j, p[q]);
      totals.at_gate(block, q, j, p[q], terms.input(block, q, j), p[q],
                     terms.recurrent(block, q, j));
    }
  });
}

// GRU (paper, eq. 26-28): gates r, z, n

struct GRUTerms {
  vec a[3], b[3], w;  // normalised terms; the recurrent term of n
  GRUGates<vec> gates;
  template <class Block, class T>
  GRUTerms(Block block, const Steps& s, const T& terms, int64_t j) {
    vec x[3], y[3];
    for (int64_t q = 0; q < 3; q++) {
      a[q] = terms.input(block, q, j), b[q] = terms.recurrent(block, q, j);
      x[q] = terms.scaled_input(block, q, a[q], j);
      y[q] = terms.scaled_recurrent(block, q, b[q], j);
    }
    w = y[2] + block.read(s.bias_hn + j);
    gates = gru_gates(x[0] + y[0], x[1] + y[1], x[2], w);
  }
};

template <class T>
void gru_gates(const Steps& s, const Shape& shape, T terms, const float* h_prev, float* h) {
  if (s.cell == LIGHT_GRU) return light_gru_gates(shape, terms, h_prev, h);
  for_units(shape.units, [&](int64_t j, auto block) {
    const GRUTerms p(block, s, terms, j);
    block.write(h + j, gru_state(p.gates, block.read(h_prev + j)));
  });
}

// dv and du (3H,), the gradients of all pre-activations, and the part that bypasses them, from
// gradients of h. In a light GRU dv equals du; only du is written.
template <class T, class Totals>
void gru_gates_back(const Steps& s, const Shape& shape, T terms, const float* h_prev,
                    const float* dout, float* dh, float* dv, float* du, Totals& totals) {
  const int64_t H = shape.H;
  if (s.cell == LIGHT_GRU) {
    return light_gru_gates_back(shape, terms, h_prev, dout, dh, du, totals);
  }
  for_units(shape.units, [&](int64_t j, auto block) {
    const GRUTerms p(block, s, terms, j);
    vec d = block.read(dout + j) + block.read(dh + j);
    block.write(dh + j, d * p.gates.z);
    const GRUGrads<vec> grads = gru_back(d, p.gates, p.w, block.read(h_prev + j));
    const vec dx[3] = {grads.r, grads.z, grads.n}, dy[3] = {grads.r, grads.z, grads.w};
    totals.at_bias_hn(block, j, dy[2]);
    for (int64_t q = 0; q < 3; q++) {
      if (T::norms != JOINT) block.write(dv + q * H + j, dx[q]);
      block.write(du + q * H + j, dy[q]);
      totals.at_gate(block, q, j, dx[q], p.a[q], dy[q], p.b[q]);
    }
  });
}

// Simple RNN (paper, eq. 4): u is the sum of both terms

template <class Norm>
void rnn_out(const Steps& s, const Shape& shape, Norm norm, const float* u, float* h) {
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a = norm.normal(block, block.read(u + j), j);
    vec p = block.read(s.gain_out + j) * a + block.read(s.bias + j);
    block.write(h + j, s.cell == RNN_RELU ? rectified(p) : hyperbolic_tangent(p));
  });
}

// du, the gradient of the normalised sum with gain and bias, from gradients of h.
template <class Norm, class Totals>
void rnn_out_back(const Steps& s, const Shape& shape, Norm norm, const float* u, const float* dout,
                  const float* dh, float* du, Totals& totals) {
  const vec zero{};
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a = block.keep(norm.normal(block, block.read(u + j), j)), gain = block.read(s.gain_out + j);
    vec p = gain * a + block.read(s.bias + j), tau = hyperbolic_tangent(p);
    vec d = block.read(dout + j) + block.read(dh + j);
    vec dp = s.cell == RNN_RELU ? (p <= zero ? zero : d) : d * (1.0f - tau * tau);
    block.write(du + j, dp);
    totals.at_out(block, j, dp, gain, a);
  });
}

}  // namespace
