// Calls of one chunk or a single step, in float32: all of one direction of one layer at once, from
// tensors as layers have them. What a small layer costs is what its caller does in between.

#pragma once

#include "steps.h"

extern "C" {

// What does not change from call to call.
struct Call {
  int64_t cell, steps, examples, inputs, hidden, threads;
  Rows input, recurrent, out;
  double share_h, share_c;
};

// Null where there is none: biases and gains of 0 and 1, states of 0, nothing kept, a gradient of 0
// or one that nobody wants.
struct Tensors {
  const float *x, *h0, *c0;                                      // (rows, I), (N, H), (N, H)
  const float *w_ih, *w_hh;                                      // (G, I), (G, H)
  const float *bias_ih, *bias_hh, *gain_input, *gain_recurrent;  // (G,)
  const float *gain_out, *shift_out;                             // (H,)
  // (rows, H), not wanted of a single step; (N, H), (N, H), (ln_zoo_call_keeps(),)
  float *output, *h, *c, *kept;
  const float *d_output, *d_h, *d_c;  // the backward alone, as are all below
  float *dx, *dh0, *dc0, *dw_ih, *dw_hh, *dbias_ih, *dbias_hh;
  float *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out;
  const float* dropout;               // (N, H)
  const bool *zoneout_h, *zoneout_c;  // (rows, H)
};

}  // extern "C"

namespace {

// Rows up to which reading the weights is what costs, and packing them does not pay.
constexpr int64_t FEW_ROWS = 4;

// y[n][i] = w[i] . x[n], for ROWS rows of a matrix (., K) and N vectors x.
template <int ROWS>
inline void dot_products(const float* w, const float* x, int64_t N, int64_t K, float* y,
                         int64_t stride) {
  for (int64_t n = 0; n < N; n++, x += K, y += stride) {
    vec even[ROWS] = {}, odd[ROWS] = {};
    int64_t k = 0;
    for (; k + 2 * L <= K; k += 2 * L) {
      const vec a = load(x + k), b = load(x + k + L);
      for (int i = 0; i < ROWS; i++) {
        even[i] += load(w + i * K + k) * a;
        odd[i] += load(w + i * K + k + L) * b;
      }
    }
    for_units(K - k, [&](int64_t j, auto block) {
      const vec a = block.read(x + k + j);
      for (int i = 0; i < ROWS; i++) even[i] += block.read(w + i * K + k + j) * a;
    });
    for (int i = 0; i < ROWS; i++) y[i] = total(even[i] + odd[i]);
  }
}

// Threads for a matrix of so many numbers, and the rows or columns of each.
template <class Body>
void by_parts(int64_t wanted, int64_t numbers, int64_t n, Body body) {
  const int64_t threads = threads_for(wanted, numbers / 131072 + 1);
  in_parallel(threads, [&](int64_t i) { body(n * i / threads, n * (i + 1) / threads); });
}

// y (N, G) = x (N, K) w^T, for a few rows and w (G, K) as it is.
void few_by_transposed(int64_t N, int64_t G, int64_t K, const float* x, const float* w, float* y,
                       int64_t threads) {
  constexpr int ROWS = 4;
  by_parts(threads, G * K, G, [&](int64_t from, int64_t to) {
    int64_t i = from;
    for (; i + ROWS <= to; i += ROWS) dot_products<ROWS>(w + i * K, x, N, K, y + i, G);
    for (; i < to; i++) dot_products<1>(w + i * K, x, N, K, y + i, G);
  });
}

// y (N, K) = d (N, G) w, or y += d w, for a few rows and w (G, K) as it is.
void few_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                   bool add, int64_t threads) {
  constexpr int64_t AT_ONCE = 4;
  by_parts(threads, G * K, K, [&](int64_t from, int64_t to) {
    for (int64_t n = 0; n < N && !add; n++) std::fill(y + n * K + from, y + n * K + to, 0.0f);
    for (int64_t g = 0; g < G; g += AT_ONCE) {
      const int64_t count = std::min(AT_ONCE, G - g);
      for (int64_t n = 0; n < N; n++) {
        float* to_row = y + n * K + from;
        vec factors[AT_ONCE] = {};
        for (int64_t i = 0; i < count; i++) factors[i] = all(d[n * G + g + i]);
        for_units(to - from, [&](int64_t j, auto block) {
          vec sum = block.read(to_row + j);
          for (int64_t i = 0; i < count; i++) {
            sum += factors[i] * block.read(w + (g + i) * K + from + j);
          }
          block.write(to_row + j, sum);
        });
      }
    }
  });
}

// w (G, K) = d^T a, for a few rows d (N, G) and a (N, K).
void few_outer(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w,
               int64_t threads) {
  by_parts(threads, G * K, G, [&](int64_t from, int64_t to) {
    for (int64_t g = from; g < to; g++) {
      vec factors[FEW_ROWS];
      for (int64_t n = 0; n < N; n++) factors[n] = all(d[n * G + g]);
      for_units(K, [&](int64_t j, auto block) {
        vec sum = factors[0] * block.read(a + j);
        for (int64_t n = 1; n < N; n++) sum += factors[n] * block.read(a + n * K + j);
        block.write(w + g * K + j, sum);
      });
    }
  });
}

// Takes the mean off each group, where rows are centred.
void center(const Rows& rows, float* a, int64_t gates, int64_t H) {
  if (!rows.scale || !rows.center) return;
  for (int64_t q = 0, end; q < gates; q = end) {
    end = group_end(rows, gates, q);
    const int64_t n = (end - q) * H;
    vec sum{};
    for_units(n, [&](int64_t j, auto block) { sum += block.read(a + q * H + j); });
    const vec mean = all(total(sum) / float(n));
    for_units(n, [&](int64_t j, auto block) {
      block.write(a + q * H + j, block.read(a + q * H + j) - mean);
    });
  }
}

// Memory for the time of one call, of which a thread keeps as much for the next one unless it is
// large. Pieces begin at cache lines.
class Arena {
 public:
  ~Arena() {
    if (used_ > int64_t(kept().size()) && used_ <= KEPT) kept().resize(used_);
  }
  float* take(int64_t n) {
    n = (n + LINE - 1) / LINE * LINE + LINE;
    float* found;
    if (used_ + n <= int64_t(kept().size())) {
      found = kept().data() + used_;
    } else {
      more_.emplace_back(n);
      found = more_.back().data();
    }
    used_ += n;
    return found + (-(reinterpret_cast<intptr_t>(found) / 4) & (LINE - 1));
  }

 private:
  static constexpr int64_t LINE = 16, KEPT = 1 << 24;
  static std::vector<float>& kept() {
    thread_local std::vector<float> memory;
    return memory;
  }
  std::vector<std::vector<float>> more_;
  int64_t used_ = 0;
};

// One call, there or back: its arguments as `forward` and `backward` take them.
class Direction {
 public:
  Direction(const Call& call, const Tensors& tensors)
      : a(call),
        t(tensors),
        sizes_(call.steps, call.examples),
        s(steps()),
        shape(s),
        rows(a.steps * a.examples),
        few(rows <= FEW_ROWS),
        merged(shape.gates == 1) {
    const int64_t G = shape.G, H = shape.H;
    float *ones = arena.take(G), *zeros = arena.take(G);
    float *bias = arena.take(G), *bias_hn = arena.take(H);
    std::fill(ones, ones + G, 1.0f), std::fill(zeros, zeros + G, 0.0f);
    const int64_t both = a.cell == GRU ? 2 * H : G;
    for (int64_t k = 0; k < G; k++) {
      bias[k] = (t.bias_ih ? t.bias_ih[k] : 0) + (t.bias_hh && k < both ? t.bias_hh[k] : 0);
    }
    for (int64_t j = 0; j < H; j++) {
      bias_hn[j] = a.cell == GRU && t.bias_hh ? t.bias_hh[2 * H + j] : 0;
    }
    s.bias = bias, s.bias_hn = bias_hn;
    s.gain_input = t.gain_input ? t.gain_input : ones;
    s.gain_recurrent = t.gain_recurrent ? t.gain_recurrent : ones;
    s.gain_out = t.gain_out ? t.gain_out : ones;
    s.shift_out = t.shift_out ? t.shift_out : zeros;
    float* kept = t.kept ? t.kept : arena.take(rows * (merged ? G : 2 * G));
    s.u = kept;
    s.v = merged ? kept : kept + rows * G;
    kept += rows * (merged ? G : 2 * G);
    if (!t.kept) {
      if (!few) s.u = nullptr;  // products stay in the cache
      return;
    }
    if (a.cell == LSTM) s.cells = kept, kept += rows * H;
    s.stats = kept;
  }

  static int64_t keeps(const Call& a) {
    const int64_t gates = a.cell == LSTM ? 4 : a.cell == GRU ? 3 : 1;
    const int64_t products = gates == 1 ? 1 : 2 * gates;
    return a.steps * a.examples * ((products + (a.cell == LSTM)) * a.hidden + STATS);
  }

  void forward() {
    const int64_t N = a.examples, H = shape.H, G = shape.G, I = a.inputs;
    float* const output = t.output ? t.output : arena.take(rows * H);
    s.output = output, s.h = t.h, s.c = t.c;
    start(t.h, t.h0), start(t.c, t.c0);
    if (!few) {
      const float* packed = pack(t.w_ih, I, first(), true);
      ln_zoo_product(rows, G, I, t.x, I, 1, packed, static_cast<float*>(s.v), G, false, a.threads);
      s.weight = pack(t.w_hh, H, second(), true);
      ::forward<float>(s);
      return;
    }
    float* v = merged ? arena.take(rows * G) : static_cast<float*>(s.v);
    float *u = static_cast<float*>(s.u), *scratch = arena.take(ROOM * H), unused[STATS];
    float* dropped = t.dropout ? arena.take(N * H) : nullptr;
    few_by_transposed(rows, G, I, t.x, t.w_ih, v, a.threads);
    for (int64_t step = 0; step < a.steps; step++) {
      if (t.dropout) drop(t.h, t.dropout, N * H, dropped, false);
      few_by_transposed(N, G, H, t.dropout ? dropped : t.h, t.w_hh, u, a.threads);
      for (int64_t n = 0; n < N; n++, u += G, v += G) {
        const int64_t row = step * N + n;
        if (merged) {
          for (int64_t k = 0; k < G; k++) u[k] += v[k];
        } else {
          center(s.input, v, shape.gates, H), center(s.recurrent, u, shape.gates, H);
        }
        float *h = t.h + n * H, *c = t.c ? t.c + n * H : nullptr;
        forward_row(s, shape, row, v, u, h, c, s.stats ? s.stats + row * STATS : unused, scratch);
        copy(h, H, output + row * H);
        if (s.cells) copy(c, H, s.cells + row * H);
      }
    }
  }

  void backward() {
    const int64_t N = a.examples, H = shape.H, G = shape.G, I = a.inputs;
    float *h_prev = before(t.h0, t.output), *du = arena.take(rows * G);
    float* dv = merged ? du : arena.take(rows * G);
    s.output_gradient = t.d_output, s.h_prev = h_prev, s.du = du, s.dv = dv;
    s.dh = t.dh0 ? t.dh0 : arena.take(N * H);
    start(s.dh, t.d_h);
    if (a.cell == LSTM) {
      s.c_prev = before(t.c0, s.cells);
      s.dc = t.dc0 ? t.dc0 : arena.take(N * H);
      start(s.dc, t.d_c);
    }
    float** const sums[] = {&s.dbias,    &s.dgain_input, &s.dgain_recurrent,
                            &s.dbias_hn, &s.dgain_out,   &s.dshift_out};
    for (float** sum : sums) {
      *sum = arena.take(G);
      std::fill(*sum, *sum + G, 0.0f);
    }
    // The adjoint of a centred row has mean zero: products with weights as they are do as well.
    if (few) {
      few_steps_back();
    } else {
      s.weight = pack(t.w_hh, H, Rows{}, false);
      ::backward<float>(s);
    }
    const auto copy_to = [](float* to, const float* from, int64_t n) {
      if (to) copy(from, n, to);
    };
    copy_to(t.dbias_ih, s.dbias, G);
    copy_to(t.dbias_hh, s.dbias, a.cell == GRU ? 2 * H : G);
    if (a.cell == GRU && t.dbias_hh) copy(s.dbias_hn, H, t.dbias_hh + 2 * H);
    copy_to(t.dgain_input, s.dgain_input, G), copy_to(t.dgain_recurrent, s.dgain_recurrent, G);
    copy_to(t.dgain_out, s.dgain_out, H), copy_to(t.dshift_out, s.dshift_out, H);
    for (int64_t step = 0; t.dropout && t.dw_hh && step < a.steps; step++) {
      drop(h_prev + step * N * H, t.dropout, N * H, h_prev + step * N * H, false);
    }
    weight_gradient(du, h_prev, H, t.dw_hh);
    weight_gradient(dv, t.x, I, t.dw_ih);
    if (t.dx && few) few_by_matrix(rows, G, I, dv, t.w_ih, t.dx, false, a.threads);
    if (t.dx && !few) {
      const float* packed = pack(t.w_ih, I, Rows{}, false);
      ln_zoo_product(rows, I, G, dv, G, 1, packed, t.dx, I, false, a.threads);
    }
  }

 private:
  const Call& a;
  const Tensors& t;
  std::vector<int64_t> sizes_;
  Steps s;
  const Shape shape;
  const int64_t rows;
  const bool few, merged;
  Arena arena;

  Steps steps() const {
    Steps s{};
    s.cell = a.cell, s.steps = a.steps, s.examples = a.examples, s.hidden = a.hidden;
    s.threads = a.threads, s.sizes = sizes_.data();
    s.input = a.input, s.recurrent = a.recurrent, s.out = a.out;
    s.dropout = t.dropout, s.zoneout_h = t.zoneout_h, s.zoneout_c = t.zoneout_c;
    s.share_h = a.share_h, s.share_c = a.share_c;
    return s;
  }

  Rows first() const { return merged ? a.out : a.input; }
  Rows second() const { return merged ? a.out : a.recurrent; }

  void start(float* to, const float* from) const {
    const int64_t n = a.examples * shape.H;
    if (!to) return;
    if (from)
      copy(from, n, to);
    else
      std::fill(to, to + n, 0.0f);
  }

  // What each row had in the step before.
  float* before(const float* at_first, const float* after) {
    const int64_t n = a.examples * shape.H;
    float* found = arena.take(rows * shape.H);
    start(found, at_first);
    if (a.steps > 1) copy(after, rows * shape.H - n, found + n);
    return found;
  }

  // A weight (G, K), or its transpose, centred by rows.
  const float* pack(const float* w, int64_t K, const Rows& rows, bool transposed) {
    const int64_t G = shape.G;
    float* means = nullptr;
    if (rows.scale && rows.center) {
      means = arena.take(shape.gates * K);
      ln_zoo_means(w, shape.gates, shape.H, K, rows.groups, means);
    }
    const int64_t k = transposed ? K : G, n = transposed ? G : K;
    float* to = arena.take(ln_zoo_packed_size(k, n, 0));
    ln_zoo_pack(w, transposed ? 1 : K, transposed ? K : 1, k, n, to, 0, means, shape.H, transposed,
                a.threads);
    return to;
  }

  void weight_gradient(const float* d, const float* of, int64_t K, float* w) {
    const int64_t G = shape.G;
    if (!w) return;
    if (few) return few_outer(rows, G, K, d, of, w, a.threads);
    float* to = arena.take(ln_zoo_packed_size(rows, K, 0));
    ln_zoo_pack(of, K, 1, rows, K, to, 0, nullptr, 1, 0, a.threads);
    ln_zoo_product(G, K, rows, d, 1, G, to, w, K, false, a.threads);
  }

  void few_steps_back() {
    const int64_t N = a.examples, H = shape.H, G = shape.G;
    float *scratch = arena.take(ROOM_BACK * H), *zeros = arena.take(H);
    float* dropped = t.dropout ? arena.take(N * H) : nullptr;
    std::fill(zeros, zeros + H, 0.0f);
    Sums sums(shape);
    const float *v = static_cast<const float*>(s.v), *u = static_cast<const float*>(s.u);
    const float* h_prev = static_cast<const float*>(s.h_prev);
    float *du = static_cast<float*>(s.du), *dv = static_cast<float*>(s.dv);
    for (int64_t step = a.steps - 1; step >= 0; step--) {
      for (int64_t n = 0; n < N; n++) {
        const int64_t row = step * N + n, g = row * G, j = row * H;
        backward_row(s, shape, row, n, v + g, u + g, h_prev + j,
                     t.d_output ? t.d_output + j : zeros, s.dh + n * H, dv + g, du + g, sums,
                     scratch);
      }
      float* to = t.dropout ? dropped : s.dh;
      few_by_matrix(N, G, H, du + step * N * G, t.w_hh, to, passes(s) && !t.dropout, a.threads);
      if (t.dropout) drop(to, t.dropout, N * H, s.dh, passes(s));
    }
    const float* const found[] = {sums.bias,    sums.gain_input, sums.gain_recurrent,
                                  sums.bias_hn, sums.gain_out,   sums.shift_out};
    float* const to[] = {s.dbias,    s.dgain_input, s.dgain_recurrent,
                         s.dbias_hn, s.dgain_out,   s.dshift_out};
    for (int64_t i = 0; i < 6; i++) copy(found[i], i < 3 ? G : H, to[i]);
  }
};

}  // namespace

extern "C" {

// Numbers that the forward of a call keeps for its backward.
int64_t ln_zoo_call_keeps(const Call* call) { return Direction::keeps(*call); }

void ln_zoo_call_forward(const Call* call, const Tensors* t) { Direction(*call, *t).forward(); }

void ln_zoo_call_backward(const Call* call, const Tensors* t) { Direction(*call, *t).backward(); }

}  // extern "C"
