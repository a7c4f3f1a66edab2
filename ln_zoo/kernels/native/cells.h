// One row of one step of a cell, forward and backward.

#pragma once

#include "pointwise.h"

namespace {

inline float reciprocal_deviation(double sum, int64_t n, double eps) {
  return float(1.0 / std::sqrt(sum / double(n) + eps));
}

// One past the last gate that shares statistics with gate q, the first of its group.
inline int64_t group_end(const Rows& rows, int64_t gates, int64_t q) {
  int64_t end = q + 1;
  while (end < gates && rows.groups[end] == rows.groups[q]) end++;
  return end;
}

// Reciprocal deviation of each gate of a row of products; no mean is subtracted.
void deviations(const Rows& rows, const float* a, int64_t gates, int64_t H, float* r) {
  std::fill(r, r + gates, 1.0f);
  if (!rows.scale) return;
  for (int64_t q = 0, end; q < gates; q = end) {
    end = group_end(rows, gates, q);
    const int64_t n = (end - q) * H;
    std::fill(r + q, r + end, reciprocal_deviation(sum_of_squares(a + q * H, n), n, rows.eps));
  }
}

inline void copy(const float* from, int64_t n, float* to) { std::copy_n(from, n, to); }

// Mean subtracted from a row, and the sum of squares of the rest.
struct Moments {
  float mean = 0.0f, squares = 0.0f;
};

Moments moments(const Rows& rows, const float* a, int64_t n) {
  Moments found;
  if (rows.center) {
    vec sum{};
    for_units(n, [&](int64_t j, auto block) { sum += block.read(a + j); });
    found.mean = total(sum) / float(n);
  }
  const vec center = all(found.mean);
  vec squares{};
  for_units(n, [&](int64_t j, auto block) {
    vec d = block.keep(block.read(a + j) - center);
    squares += d * d;
  });
  found.squares = total(squares);
  return found;
}

// Mean and reciprocal deviation of a row, to stats (2,).
void mean_and_deviation(const Rows& rows, const float* a, int64_t n, float* stats) {
  stats[0] = 0.0f, stats[1] = 1.0f;
  if (!rows.scale) return;
  const Moments found = moments(rows, a, n);
  stats[0] = found.mean, stats[1] = reciprocal_deviation(found.squares, n, rows.eps);
}

// The two means in the adjoint r (d - mean d - a mean(d a)) of a normalisation, gate by gate, from
// sums over the gates; 0 where not applicable.
struct Means {
  vec d[MAX_GATES] = {}, da[MAX_GATES] = {};
  float mean_d[MAX_GATES], mean_da[MAX_GATES];

  void add(int64_t q, vec d_q, vec a) {
    d[q] += d_q;
    da[q] += d_q * a;
  }
  void finish(const Rows& rows, int64_t gates, int64_t H) {
    for (int64_t q = 0, end; q < gates; q = end) {
      end = group_end(rows, gates, q);
      vec sum{}, product{};
      for (int64_t k = q; k < end; k++) sum += d[k], product += da[k];
      set(rows, q, end, H, total(sum), total(product));
    }
  }
  void set(const Rows& rows, int64_t q, int64_t end, int64_t H, float sum, float product) {
    const float n = float((end - q) * H);
    std::fill(mean_d + q, mean_d + end, rows.scale && rows.center ? sum / n : 0.0f);
    std::fill(mean_da + q, mean_da + end, rows.scale ? product / n : 0.0f);
  }
  OfRow of(int64_t q) const { return {all(mean_d[q]), all(mean_da[q])}; }
};

// Forward, one row of one step: u holds the recurrent product, h and c the states before and after.

// Terms of a row or a part of it; `stats` as saved.
template <Norms NORMS>
Terms<Scaled, NORMS> terms_of(const Steps& s, const Shape& shape, const float* stats,
                              const float* v, const float* u, int64_t apart) {
  Terms<Scaled, NORMS> found{s, shape.H, shape.G, apart, v, u, {}, {}};
  for (int64_t q = 0; q < shape.gates; q++) {
    found.of_v[q] = Scaled(stats[q]), found.of_u[q] = Scaled(stats[MAX_GATES + q]);
  }
  return found;
}

// Call body with the terms of the cell's norms.
template <class Body>
inline void with_terms(const Steps& s, const Shape& shape, const float* stats, const float* v,
                       const float* u, int64_t apart, Body body) {
  s.joint ? body(terms_of<JOINT>(s, shape, stats, v, u, apart))
          : body(terms_of<APART>(s, shape, stats, v, u, apart));
}

// Call body with a constant: which cell state an LSTM normalises; `held`: zoneout of c.
template <class Body>
inline void with_state(const Steps& s, bool held, Body body) {
  if (s.carried) return body(std::integral_constant<CellState, CARRIED>());
  held ? body(std::integral_constant<CellState, ANEW>())
       : body(std::integral_constant<CellState, KEPT>());
}

void product_deviations(const Steps& s, const Shape& shape, const float* v, const float* u,
                        float* stats) {
  deviations(s.input, v, shape.gates, shape.H, stats);  // of joint cells: 1
  deviations(s.recurrent, u, shape.gates, shape.H, stats + MAX_GATES);
}

void lstm_row(const Steps& s, const Shape& shape, const float* v, const float* u, float* h,
              float* c, float* stats, float* o) {
  product_deviations(s, shape, v, u, stats);
  with_terms(s, shape, stats, v, u, shape.H,
             [&](const auto& terms) { lstm_gates(shape, terms, c, c, o); });
  float* at_out = stats + 2 * MAX_GATES;
  mean_and_deviation(s.out, c, shape.H, at_out);
  s.carried ? lstm_out<true>(s, shape, Centred(at_out), c, o, h)
            : lstm_out<false>(s, shape, Centred(at_out), c, o, h);
}

void gru_row(const Steps& s, const Shape& shape, const float* v, const float* u, float* h,
             float* stats) {
  product_deviations(s, shape, v, u, stats);
  with_terms(s, shape, stats, v, u, shape.H,
             [&](const auto& terms) { gru_gates(s, shape, terms, h, h); });
}

void rnn_row(const Steps& s, const Shape& shape, const float* u, float* h, float* stats) {
  float* at_out = stats + 2 * MAX_GATES;
  mean_and_deviation(s.out, u, shape.H, at_out);
  rnn_out(s, shape, Centred(at_out), u, h);
}

// Zoneout of one row of a state: a mask, or the expected share.
struct Zoneout {
  const bool* mask;
  float share;
  explicit operator bool() const { return mask || share; }

  // Restore kept elements.
  void hold(const float* before, float* after, int64_t H) const {
    for_units(H, [&](int64_t j, auto block) {
      vec old = block.read(before + j), now = block.read(after + j);
      vec held = mask ? (flags(mask + j, H - j) != 0 ? old : now) : now + share * (old - now);
      block.write(after + j, held);
    });
  }
  // Split off the part of a gradient that bypasses the step.
  void pass(float* d, float* passed, int64_t H) const {
    const vec zero{};
    for_units(H, [&](int64_t j, auto block) {
      vec whole = block.read(d + j);
      vec by = mask ? (flags(mask + j, H - j) != 0 ? whole : zero) : share * whole;
      block.write(passed + j, by);
      block.write(d + j, whole - by);
    });
  }
};

// to (H,) += a (H,).
inline void add(const float* a, float* to, int64_t H) {
  for_units(H, [&](int64_t j, auto block) {
    block.write(to + j, block.read(to + j) + block.read(a + j));
  });
}

inline Zoneout zoneout_h(const Steps& s, int64_t row) {
  return {s.zoneout_h ? s.zoneout_h + row * s.hidden : nullptr, float(s.share_h)};
}
inline Zoneout zoneout_c(const Steps& s, int64_t row) {
  return {s.zoneout_c ? s.zoneout_c + row * s.hidden : nullptr, float(s.share_c)};
}

// Scratch memory per row, forward and backward, in units of H.
constexpr int64_t ROOM = 3, ROOM_BACK = 7;

void forward_row(const Steps& s, const Shape& shape, int64_t row, const float* v, const float* u,
                 float* h, float* c, float* stats, float* scratch) {
  const int64_t H = shape.H;
  const Zoneout of_h = zoneout_h(s, row), of_c = zoneout_c(s, row);
  float *h_before = scratch + H, *c_before = scratch + 2 * H;
  if (of_h) std::memcpy(h_before, h, 4 * H);
  if (of_c) std::memcpy(c_before, c, 4 * H);
  switch (s.cell) {
    case LSTM: lstm_row(s, shape, v, u, h, c, stats, scratch); break;
    case GRU:
    case LIGHT_GRU: gru_row(s, shape, v, u, h, stats); break;
    default: rnn_row(s, shape, u, h, stats);
  }
  if (of_h) of_h.hold(h_before, h, H);
  if (of_c) of_c.hold(c_before, c, H);
}

// Backward, one row of one step (formulas: aten/steps.py, aten/normalization.py). dh and dc are
// gradients of the states after the step, replaced by gradients of the states before it, without
// the part of dh through du.

// If rows are as long as a page, the elements of one unit in several vectors map to one set of the
// first-level cache, which has eight lines. Vectors that are read together start at different
// lines.
class Spread {
 public:
  explicit Spread(std::initializer_list<int64_t> sizes) {
    int64_t total = PAGE;
    for (int64_t size : sizes) total += (size + PAGE - 1) / PAGE * PAGE + PAGE;
    memory_.resize(total);
    const intptr_t address = reinterpret_cast<intptr_t>(memory_.data()) / 4;
    float* next = memory_.data() + (-address & (PAGE - 1));
    int64_t line = FIRST_LINE;
    for (int64_t size : sizes) {
      vectors_.push_back(next + line++ * 16);
      next += (size + PAGE - 1) / PAGE * PAGE + PAGE;
    }
  }
  float* operator[](int64_t i) const { return vectors_[i]; }

 private:
  static constexpr int64_t PAGE = 1024;     // floats
  static constexpr int64_t FIRST_LINE = 4;  // rows start at the first ones
  std::vector<float> memory_;
  std::vector<float*> vectors_;
};

// Sums over rows: gradients of vectors.
struct SumsAt {
  float *bias, *gain_input, *gain_recurrent, *bias_hn, *gain_out, *shift_out;
};

struct Sums : SumsAt {  // of one thread
  Spread memory;
  explicit Sums(const Shape& shape)
      : memory({shape.G, shape.G, shape.G, shape.H, shape.H, shape.H}) {
    bias = memory[0], gain_input = memory[1], gain_recurrent = memory[2];
    bias_hn = memory[3], gain_out = memory[4], shift_out = memory[5];
  }
  // Advance by this many units.
  void move(int64_t units) {
    for (float** p : {&bias, &gain_input, &gain_recurrent, &bias_hn, &gain_out, &shift_out}) {
      *p += units;
    }
  }
};

// Add the sums of the threads to the call's, in thread order, for reproducible results.
void add(const std::vector<Sums>& sums, const Shape& shape, const Steps& to) {
  for (const Sums& part : sums) {
    for (int64_t k = 0; k < shape.G; k++) {
      to.dbias[k] += part.bias[k];
      to.dgain_input[k] += part.gain_input[k];
      to.dgain_recurrent[k] += part.gain_recurrent[k];
    }
    for (int64_t j = 0; j < shape.H; j++) {
      to.dbias_hn[j] += part.bias_hn[j];
      to.dgain_out[j] += part.gain_out[j];
      to.dshift_out[j] += part.shift_out[j];
    }
  }
}

// A call's arguments with vectors copied to different sets of the cache.
struct Spaced {
  Steps steps;
  Spread memory;
  Spaced(const Steps& s, const Shape& shape)
      : steps(s), memory({0, 0, 0, shape.G, shape.G, shape.G, shape.H, shape.H, shape.H}) {
    const auto move = [&](int64_t i, const float*& vector, int64_t size) {
      std::memcpy(memory[i], vector, 4 * size);
      vector = memory[i];
    };
    move(3, steps.bias, shape.G);
    move(4, steps.gain_input, shape.G);
    move(5, steps.gain_recurrent, shape.G);
    move(6, steps.bias_hn, shape.H);
    move(7, steps.gain_out, shape.H);
    move(8, steps.shift_out, shape.H);
  }
};

// Contributions of a row to sums over rows, and to the means in the adjoints of its norms.
template <Norms NORMS = APART>
struct RowTotals {
  const Steps& s;
  const int64_t H;
  const SumsAt& sums;
  float* const shift;
  Means v, u, out;
  RowTotals(const Steps& s, const Shape& shape, const SumsAt& sums)
      : s(s), H(shape.H), sums(sums), shift(s.cell == LSTM ? sums.shift_out : sums.bias) {}

  template <class Block>
  void at_out(Block block, int64_t j, vec d, vec gain, vec a) {
    accumulate(block, shift, j, d);
    accumulate(block, sums.gain_out, j, d * a);
    out.add(0, gain * d, a);
  }
  template <class Block>
  void at_gate(Block block, int64_t q, int64_t j, vec dv, vec a, vec du, vec b) {
    const int64_t k = q * H + j;
    accumulate(block, sums.bias, k, dv);
    if (NORMS == NO_NORMS) return;
    if (NORMS == APART) {
      accumulate(block, sums.gain_input, k, dv * a);
      v.add(q, block.read(s.gain_input + k) * dv, a);
    }
    accumulate(block, sums.gain_recurrent, k, du * b);
    u.add(q, block.read(s.gain_recurrent + k) * du, b);
  }
  template <class Block>
  void at_bias_hn(Block block, int64_t j, vec d) {
    accumulate(block, sums.bias_hn, j, d);
  }
};

// dv and du from the gradients of normalised sums times gains: for u in du, for v in pv.
template <Norms NORMS>
void adjoints(const Steps& s, const Shape& shape, const Terms<Scaled, NORMS>& terms,
              const Means& mv, const Means& mu, const float* pv, float* dv, float* du) {
  for (int64_t q = 0; q < shape.gates; q++) {
    const int64_t k = q * shape.H;
    if (NORMS == APART)
      adjoint(shape.units, terms.of_v[q], mv.of(q), s.gain_input + k, terms.v + k, pv + k, dv + k);
    adjoint(shape.units, terms.of_u[q], mu.of(q), s.gain_recurrent + k, terms.u + k, du + k,
            du + k);
  }
}

template <CellState STATE, Norms NORMS>
void lstm_row_back(const Steps& s, const Shape& shape, const Terms<Scaled, NORMS>& terms,
                   const float* c, const float* c_prev, const float* stats, const float* dout,
                   float* dh, float* dc, float* du, RowTotals<NORMS>& totals, float* scratch) {
  const Centred norm(stats + 2 * MAX_GATES);
  lstm_out_back<STATE>(s, shape, terms, norm, c, c_prev, dout, dh, dc, du, scratch, totals);
  totals.out.finish(s.out, 1, shape.H);
  lstm_gates_back<STATE>(shape, terms, norm, totals.out.of(0), c, c_prev, dc, du, scratch, totals);
}

void rnn_row_back(const Steps& s, const Shape& shape, const float* u, const float* stats,
                  const float* dout, const float* dh, float* du, RowTotals<>& totals) {
  const Centred norm(stats + 2 * MAX_GATES);
  rnn_out_back(s, shape, norm, u, dout, dh, du, totals);
  totals.out.finish(s.out, 1, shape.H);
  adjoint(shape.units, norm, totals.out.of(0), s.gain_out, u, du, du);
}

void backward_row(const Steps& s, const Shape& shape, int64_t row, int64_t n, const float* v,
                  const float* u, const float* h_prev, const float* dout, float* dh, float* dv,
                  float* du, Sums& sums, float* scratch) {
  const int64_t H = shape.H;
  const float* stats = s.stats + row * STATS;
  const Zoneout of_h = zoneout_h(s, row), of_c = zoneout_c(s, row);
  float *by_h = scratch + 4 * H, *by_c = scratch + 5 * H, *own = scratch + 6 * H;
  float* dc = s.dc ? s.dc + n * H : nullptr;
  if (of_h) {
    std::memcpy(own, dh, 4 * H);
    std::memset(dh, 0, 4 * H);
    add(dout, own, H);
    of_h.pass(own, by_h, H);
    dout = own;
  }
  if (of_c) of_c.pass(dc, by_c, H);
  if (shape.gates == 1) {
    RowTotals<> totals(s, shape, sums);
    rnn_row_back(s, shape, u, stats, dout, dh, du, totals);
  } else {
    with_terms(s, shape, stats, v, u, H, [&](const auto& terms) {
      RowTotals<std::decay_t<decltype(terms)>::norms> totals(s, shape, sums);
      if (has_update(s.cell)) {
        gru_gates_back(s, shape, terms, h_prev, dout, dh, dv, du, totals);
      } else {
        const float *c = s.cells + row * H, *c_prev = s.c_prev + row * H;
        with_state(s, bool(of_c), [&](auto state) {
          lstm_row_back<state.value>(s, shape, terms, c, c_prev, stats, dout, dh, dc, du, totals,
                                     scratch);
        });
      }
      totals.u.finish(s.recurrent, shape.gates, H);
      totals.v.finish(s.input, shape.gates, H);
      adjoints(s, shape, terms, totals.v, totals.u, s.cell == GRU ? dv : du, dv, du);
    });
  }
  if (of_h) add(by_h, dh, H);
  if (of_c) add(by_c, dc, H);
}

// Zero h and c, or their gradients, where a step resets them: the first `units` units of examples
// [first, end). `offset` is that of the step's flags; c may be null.
inline void restart(const Steps& s, int64_t offset, int64_t first, int64_t end, int64_t units,
                    float* h, float* c) {
  for (int64_t n = first; s.reset && n < end; n++) {
    if (!s.reset[offset + n]) continue;
    std::memset(h + n * s.hidden, 0, 4 * units);
    if (c) std::memset(c + n * s.hidden, 0, 4 * units);
  }
}

// Whether a part of the states' gradients bypasses the products.
inline bool passes(const Steps& s) { return has_update(s.cell) || s.zoneout_h || s.share_h != 0; }

// Write or add a * mask to `to` (n,).
inline void drop(const float* a, const float* mask, int64_t n, float* to, bool is_added) {
  for_units(n, [&](int64_t j, auto block) {
    vec found = block.read(a + j) * block.read(mask + j);
    block.write(to + j, is_added ? block.read(to + j) + found : found);
  });
}

}  // namespace
