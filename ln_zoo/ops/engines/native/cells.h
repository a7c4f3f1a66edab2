// One row of one step of an LSTM, GRU or RNN, there and back, and what a call is told.

#pragma once

#include "tiles.h"

namespace {

// Recurrent steps

enum Cell : int64_t { LSTM, GRU, RNN_TANH, RNN_RELU };
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
// `narrow`. In a simple RNN u is the sum of both terms and the same memory as v, du the same as dv.
struct Steps {
  int64_t cell, narrow, steps, examples, hidden, threads;
  int64_t shares;        // of units (see shared.h); 1: threads share the examples
  const int64_t* sizes;  // (steps,)
  Rows input, recurrent, out;
  const float *bias, *bias_hn, *gain_input, *gain_recurrent;  // (G,), (H,), (G,), (G,)
  const float *gain_out, *shift_out;                          // (H,)
  const void* weight;    // packed T: forward (H, G), backward (G, H); or packed by shares
  void *v, *u;           // T (rows, G); forward: u null where nothing is saved
  float *cells, *stats;  // (rows, H), (rows, STATS); forward: null where nothing is saved
  // What h is multiplied by in products, (N, H), or null. Where h and c stay as they were, (rows, H),
  // or null, and then the share of them that does.
  const float* dropout;
  const bool *zoneout_h, *zoneout_c;
  double share_h, share_c;
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

// A window over a text, moved by h and read by the next step (window.py has the equations): K
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

}  // extern "C"

namespace {

// Reciprocal deviations of the input's and the recurrent product's gates, then mean and reciprocal
// deviation of the site at the output.
constexpr int64_t STATS = 2 * MAX_GATES + 2;

int64_t gates_of(int64_t cell) { return cell == LSTM ? 4 : cell == GRU ? 3 : 1; }

struct Shape {
  int64_t H, gates, G;
  int64_t units;  // H, or those of one thread; then its rows begin at the first of them
  explicit Shape(const Steps& s) : H(s.hidden), gates(gates_of(s.cell)), G(gates * H), units(H) {}
};

inline float reciprocal_deviation(double sum, int64_t n, double eps) {
  return float(1.0 / std::sqrt(sum / double(n) + eps));
}

// One past the last gate that shares statistics with gate q, the first of its group.
inline int64_t group_end(const Rows& rows, int64_t gates, int64_t q) {
  int64_t end = q + 1;
  while (end < gates && rows.groups[end] == rows.groups[q]) end++;
  return end;
}

// The reciprocal deviation of each gate of a row of products, whose mean is zero or stays.
void deviations(const Rows& rows, const float* a, int64_t gates, int64_t H, float* r) {
  std::fill(r, r + gates, 1.0f);
  if (!rows.scale) return;
  for (int64_t q = 0, end; q < gates; q = end) {
    end = group_end(rows, gates, q);
    const int64_t n = (end - q) * H;
    std::fill(r + q, r + end, reciprocal_deviation(sum_of_squares(a + q * H, n), n, rows.eps));
  }
}

inline void copy(const float* from, int64_t n, float* to) { std::memcpy(to, from, 4 * n); }

// The mean that is taken off a row, and the squares of what is left.
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

// Mean and reciprocal deviation of a row whose mean is not zero.
void mean_and_deviation(const Rows& rows, const float* a, int64_t n, float* mean, float* r) {
  *mean = 0.0f, *r = 1.0f;
  if (!rows.scale) return;
  const Moments found = moments(rows, a, n);
  *mean = found.mean, *r = reciprocal_deviation(found.squares, n, rows.eps);
}

// The two means in the adjoint r (d - mean d - a mean(d a)) of a normalisation, gate by gate, from
// sums over the gates; zero where it takes neither.
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
};

// Forward, one row of one step: u holds the recurrent product, h and c the states before and after.

// Between those of two gates of u lie `apart` numbers.
void lstm_gates(const Steps& s, const Shape& shape, const float* stats, const float* v,
                const float* u, int64_t apart, float* c, float* o) {
  const int64_t H = shape.H;
  vec rv[4], ru[4];
  for (int64_t q = 0; q < 4; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  for_units(shape.units, [&](int64_t j, auto block) {
    vec p[4];
    for (int64_t q = 0; q < 4; q++) {
      const int64_t k = q * H + j;
      p[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * (rv[q] * block.read(v + k)) +
             block.read(s.gain_recurrent + k) * (ru[q] * block.read(u + q * apart + j));
      ahead(v + k, shape.G);
    }
    block.write(c + j,
                sigmoid(p[1]) * block.read(c + j) + sigmoid(p[0]) * hyperbolic_tangent(p[2]));
    block.write(o + j, sigmoid(p[3]));
  });
}

void lstm_out(const Steps& s, const Shape& shape, const float* stats, const float* c,
              const float* o, float* h) {
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]);
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a = (block.read(c + j) - m) * r;
    vec z = block.read(s.gain_out + j) * a + block.read(s.shift_out + j);
    block.write(h + j, block.read(o + j) * hyperbolic_tangent(z));
  });
}

void gru_gates(const Steps& s, const Shape& shape, const float* stats, const float* v,
               const float* u, int64_t apart, float* h) {
  const int64_t H = shape.H;
  vec rv[3], ru[3];
  for (int64_t q = 0; q < 3; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  for_units(shape.units, [&](int64_t j, auto block) {
    vec x[3], y[3];
    for (int64_t q = 0; q < 3; q++) {
      const int64_t k = q * H + j;
      x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * (rv[q] * block.read(v + k));
      y[q] = block.read(s.gain_recurrent + k) * (ru[q] * block.read(u + q * apart + j));
    }
    vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
    vec n = hyperbolic_tangent(x[2] + reset * (y[2] + block.read(s.bias_hn + j)));
    block.write(h + j, n + update * (block.read(h + j) - n));
  });
}

void rnn_out(const Steps& s, const Shape& shape, const float* stats, const float* u, float* h) {
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]), zero{};
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a = (block.read(u + j) - m) * r;
    vec p = block.read(s.gain_out + j) * a + block.read(s.bias + j);
    // Written so that NaN passes.
    vec next = s.cell == RNN_RELU ? (p <= zero ? zero : p) : hyperbolic_tangent(p);
    block.write(h + j, next);
  });
}

void lstm_row(const Steps& s, const Shape& shape, const float* v, const float* u, float* h,
              float* c, float* stats, float* o) {
  const int64_t H = shape.H;
  deviations(s.input, v, 4, H, stats);
  deviations(s.recurrent, u, 4, H, stats + MAX_GATES);
  lstm_gates(s, shape, stats, v, u, H, c, o);
  float* mean = stats + 2 * MAX_GATES;
  mean_and_deviation(s.out, c, H, mean, mean + 1);
  lstm_out(s, shape, stats, c, o, h);
}

void gru_row(const Steps& s, const Shape& shape, const float* v, const float* u, float* h,
             float* stats) {
  deviations(s.input, v, 3, shape.H, stats);
  deviations(s.recurrent, u, 3, shape.H, stats + MAX_GATES);
  gru_gates(s, shape, stats, v, u, shape.H, h);
}

void rnn_row(const Steps& s, const Shape& shape, const float* u, float* h, float* stats) {
  float* mean = stats + 2 * MAX_GATES;
  mean_and_deviation(s.out, u, shape.H, mean, mean + 1);
  rnn_out(s, shape, stats, u, h);
}

// Zoneout of one row of a state: where it stays as it was, or the share of it that does.
struct Zoneout {
  const bool* mask;
  float share;
  explicit operator bool() const { return mask || share; }

  // Puts back what stays.
  void hold(const float* before, float* after, int64_t H) const {
    for_units(H, [&](int64_t j, auto block) {
      vec old = block.read(before + j), now = block.read(after + j);
      vec held = mask ? (flags(mask + j, H - j) != 0 ? old : now) : now + share * (old - now);
      block.write(after + j, held);
    });
  }
  // Takes off a gradient what passes by the step.
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

// Numbers of scratch memory for a row, there and back, in units of H.
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
    case GRU: gru_row(s, shape, v, u, h, stats); break;
    default: rnn_row(s, shape, u, h, stats);
  }
  if (of_h) of_h.hold(h_before, h, H);
  if (of_c) of_c.hold(c_before, c, H);
}

// Backward, one row of one step (formulas in the documentation of the aten engine). dh and dc come
// as the gradients that flow back from the next step and leave as those that flow to the step
// before, dh without the part that goes through du.

// Rows are often as long as a page, and then what belongs to one unit in several vectors and rows
// falls into one set of the first-level cache, which holds eight lines. So vectors that are read
// together begin a line apart from each other.
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
  static constexpr int64_t FIRST_LINE = 4;  // rows begin at the first ones
  std::vector<float> memory_;
  std::vector<float*> vectors_;
};

struct Sums {  // of one thread
  Spread memory;
  float *bias, *gain_input, *gain_recurrent, *bias_hn, *gain_out, *shift_out;
  explicit Sums(const Shape& shape)
      : memory({shape.G, shape.G, shape.G, shape.H, shape.H, shape.H}),
        bias(memory[0]),
        gain_input(memory[1]),
        gain_recurrent(memory[2]),
        bias_hn(memory[3]),
        gain_out(memory[4]),
        shift_out(memory[5]) {}
  // To units that begin so many later.
  void move(int64_t units) {
    for (float** p : {&bias, &gain_input, &gain_recurrent, &bias_hn, &gain_out, &shift_out}) {
      *p += units;
    }
  }
};

// Adds what threads have to the call's, in their order, so that the same call gives the same
// numbers again.
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

// A call's arguments with its vectors copied to where they do not meet.
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

template <class Block>
inline void accumulate(Block block, float* to, int64_t j, vec a) {
  block.write(to + j, block.read(to + j) + a);
}

// du and dv from the gradients dp of normalised, scaled sums; pu, pv hold dp for either and may be
// du, dv themselves.
void adjoints(const Steps& s, const Shape& shape, const float* v, const float* u,
              const float* stats, const Means& mv, const Means& mu, const float* pv,
              const float* pu, float* dv, float* du) {
  const int64_t H = shape.H;
  for (int64_t q = 0; q < shape.gates; q++) {
    const vec rv = all(stats[q]), ru = all(stats[MAX_GATES + q]);
    const vec v1 = all(mv.mean_d[q]), v2 = all(mv.mean_da[q]);
    const vec u1 = all(mu.mean_d[q]), u2 = all(mu.mean_da[q]);
    for_units(shape.units, [&](int64_t j, auto block) {
      const int64_t k = q * H + j;
      vec p = block.read(pv + k), w = block.read(pu + k);
      vec a = rv * block.read(v + k), b = ru * block.read(u + k);
      block.write(dv + k, rv * (block.read(s.gain_input + k) * p - v1 - a * v2));
      block.write(du + k, ru * (block.read(s.gain_recurrent + k) * w - u1 - b * u2));
    });
  }
}

// Under zoneout of c what is kept of c is not what h was made of: that is made anew.
template <bool ANEW>
void lstm_out_back(const Steps& s, const Shape& shape, const float* v, const float* u,
                   const float* c, const float* c_prev, const float* stats, const float* dout,
                   const float* dh, float* du, Sums& sums, float* scratch, Means& mc) {
  const int64_t H = shape.H, n = shape.units;
  float *gates = scratch, *e = scratch + 3 * n;
  vec rv[4], ru[4];
  for (int64_t q = 0; q < 4; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]);
  for_units(n, [&](int64_t j, auto block) {
    vec p[4];
    for (int64_t q = 0; q < 4; q++) {
      const int64_t k = q * H + j;
      p[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * (rv[q] * block.read(v + k)) +
             block.read(s.gain_recurrent + k) * (ru[q] * block.read(u + k));
      ahead(v + k, shape.G), ahead(u + k, shape.G);
    }
    ahead(c + j, H), ahead(c_prev + j, H), ahead(dout + j, H);
    vec o = sigmoid(p[3]);
    block.write(gates + j, sigmoid(p[0]));
    block.write(gates + n + j, sigmoid(p[1]));
    block.write(gates + 2 * n + j, hyperbolic_tangent(p[2]));
    vec cell = ANEW ? block.read(gates + n + j) * block.read(c_prev + j) +
                          block.read(gates + j) * block.read(gates + 2 * n + j)
                    : block.read(c + j);
    vec a = block.keep((cell - m) * r);
    vec gain = block.read(s.gain_out + j);
    vec tau = hyperbolic_tangent(gain * a + block.read(s.shift_out + j));
    vec d = block.read(dout + j) + block.read(dh + j);
    vec dm = d * o * (1.0f - tau * tau);
    accumulate(block, sums.shift_out, j, dm);
    accumulate(block, sums.gain_out, j, dm * a);
    block.write(e + j, gain * dm);
    mc.add(0, gain * dm, a);
    block.write(du + 3 * H + j, d * tau * o * (1.0f - o));
  });
}

template <bool ANEW>
void lstm_gates_back(const Steps& s, const Shape& shape, const float* v, const float* u,
                     const float* c, const float* c_prev, const float* stats, float* dc, float* du,
                     Sums& sums, const float* scratch, const Means& mc, Means& mv, Means& mu) {
  const int64_t H = shape.H, n = shape.units;
  const float *gates = scratch, *e = scratch + 3 * n;
  vec rv[4], ru[4];
  for (int64_t q = 0; q < 4; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]);
  const vec m1 = all(mc.mean_d[0]), m2 = all(mc.mean_da[0]);
  for_units(n, [&](int64_t j, auto block) {
    vec i = block.read(gates + j), f = block.read(gates + n + j), g = block.read(gates + 2 * n + j);
    vec cell = ANEW ? f * block.read(c_prev + j) + i * g : block.read(c + j);
    vec a = (cell - m) * r;
    vec d = block.read(dc + j) + r * (block.read(e + j) - m1 - a * m2);
    block.write(dc + j, d * f);
    vec dp[4] = {d * g * i * (1.0f - i), d * block.read(c_prev + j) * f * (1.0f - f),
                 d * i * (1.0f - g * g), block.read(du + 3 * H + j)};
    for (int64_t q = 0; q < 4; q++) {
      const int64_t k = q * H + j;
      vec x = rv[q] * block.read(v + k), y = ru[q] * block.read(u + k);
      block.write(du + k, dp[q]);
      accumulate(block, sums.bias, k, dp[q]);
      accumulate(block, sums.gain_input, k, dp[q] * x);
      accumulate(block, sums.gain_recurrent, k, dp[q] * y);
      mv.add(q, block.read(s.gain_input + k) * dp[q], x);
      mu.add(q, block.read(s.gain_recurrent + k) * dp[q], y);
    }
  });
}

template <bool ANEW>
void lstm_row_back(const Steps& s, const Shape& shape, const float* v, const float* u,
                   const float* c, const float* c_prev, const float* stats, const float* dout,
                   float* dh, float* dc, float* dv, float* du, Sums& sums, float* scratch) {
  Means mc, mv, mu;
  lstm_out_back<ANEW>(s, shape, v, u, c, c_prev, stats, dout, dh, du, sums, scratch, mc);
  mc.finish(s.out, 1, shape.H);
  lstm_gates_back<ANEW>(s, shape, v, u, c, c_prev, stats, dc, du, sums, scratch, mc, mv, mu);
  mu.finish(s.recurrent, 4, shape.H);
  mv.finish(s.input, 4, shape.H);
  adjoints(s, shape, v, u, stats, mv, mu, du, du, dv, du);
}

void gru_gates_back(const Steps& s, const Shape& shape, const float* v, const float* u,
                    const float* h_prev, const float* stats, const float* dout, float* dh,
                    float* dv, float* du, Sums& sums, Means& mv, Means& mu) {
  const int64_t H = shape.H;
  vec rv[3], ru[3];
  for (int64_t q = 0; q < 3; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a[3], b[3], x[3], y[3];
    for (int64_t q = 0; q < 3; q++) {
      const int64_t k = q * H + j;
      a[q] = rv[q] * block.read(v + k), b[q] = ru[q] * block.read(u + k);
      x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a[q];
      y[q] = block.read(s.gain_recurrent + k) * b[q];
    }
    y[2] += block.read(s.bias_hn + j);
    vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
    vec n = hyperbolic_tangent(x[2] + reset * y[2]);
    vec d = block.read(dout + j) + block.read(dh + j);
    block.write(dh + j, d * update);
    vec dn = d * (1.0f - update) * (1.0f - n * n);
    vec dz = d * (block.read(h_prev + j) - n) * update * (1.0f - update);
    vec dr = dn * y[2] * reset * (1.0f - reset);
    const vec dx[3] = {dr, dz, dn}, dy[3] = {dr, dz, dn * reset};
    accumulate(block, sums.bias_hn, j, dy[2]);
    for (int64_t q = 0; q < 3; q++) {
      const int64_t k = q * H + j;
      block.write(dv + k, dx[q]);
      block.write(du + k, dy[q]);
      accumulate(block, sums.bias, k, dx[q]);
      accumulate(block, sums.gain_input, k, dx[q] * a[q]);
      accumulate(block, sums.gain_recurrent, k, dy[q] * b[q]);
      mv.add(q, block.read(s.gain_input + k) * dx[q], a[q]);
      mu.add(q, block.read(s.gain_recurrent + k) * dy[q], b[q]);
    }
  });
}

void gru_row_back(const Steps& s, const Shape& shape, const float* v, const float* u,
                  const float* h_prev, const float* stats, const float* dout, float* dh, float* dv,
                  float* du, Sums& sums) {
  Means mv, mu;
  gru_gates_back(s, shape, v, u, h_prev, stats, dout, dh, dv, du, sums, mv, mu);
  mu.finish(s.recurrent, 3, shape.H);
  mv.finish(s.input, 3, shape.H);
  adjoints(s, shape, v, u, stats, mv, mu, dv, du, dv, du);
}

void rnn_out_back(const Steps& s, const Shape& shape, const float* u, const float* stats,
                  const float* dout, const float* dh, float* du, Sums& sums, Means& mean) {
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]), zero{};
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a = block.keep((block.read(u + j) - m) * r);
    vec p = block.read(s.gain_out + j) * a + block.read(s.bias + j), tau = hyperbolic_tangent(p);
    vec d = block.read(dout + j) + block.read(dh + j);
    vec dp = s.cell == RNN_RELU ? (p > zero ? d : zero) : d * (1.0f - tau * tau);
    accumulate(block, sums.bias, j, dp);
    accumulate(block, sums.gain_out, j, dp * a);
    dp = dp * block.read(s.gain_out + j);
    block.write(du + j, dp);
    mean.add(0, dp, a);
  });
}

void rnn_adjoint(const Shape& shape, const float* u, const float* stats, const Means& mean,
                 float* du) {
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]);
  const vec m1 = all(mean.mean_d[0]), m2 = all(mean.mean_da[0]);
  for_units(shape.units, [&](int64_t j, auto block) {
    vec a = (block.read(u + j) - m) * r;
    block.write(du + j, r * (block.read(du + j) - m1 - a * m2));
  });
}

void rnn_row_back(const Steps& s, const Shape& shape, const float* u, const float* stats,
                  const float* dout, const float* dh, float* du, Sums& sums) {
  Means mean;
  rnn_out_back(s, shape, u, stats, dout, dh, du, sums, mean);
  mean.finish(s.out, 1, shape.H);
  rnn_adjoint(shape, u, stats, mean, du);
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
  switch (s.cell) {
    case LSTM: {
      const float *c = s.cells + row * H, *c_prev = s.c_prev + row * H;
      if (of_c)
        lstm_row_back<true>(s, shape, v, u, c, c_prev, stats, dout, dh, dc, dv, du, sums, scratch);
      else
        lstm_row_back<false>(s, shape, v, u, c, c_prev, stats, dout, dh, dc, dv, du, sums, scratch);
      break;
    }
    case GRU: gru_row_back(s, shape, v, u, h_prev, stats, dout, dh, dv, du, sums); break;
    default: rnn_row_back(s, shape, u, stats, dout, dh, du, sums);
  }
  if (of_h) add(by_h, dh, H);
  if (of_c) add(by_c, dc, H);
}

// Whether gradients of states pass by the products, which are then added to them.
inline bool passes(const Steps& s) { return s.cell == GRU || s.zoneout_h || s.share_h != 0; }

// Fills to (n,) with a * mask, or adds that to it.
inline void drop(const float* a, const float* mask, int64_t n, float* to, bool is_added) {
  for_units(n, [&](int64_t j, auto block) {
    vec found = block.read(a + j) * block.read(mask + j);
    block.write(to + j, is_added ? block.read(to + j) + found : found);
  });
}

}  // namespace
