// Padded calls and single steps, in float32: all of one direction of one layer at once, from tensors
// as layers have them. What a small layer costs is what its caller does in between.

#pragma once

#include <memory>

#include "steps.h"

extern "C" {

// What does not change from call to call.
struct Call {
  int64_t cell, steps, examples, inputs, hidden, threads;
  int64_t shares;  // of units (see shared.h); 1: threads share the examples
  // Rows of a chunk: where the backward reads what is kept of all rows, and where nothing is.
  int64_t chunk_kept, chunk_alone;
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
// Columns below which they fill too little of a product's tiles.
constexpr int64_t THIN = 16;

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

// w (G, K) = d^T a, or w += d^T a, for few columns of a (N, K), which would fill a tile of a product
// to a small part; `sums` has room for (K, G).
void thin_outer(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w, bool add,
                float* sums, int64_t threads) {
  by_parts(threads, N * G, G, [&](int64_t from, int64_t to) {
    for (int64_t k = 0; k < K; k++) std::fill(sums + k * G + from, sums + k * G + to, 0.0f);
    for (int64_t n = 0; n < N; n++) {
      for (int64_t k = 0; k < K; k++) {
        const vec factor = all(a[n * K + k]);
        const float* row = d + n * G + from;
        float* sum = sums + k * G + from;
        for_units(to - from, [&](int64_t j, auto block) {
          block.write(sum + j, block.read(sum + j) + factor * block.read(row + j));
        });
      }
    }
    for (int64_t g = from; g < to; g++) {
      for (int64_t k = 0; k < K; k++) {
        w[g * K + k] = sums[k * G + g] + (add ? w[g * K + k] : 0.0f);
      }
    }
  });
}

// y (N, K) = d (N, G) w, for few columns of w (G, K); `room` has room for (K, G).
void thin_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                    float* room, int64_t threads) {
  for (int64_t g = 0; g < G; g++) {
    for (int64_t k = 0; k < K; k++) room[k * G + g] = w[g * K + k];
  }
  by_parts(threads, N * G, N, [&](int64_t from, int64_t to) {
    for (int64_t k = 0; k < K; k++) {
      dot_products<1>(room + k * G, d + from * G, to - from, G, y + from * K + k, K);
    }
  });
}

// Memory for the time of one call. Pieces begin at cache lines and are not filled; those that are
// not large are kept for the thread's next call.
class Arena {
 public:
  float* take(int64_t n) {
    n += LINE;
    if (next_ == kept().size()) kept().emplace_back();
    Piece& own = n <= KEPT ? kept()[next_++] : more_.emplace_back();
    if (n > own.size) own = {std::unique_ptr<float[]>(new float[n]), n};
    float* found = own.numbers.get();
    return found + (-(reinterpret_cast<intptr_t>(found) / 4) & (LINE - 1));
  }

 private:
  static constexpr int64_t LINE = 16, KEPT = 1 << 24;
  struct Piece {
    std::unique_ptr<float[]> numbers;
    int64_t size = 0;
  };
  static std::vector<Piece>& kept() {
    thread_local std::vector<Piece> pieces;
    return pieces;
  }
  std::vector<Piece> more_;
  size_t next_ = 0;
};

// One call, there or back: its arguments as `forward` and `backward` take them, chunk by chunk.
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
        merged(shape.gates == 1),
        chunks_(chunks()) {
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
    const int64_t here = t.kept ? rows : longest();
    float* kept = t.kept ? t.kept : arena.take(here * (merged ? G : 2 * G));
    s.u = kept;
    s.v = merged ? kept : kept + here * G;
    kept += here * (merged ? G : 2 * G);
    if (!t.kept) {
      if (!few) s.u = nullptr;  // products stay in the cache
      return;
    }
    if (a.cell == LSTM) s.cells = kept, kept += rows * H;
    s.stats = kept;
  }

  static int64_t keeps(const Call& a) {
    const int64_t gates = gates_of(a.cell), products = gates == 1 ? 1 : 2 * gates;
    return a.steps * a.examples * ((products + (a.cell == LSTM)) * a.hidden + STATS);
  }

  void forward() {
    const int64_t G = shape.G, I = a.inputs;
    s.output = t.output ? t.output : arena.take(rows * shape.H), s.h = t.h, s.c = t.c;
    start(t.h, t.h0), start(t.c, t.c0);
    if (few) return few_steps();
    const float* w_ih = pack(t.w_ih, I, first(), true);
    pack_recurrent(false);
    for (const Chunk& chunk : chunks_) {
      const Steps part = part_of(chunk);
      ln_zoo_product(rows_of(chunk), G, I, t.x + row_of(chunk) * I, I, 1, w_ih,
                     static_cast<float*>(part.v), G, false, a.threads);
      ln_zoo_forward(&part);
    }
  }

  void backward() {
    const int64_t N = a.examples, H = shape.H, G = shape.G, I = a.inputs, most = longest();
    float *const du = arena.take(most * G), *const dv = merged ? du : arena.take(most * G);
    float *const h_room = arena.take(most * H), *const c_room = arena.take(most * H);
    s.du = du, s.dv = dv;
    s.dh = t.dh0 ? t.dh0 : arena.take(N * H);
    start(s.dh, t.d_h);
    if (a.cell == LSTM) {
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
    if (!few) pack_recurrent(true);
    const float* w_ih = t.dx && !few && !thin(I) ? pack(t.w_ih, I, Rows{}, false) : nullptr;
    float* const room = arena.take(ln_zoo_packed_size(most, std::max(H, I), 0) + THIN * G);
    for (size_t i = chunks_.size(); i-- > 0;) {
      const Chunk& chunk = chunks_[i];
      const int64_t row = row_of(chunk), count = rows_of(chunk);
      const bool more = i + 1 < chunks_.size();
      Steps part = part_of(chunk);
      const float* h_prev = before(chunk, t.h0, t.output, h_room);
      part.output_gradient = t.d_output ? t.d_output + row * H : nullptr;
      part.h_prev = h_prev;
      if (a.cell == LSTM) part.c_prev = before(chunk, t.c0, s.cells, c_room);
      few ? few_steps_back(part) : ln_zoo_backward(&part);
      if (t.dropout && t.dw_hh) {
        for (int64_t n = 0; n < count; n += N) {
          drop(h_prev + n * H, t.dropout, N * H, h_room + n * H, false);
        }
        h_prev = h_room;
      }
      weight_gradient(count, du, h_prev, H, t.dw_hh, more, room);
      weight_gradient(count, dv, t.x + row * I, I, t.dw_ih, more, room);
      if (t.dx) input_gradient(count, dv, w_ih, t.dx + row * I, room);
    }
    const auto copy_to = [](float* to, const float* from, int64_t n) {
      if (to) copy(from, n, to);
    };
    copy_to(t.dbias_ih, s.dbias, G);
    copy_to(t.dbias_hh, s.dbias, a.cell == GRU ? 2 * H : G);
    if (a.cell == GRU && t.dbias_hh) copy(s.dbias_hn, H, t.dbias_hh + 2 * H);
    copy_to(t.dgain_input, s.dgain_input, G), copy_to(t.dgain_recurrent, s.dgain_recurrent, G);
    copy_to(t.dgain_out, s.dgain_out, H), copy_to(t.dshift_out, s.dshift_out, H);
  }

 private:
  struct Chunk {
    int64_t step, steps;
  };

  const Call& a;
  const Tensors& t;
  std::vector<int64_t> sizes_;
  Steps s;
  const Shape shape;
  const int64_t rows;
  const bool few, merged;
  const std::vector<Chunk> chunks_;
  Arena arena;

  static bool thin(int64_t columns) { return columns < THIN; }

  Steps steps() const {
    Steps s{};
    s.cell = a.cell, s.steps = a.steps, s.examples = a.examples, s.hidden = a.hidden;
    s.threads = a.threads, s.shares = a.shares, s.sizes = sizes_.data();
    s.input = a.input, s.recurrent = a.recurrent, s.out = a.out;
    s.dropout = t.dropout, s.zoneout_h = t.zoneout_h, s.zoneout_c = t.zoneout_c;
    s.share_h = a.share_h, s.share_c = a.share_c;
    return s;
  }

  std::vector<Chunk> chunks() const {
    const int64_t most = t.kept ? a.chunk_kept : a.chunk_alone;
    const int64_t count = few ? 1 : std::min(a.steps, (rows + most - 1) / most);
    std::vector<Chunk> found;
    for (int64_t i = 0; i < count; i++) {
      const int64_t from = a.steps * i / count;
      found.push_back({from, a.steps * (i + 1) / count - from});
    }
    return found;
  }

  int64_t row_of(const Chunk& chunk) const { return chunk.step * a.examples; }
  int64_t rows_of(const Chunk& chunk) const { return chunk.steps * a.examples; }
  int64_t longest() const {
    int64_t found = 0;
    for (const Chunk& chunk : chunks_) found = std::max(found, rows_of(chunk));
    return found;
  }

  // The arguments of one chunk.
  Steps part_of(const Chunk& chunk) const {
    const int64_t row = row_of(chunk);
    const auto from = [&](auto* p, int64_t width) { return p ? p + row * width : nullptr; };
    Steps part = s;
    part.steps = chunk.steps;
    part.output = from(static_cast<float*>(s.output), shape.H);
    if (t.kept) {
      part.v = from(static_cast<float*>(s.v), shape.G);
      part.u = from(static_cast<float*>(s.u), shape.G);
    }
    part.cells = from(s.cells, shape.H), part.stats = from(s.stats, STATS);
    part.zoneout_h = from(s.zoneout_h, shape.H), part.zoneout_c = from(s.zoneout_c, shape.H);
    return part;
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

  // What each row of a chunk had in the step before, given what all rows had after theirs.
  const float* before(const Chunk& chunk, const float* at_first, const float* after,
                      float* room) const {
    const int64_t n = a.examples * shape.H;
    if (chunk.step > 0) return after + (chunk.step - 1) * n;
    start(room, at_first);
    if (chunk.steps > 1) copy(after, (chunk.steps - 1) * n, room + n);
    return room;
  }

  // Means of a weight's rows, (gates, K), where they are centred.
  const float* means_of_rows(const float* w, int64_t K, const Rows& rows) {
    if (!rows.scale || !rows.center) return nullptr;
    float* means = arena.take(shape.gates * K);
    ln_zoo_means(w, shape.gates, shape.H, K, rows.groups, means, a.threads);
    return means;
  }

  // A weight (G, K), or its transpose, centred by rows.
  const float* pack(const float* w, int64_t K, const Rows& rows, bool transposed) {
    const int64_t G = shape.G;
    const float* means = means_of_rows(w, K, rows);
    const int64_t k = transposed ? K : G, n = transposed ? G : K;
    float* to = arena.take(ln_zoo_packed_size(k, n, 0));
    ln_zoo_pack(w, transposed ? 1 : K, transposed ? K : 1, k, n, to, 0, means, shape.H, transposed,
                a.threads);
    return to;
  }

  // The recurrent weight as the steps read it, whose units or examples the threads share.
  void pack_recurrent(bool backward) {
    const Rows rows = backward ? Rows{} : second();
    if (s.shares == 1) {
      s.weight = pack(t.w_hh, shape.H, rows, !backward);
      return;
    }
    const float* means = means_of_rows(t.w_hh, shape.H, rows);
    float* to = arena.take(ln_zoo_share_packed_size(shape.gates, shape.H, s.shares, backward));
    ln_zoo_share_pack(shape.gates, shape.H, s.shares, backward, t.w_hh, to, means, a.threads);
    s.weight = to;
  }

  // w (G, K) = d^T of, or w += d^T of, for so many rows.
  void weight_gradient(int64_t count, const float* d, const float* of, int64_t K, float* w,
                       bool add, float* room) const {
    const int64_t G = shape.G;
    if (!w) return;
    if (few) return few_outer(count, G, K, d, of, w, a.threads);
    if (thin(K)) return thin_outer(count, G, K, d, of, w, add, room, a.threads);
    ln_zoo_pack(of, K, 1, count, K, room, 0, nullptr, 1, 0, a.threads);
    ln_zoo_product(G, K, count, d, 1, G, room, w, K, add, a.threads);
  }

  // dx (count, I) = dv w; `packed` is w as products read it.
  void input_gradient(int64_t count, const float* dv, const float* packed, float* dx,
                      float* room) const {
    const int64_t G = shape.G, I = a.inputs;
    if (few) return few_by_matrix(count, G, I, dv, t.w_ih, dx, false, a.threads);
    if (thin(I)) return thin_by_matrix(count, G, I, dv, t.w_ih, dx, room, a.threads);
    ln_zoo_product(count, I, G, dv, G, 1, packed, dx, I, false, a.threads);
  }

  void few_steps() {
    const int64_t N = a.examples, H = shape.H, G = shape.G;
    float* v = merged ? arena.take(rows * G) : static_cast<float*>(s.v);
    float *u = static_cast<float*>(s.u), *scratch = arena.take(ROOM * H), unused[STATS];
    float *const output = static_cast<float*>(s.output);
    float* dropped = t.dropout ? arena.take(N * H) : nullptr;
    few_by_transposed(rows, G, a.inputs, t.x, t.w_ih, v, a.threads);
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

  void few_steps_back(const Steps& s) {
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
