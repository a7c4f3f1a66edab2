// Padded calls and single steps in float32: one direction of one layer in one call, from the
// layer's own tensors, since small layers are dominated by call overhead.

#pragma once

#include "batch_norm.h"
#include "narrow_products.h"

namespace {

// A packed matrix (K, N), float32 or split into parts.
struct Packed {
  float* numbers;
  int64_t K, N;
  bool parts;
  int64_t size() const { return parts ? parts_size(K, N) : ln_zoo_packed_size(K, N, 0); }
  void fill(const float* from, int64_t row, int64_t column, const Center& center,
            int64_t threads) const {
    parts ? pack_parts(from, row, column, K, N, numbers, center, threads)
          : ::pack(from, row, column, K, N, numbers, threads, center);
  }
  // C (M, N) = A (M, K) times the matrix, or C +=.
  void multiply(int64_t M, Left<float> left, float* c, bool add, int64_t threads) const {
    if (!parts) {
      ln_zoo_product(M, N, K, left.data, left.row, left.column, numbers, c, N, add, threads);
      return;
    }
    by_parts(threads, M * N * K, M, [&](int64_t from, int64_t to) {
      const Left<float> rows{left.data + from * left.row, left.row, left.column};
      parts_product(to - from, K, rows, {{numbers, N, c + from * N, N}}, add);
    });
  }
};

// Whether each step of the forward pass multiplies its own inputs. Terms then stay in the cache,
// but each step reads the whole weight, which must stay there too.
bool multiplies_each_step(int64_t steps, int64_t examples, int64_t inputs, int64_t G,
                          int64_t threads) {
  constexpr int64_t MANY_EXAMPLES = 8;  // of a thread
  return steps > FEW_STEPS && examples >= MANY_EXAMPLES * threads_for(threads, examples) &&
         4 * inputs * G <= own_cache() && !suits_parts(steps * examples, inputs, G, false);
}

// Parts of the examples that threads run from end to end, each with its own copies of weights and
// of their gradients. Otherwise threads share products, wait for each other several times a chunk,
// and read what others have just written.
constexpr int64_t LEAST_ROWS = 256;  // of a part, and of its chunks
int64_t parts_of_examples(int64_t steps, int64_t examples, int64_t inputs, int64_t hidden,
                          int64_t threads) {
  // A part then keeps several times as much as its copies take.
  const int64_t least = std::max(LEAST_ROWS, 4 * (inputs + hidden));
  const int64_t parts = threads_for(threads, examples);
  return steps * examples >= least * parts ? parts : 1;
}

// One call, or that of a part of its examples, forward or backward, chunk by chunk.
class Direction {
 public:
  // `apart`: rows between steps in x, output and their gradients; more than the examples of a part.
  Direction(const Call& call, const Tensors& tensors, int64_t apart)
      : a(call),
        t(tensors),
        apart_(apart),
        sizes_(call.steps, call.examples),
        s(steps()),
        shape(s),
        examples(call, tensors, shape),
        rows(a.steps * a.examples),
        in_place((rows <= FEW_ROWS || a.steps <= FEW_STEPS) && !examples.any()),
        each_step_(each_step(a, t)),
        merged(keeps_sum(a.cell, a.joint)),
        chunks_(chunks()) {
    const int64_t G = shape.G, H = shape.H;
    float *ones = arena.take(G), *zeros = arena.take(G);
    float *bias = arena.take(G), *bias_hn = arena.take(H);
    std::fill(ones, ones + G, 1.0f), std::fill(zeros, zeros + G, 0.0f);
    std::fill(bias_hn, bias_hn + H, 0.0f);
    const int64_t both = a.cell == GRU ? 2 * H : G;
    for (int64_t k = 0; k < G; k++) {
      const float ih = t.bias_ih ? t.bias_ih[k] : 0, hh = t.bias_hh ? t.bias_hh[k] : 0;
      bias[k] = (k < both || !a.joint ? ih : 0) + (k < both ? hh : 0);
      if (k >= both) bias_hn[k - both] = hh + (a.joint ? ih : 0);
    }
    s.bias = bias, s.bias_hn = bias_hn;
    s.gain_input = t.gain_input ? t.gain_input : ones;
    s.gain_recurrent = t.gain_recurrent ? t.gain_recurrent : ones;
    if (a.negated) {
      float* gain = arena.take(G);
      copy(s.gain_recurrent, G, gain);
      negate_update(bias), negate_update(gain);
      for (int64_t k = H; k < 2 * H; k++) bias[k] -= float(a.update_offset);
      s.gain_recurrent = gain;
    }
    if (t.bias_inner) {
      bias_inner = arena.take(G);
      copy(t.bias_inner, G, bias_inner);
      center(first(), bias_inner, shape.gates, H);  // as the products are
    }
    s.gain_out = t.gain_out ? t.gain_out : ones;
    s.shift_out = t.shift_out ? t.shift_out : zeros;
    const int64_t here = t.kept ? rows : each_step_ ? 0 : longest();
    float* kept = t.kept ? t.kept : arena.take(here * (merged ? G : 2 * G));
    s.u = kept;
    s.v = merged ? kept : kept + here * G;
    kept += here * (merged ? G : 2 * G);
    if (!t.kept) {
      if (!in_place) s.u = nullptr;  // products stay in the cache
      if (each_step_) s.v = nullptr;
      return;
    }
    if (a.cell == LSTM) s.cells = kept, kept += rows * H;
    if (!examples.any()) s.stats = kept;
  }

  static int64_t keeps(const Call& a) {
    const int64_t gates = gates_of(a.cell);
    const int64_t products = keeps_sum(a.cell, a.joint) ? gates : 2 * gates;
    const bool by_rows = a.sources[INPUT] + a.sources[RECURRENT] + a.sources[OUT] == NONE;
    const int64_t stats = by_rows ? STATS : 0;
    return a.steps * a.examples * ((products + (a.cell == LSTM)) * a.hidden + stats);
  }

  static bool each_step(const Call& a, const Tensors& t) {
    const bool by_rows = a.sources[INPUT] + a.sources[RECURRENT] + a.sources[OUT] == NONE;
    return by_rows && a.shares == 1 && !t.bias_inner &&
           multiplies_each_step(a.steps, a.examples, a.inputs, gates_of(a.cell) * a.hidden,
                                a.threads);
  }

  void forward() {
    const int64_t G = shape.G, I = a.inputs;
    s.output = t.output ? t.output : arena.take(rows * shape.H), s.h = t.h, s.c = t.c;
    start(t.h, t.h0), start(t.c, t.c0);
    if (in_place) return steps_in_place();
    const Packed w_ih = pack(t.w_ih, I, first(), true, rows);
    pack_recurrent(false);
    if (each_step_) {
      s.x = t.x, s.inputs = I, s.input_weight = w_ih.numbers;
      return ln_zoo_forward(&s);
    }
    make_room();
    for (const Chunk& chunk : chunks_) {
      const Steps part = part_of(chunk);
      const float* x = t.x + row_of(chunk) * I;
      if (examples.own(first_place())) {
        x = centered(chunk, x, I);
        w_ih.multiply(chunk.steps, {means, I, 1}, examples.means(first_place(), chunk.step), false,
                      a.threads);
      }
      float* const v = static_cast<float*>(part.v);
      for (int64_t n = 0; bias_inner && n < rows_of(chunk); n++) copy(bias_inner, G, v + n * G);
      w_ih.multiply(rows_of(chunk), {x, I, 1}, v, bias_inner != nullptr, a.threads);
      if (!examples.any()) {
        ln_zoo_forward(&part);
        continue;
      }
      batch_forward(part, examples.forward(chunk.step, chunk.steps));
      examples.add_means(chunk.step, chunk.steps);
    }
  }

  void backward() {
    const int64_t N = a.examples, H = shape.H, G = shape.G, I = a.inputs, most = longest();
    const Rooms& later = t.rooms;  // a single step
    float* const du = later.du ? later.du : arena.take(most * G);
    float* const dv = merged ? du : later.dv ? later.dv : arena.take(most * G);
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
    // The adjoint of a centred row has mean 0, so the weights need no centring.
    if (!in_place) pack_recurrent(true);
    Packed w_ih;
    if (t.dx && !in_place && !thin(I)) w_ih = pack(t.w_ih, I, Rows{}, false, rows);
    float* const room = arena.take(weight_room(most, G, H, I));
    float* const x_room = apart_ > N ? arena.take(most * I) : nullptr;
    make_room();
    for (size_t i = chunks_.size(); i-- > 0;) {
      const Chunk& chunk = chunks_[i];
      const int64_t row = row_of(chunk), count = rows_of(chunk);
      const bool more = i + 1 < chunks_.size();
      Steps part = part_of(chunk);
      const float* h_prev = before(chunk, t.h0, t.output, apart_, h_room);
      part.output_gradient = t.d_output ? t.d_output + chunk.step * apart_ * H : nullptr;
      part.h_prev = h_prev;
      if (a.cell == LSTM) part.c_prev = before(chunk, t.c0, s.cells, N, c_room);
      part.to_start = chunk.step > 0 || t.dh0;
      if (examples.any()) {
        batch_backward(part, examples.backward(chunk.step, chunk.steps));
      } else {
        in_place ? steps_back_in_place(part) : ln_zoo_backward(&part);
      }
      if (t.dropout && t.dw_hh) {
        for (int64_t n = 0; n < count; n += N) {
          drop(h_prev + n * H, t.dropout, N * H, h_room + n * H, false);
        }
        h_prev = h_room;
      }
      // du may have any mean over the examples of a step: centred rows cancel it. The gradient of
      // the inputs is centred below.
      if (t.dw_hh && examples.own(second_place())) h_prev = centered(chunk, h_prev, H);
      const bool own = examples.own(first_place());
      const float* x = inputs_of(chunk, x_room);
      if (merged && !own) {
        weight_gradients(count, G, du, h_prev, H, t.dw_hh, x, I, t.dw_ih, more, room, a.threads);
      } else {
        weight_gradient(count, G, du, h_prev, H, t.dw_hh, more, room, a.threads);
        if (t.dw_ih && own) x = centered(chunk, x, I);
        weight_gradient(count, G, dv, x, I, t.dw_ih, more, room, a.threads);
      }
      if (later.du) copy(x, count * I, later.x), copy(h_prev, count * H, later.h);
      if (t.dbias_inner) few_sum(count, G, dv, t.dbias_inner, more || later.du, a.threads);
      if (!t.dx) continue;
      float* const dx = apart_ > N ? x_room : t.dx + row * I;
      input_gradient(count, dv, w_ih, dx, room);
      if (own) without_means(chunk.steps, a.examples, I, dx, dx, means, a.threads);
      for (int64_t i = 0; apart_ > N && i < chunk.steps; i++) {
        copy(dx + i * N * I, N * I, t.dx + (chunk.step + i) * apart_ * I);
      }
    }
    if (a.negated) negate_update(s.dbias), negate_update(s.dgain_recurrent);
    if (a.joint && a.cell == GRU) copy(s.dbias_hn, H, s.dbias + 2 * H);
    const auto give = [&](float* to, const float* from, int64_t n) {
      if (to) later.du ? ::add(from, to, n) : copy(from, n, to);
    };
    give(t.dbias_ih, s.dbias, G);
    give(t.dbias_hh, s.dbias, a.cell == GRU ? 2 * H : G);
    if (a.cell == GRU && t.dbias_hh) give(t.dbias_hh + 2 * H, s.dbias_hn, H);
    give(t.dgain_input, s.dgain_input, G), give(t.dgain_recurrent, s.dgain_recurrent, G);
    give(t.dgain_out, s.dgain_out, H), give(t.dshift_out, s.dshift_out, H);
  }

  // w (G, K) = d^T of, or w += d^T of; d and of have `count` rows.
  static void weight_gradient(int64_t count, int64_t G, const float* d, const float* of, int64_t K,
                              float* w, bool add, float* room, int64_t threads) {
    if (!w) return;
    if (count <= OUTER_ROWS && !add) return few_outer(count, G, K, d, of, w, threads);
    if (thin(K)) return thin_outer(count, G, K, d, of, w, add, room, threads);
    Packed packed{room, count, K, suits_parts(G, count, K, true)};
    packed.fill(of, K, 1, Center{}, threads);
    packed.multiply(G, {d, 1, G}, w, add, threads);
  }

  // The same for both weights if they share d, which is then split once.
  static void weight_gradients(int64_t count, int64_t G, const float* d, const float* h, int64_t H,
                               float* dw_hh, const float* x, int64_t I, float* dw_ih, bool add,
                               float* room, int64_t threads) {
    if (!dw_hh || !dw_ih || thin(H) || thin(I) || !suits_parts(G, count, H + I, true)) {
      weight_gradient(count, G, d, h, H, dw_hh, add, room, threads);
      weight_gradient(count, G, d, x, I, dw_ih, add, room, threads);
      return;
    }
    float* const room_x = room + parts_size(count, H);
    pack_parts(h, H, 1, count, H, room, Center{}, threads);
    pack_parts(x, I, 1, count, I, room_x, Center{}, threads);
    by_parts(threads, G * (H + I) * count, G, [&](int64_t from, int64_t to) {
      parts_product(to - from, count, {d + from, 1, G},
                    {{room, H, dw_hh + from * H, H}, {room_x, I, dw_ih + from * I, I}}, add);
    });
  }

  // Size of `room`.
  static int64_t weight_room(int64_t count, int64_t G, int64_t H, int64_t I) {
    return std::max(ln_zoo_packed_size(count, std::max(H, I), 0),
                    parts_size(count, H) + parts_size(count, I)) +
           THIN * G;
  }

 private:
  struct Chunk {
    int64_t step, steps;
  };

  const Call& a;
  const Tensors& t;
  const int64_t apart_;
  std::vector<int64_t> sizes_;
  Steps s;
  const Shape shape;
  OverExamples examples;
  const int64_t rows;
  const bool in_place, each_step_, merged;
  const std::vector<Chunk> chunks_;
  Arena arena;
  float *rows_room, *means;  // of `centered`
  float* bias_inner = nullptr;  // (G,), centred

  static bool thin(int64_t columns) { return columns < THIN; }

  Steps steps() const {
    Steps s{};
    s.cell = a.cell, s.steps = a.steps, s.examples = a.examples, s.hidden = a.hidden;
    s.threads = a.threads, s.shares = a.shares, s.sizes = sizes_.data();
    s.input = a.input, s.recurrent = a.recurrent, s.out = a.out;
    s.dropout = t.dropout, s.zoneout_h = t.zoneout_h, s.zoneout_c = t.zoneout_c;
    s.share_h = a.share_h, s.share_c = a.share_c, s.reset = t.reset;
    s.joint = a.joint, s.carried = a.carried, s.skipped = apart_ - a.examples;
    return s;
  }

  std::vector<Chunk> chunks() const {
    const int64_t most = t.kept ? a.chunk_kept : a.chunk_alone;
    const int64_t count = in_place ? 1 : std::min(a.steps, (rows + most - 1) / most);
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
    part.reset = from(s.reset, 1);
    return part;
  }

  int first_place() const { return merged ? second_place() : INPUT; }
  int second_place() const { return shape.gates == 1 ? OUT : RECURRENT; }
  Rows first() const { return merged ? second() : a.input; }
  Rows second() const { return shape.gates == 1 ? a.out : a.recurrent; }

  // Convert a vector (G,) between update gates of the new state and of the old, 1 minus the former.
  void negate_update(float* vector) const {
    for (int64_t k = shape.H; k < 2 * shape.H; k++) vector[k] = -vector[k];
  }

  // Memory for the statistics over examples of one chunk.
  void make_room() {
    if (!examples.any()) return;
    const int64_t widest = std::max(shape.H, a.inputs), most = longest();
    rows_room = arena.take(most * widest), means = arena.take(most / a.examples * widest);
    examples.reserve(most / a.examples, arena);
  }

  // Subtract from a chunk's rows (rows, F) their means over the examples of each step, `means`.
  const float* centered(const Chunk& chunk, const float* of, int64_t F) const {
    without_means(chunk.steps, a.examples, F, of, rows_room, means, a.threads);
    return rows_room;
  }

  void start(float* to, const float* from) const {
    const int64_t n = a.examples * shape.H;
    if (!to) return;
    if (from)
      copy(from, n, to);
    else
      std::fill(to, to + n, 0.0f);
  }

  // Inputs of a chunk, in place or copied.
  const float* inputs_of(const Chunk& chunk, float* room) const {
    const int64_t n = a.examples * a.inputs;
    const float* const x = t.x + chunk.step * apart_ * a.inputs;
    if (apart_ == a.examples) return x;
    for (int64_t i = 0; i < chunk.steps; i++) copy(x + i * apart_ * a.inputs, n, room + i * n);
    return room;
  }

  // Values of the previous step for each row of a chunk, from those after all steps, with rows
  // `apart` between steps.
  const float* before(const Chunk& chunk, const float* at_first, const float* after, int64_t apart,
                      float* room) const {
    const int64_t n = a.examples * shape.H, H = shape.H;
    if (apart == a.examples && chunk.step > 0 && !t.reset) return after + (chunk.step - 1) * n;
    for (int64_t i = 0; i < chunk.steps; i++) {
      const int64_t step = chunk.step + i;
      step ? copy(after + (step - 1) * apart * H, n, room + i * n) : start(room, at_first);
    }
    restart(s, row_of(chunk), 0, rows_of(chunk), H, room, nullptr);
    return room;
  }

  // Means of a weight's rows, (gates, K), if centred.
  const float* means_of_rows(const float* w, int64_t K, const Rows& rows) {
    if (!rows.scale || !rows.center) return nullptr;
    float* means = arena.take(shape.gates * K);
    ln_zoo_means(w, shape.gates, shape.H, K, rows.groups, means, a.threads);
    return means;
  }

  // Pack a weight (G, K), or its transpose, centred by rows. `count` is the rows of the whole call,
  // so that results do not depend on chunks and threads.
  Packed pack(const float* w, int64_t K, const Rows& rows, bool transposed, int64_t count) {
    const int64_t G = shape.G, k = transposed ? K : G, n = transposed ? G : K;
    const float* means = means_of_rows(w, K, rows);
    Packed found{nullptr, k, n, suits_parts(count, k, n, false)};
    found.numbers = arena.take(found.size());
    found.fill(w, transposed ? 1 : K, transposed ? K : 1, {means, shape.H, K, transposed},
               a.threads);
    return found;
  }

  // Pack the recurrent weight for threads that split the units or the examples.
  void pack_recurrent(bool backward) {
    const Rows rows = backward ? Rows{} : second();
    if (s.shares == 1) {
      // Normalisation over examples does not support parts.
      const Packed found =
          pack(t.w_hh, shape.H, rows, !backward, examples.any() ? 0 : a.examples);
      s.weight = found.numbers, s.parts = found.parts;
      return;
    }
    const float* means = means_of_rows(t.w_hh, shape.H, rows);
    float* to = arena.take(ln_zoo_share_packed_size(shape.gates, shape.H, s.shares, backward));
    ln_zoo_share_pack(shape.gates, shape.H, s.shares, backward, t.w_hh, to, means, a.threads);
    s.weight = to;
  }

  // dx (count, I) = dv w; `packed` is w.
  void input_gradient(int64_t count, const float* dv, const Packed& packed, float* dx,
                      float* room) const {
    const int64_t G = shape.G, I = a.inputs;
    if (thin(I)) return thin_by_matrix(count, G, I, dv, t.w_ih, dx, room, a.threads);
    if (in_place) return in_place_by_matrix(count, G, I, dv, t.w_ih, dx, false, a.threads);
    packed.multiply(count, {dv, G, 1}, dx, false, a.threads);
  }

  // Threads for the rows of a step between its products.
  int64_t threads_of_rows() const {
    return threads_for(a.threads, std::min(a.examples, a.examples * shape.G / 8192 + 1));
  }

  // Rows whose products fit the second-level cache.
  static constexpr int64_t PART = 64;

  // v (count, G) for inputs x, with weights read in place.
  void input_terms(int64_t count, const float* x, float* v) const {
    in_place_by_transposed(count, shape.G, a.inputs, x, t.w_ih, v, a.threads);
    for (int64_t n = 0; bias_inner && n < count; n++) ::add(bias_inner, v + n * shape.G, shape.G);
  }

  void steps_in_place() {
    const int64_t N = a.examples, H = shape.H, G = shape.G, threads = threads_of_rows();
    float* v = merged ? arena.take(rows * G) : static_cast<float*>(s.v);
    float *u = static_cast<float*>(s.u), *scratch = arena.take(threads * ROOM * H);
    float* const output = static_cast<float*>(s.output);
    float* dropped = t.dropout ? arena.take(N * H) : nullptr;
    const bool single = a.steps == 1;
    if (!single) input_terms(rows, t.x, v);
    for (int64_t part = 0; part < rows; part += std::min(N, PART)) {
      const int64_t step = part / N, first = part % N, count = std::min(PART, N - first);
      restart(s, step * N, first, first + count, H, t.h, t.c);
      const float* h_before = t.h + first * H;
      if (t.dropout) {
        drop(h_before, t.dropout + first * H, count * H, dropped, false);
        h_before = dropped;
      }
      if (single) input_terms(count, t.x + first * a.inputs, v + first * G);
      in_place_by_transposed(count, G, H, h_before, t.w_hh, u + part * G, a.threads);
      in_parallel(threads, [&](int64_t i) {
        float unused[STATS];
        for (int64_t n = first + count * i / threads; n < first + count * (i + 1) / threads; n++) {
          const int64_t row = step * N + n;
          float *const u_row = u + row * G, *const v_row = v + row * G;
          if (merged) ::add(v_row, u_row, G);
          center(s.input, v_row, shape.gates, H), center(s.recurrent, u_row, shape.gates, H);
          float *h = t.h + n * H, *c = t.c ? t.c + n * H : nullptr;
          forward_row(s, shape, row, v_row, u_row, h, c, s.stats ? s.stats + row * STATS : unused,
                      scratch + i * ROOM * H);
          copy(h, H, output + row * H);
          if (s.cells) copy(c, H, s.cells + row * H);
        }
      });
    }
  }

  void steps_back_in_place(const Steps& s) {
    const int64_t N = a.examples, H = shape.H, G = shape.G, threads = threads_of_rows();
    float *scratch = arena.take(threads * ROOM_BACK * H), *zeros = arena.take(H);
    float* dropped = t.dropout ? arena.take(N * H) : nullptr;
    std::fill(zeros, zeros + H, 0.0f);
    std::vector<Sums> sums;
    sums.reserve(threads);
    for (int64_t i = 0; i < threads; i++) sums.emplace_back(shape);
    const float *v = static_cast<const float*>(s.v), *u = static_cast<const float*>(s.u);
    const float* h_prev = static_cast<const float*>(s.h_prev);
    float *du = static_cast<float*>(s.du), *dv = static_cast<float*>(s.dv);
    for (int64_t step = a.steps - 1; step >= 0; step--) {
      in_parallel(threads, [&](int64_t i) {
        for (int64_t n = N * i / threads; n < N * (i + 1) / threads; n++) {
          const int64_t row = step * N + n, g = row * G, j = row * H;
          backward_row(s, shape, row, n, v + g, u + g, h_prev + j,
                       t.d_output ? t.d_output + j : zeros, s.dh + n * H, dv + g, du + g, sums[i],
                       scratch + i * ROOM_BACK * H);
        }
      });
      float* to = t.dropout ? dropped : s.dh;
      in_place_by_matrix(N, G, H, du + step * N * G, t.w_hh, to, passes(s) && !t.dropout,
                         a.threads);
      if (t.dropout) drop(to, t.dropout, N * H, s.dh, passes(s));
      restart(s, step * N, 0, N, H, s.dh, s.dc);
    }
    ::add(sums, shape, s);
  }
};

// Move the tensors of a call to those of its examples from `first` on.
void skip_examples(const Call& a, int64_t first, Tensors& t) {
  const auto skip = [&](auto*& p, int64_t width) {
    if (p) p += first * width;
  };
  skip(t.x, a.inputs), skip(t.dx, a.inputs);
  skip(t.output, a.hidden), skip(t.d_output, a.hidden);
  skip(t.h0, a.hidden), skip(t.h, a.hidden), skip(t.d_h, a.hidden), skip(t.dh0, a.hidden);
  skip(t.c0, a.hidden), skip(t.c, a.hidden), skip(t.d_c, a.hidden), skip(t.dc0, a.hidden);
  skip(t.kept, Direction::keeps(a) / a.examples);
}

// Gradients that are summed over examples, of each part; those of the first are the call's own.
class SumsOfParts {
 public:
  SumsOfParts(const Call& a, const Tensors& t, int64_t parts) : t_(t), parts_(parts) {
    const int64_t H = a.hidden, G = gates_of(a.cell) * H;
    const Sum sums[] = {{&Tensors::dw_ih, G * a.inputs}, {&Tensors::dw_hh, G * H},
                        {&Tensors::dbias_ih, G},         {&Tensors::dbias_hh, G},
                        {&Tensors::dgain_input, G},      {&Tensors::dgain_recurrent, G},
                        {&Tensors::dgain_out, H},        {&Tensors::dshift_out, H}};
    for (const Sum& sum : sums) {
      if (t.*sum.to) sums_.push_back(sum), size_ += sum.size;
    }
    thread_local Room room;
    others_ = room.take((parts - 1) * size_);
  }
  // Let a part write to copies of its own.
  void redirect(int64_t part, Tensors& t) const {
    if (part == 0) return;
    float* to = others_ + (part - 1) * size_;
    for (const Sum& sum : sums_) t.*sum.to = to, to += sum.size;
  }
  void add_up(int64_t threads) const {
    const float* from = others_;
    for (const Sum& sum : sums_) {
      by_parts(threads, parts_ * sum.size, sum.size, [&](int64_t first, int64_t end) {
        for (int64_t i = 0; i < parts_ - 1; i++) {
          add(from + i * size_ + first, t_.*sum.to + first, end - first);
        }
      });
      from += sum.size;
    }
  }

 private:
  struct Sum {
    float* Tensors::*to;
    int64_t size;
  };
  const Tensors& t_;
  const int64_t parts_;
  std::vector<Sum> sums_;
  int64_t size_ = 0;
  float* others_;
};

// Run one direction, or a part of its examples on each thread.
template <class Run>
void by_examples(const Call& a, const Tensors& t, Run run) {
  const bool masks = t.dropout || t.zoneout_h || t.zoneout_c || t.reset;
  const int64_t parts = masks || !Direction::each_step(a, t)
                            ? 1
                            : parts_of_examples(a.steps, a.examples, a.inputs, a.hidden, a.threads);
  if (parts == 1) {
    Direction direction(a, t, a.examples);
    return run(direction);
  }
  const SumsOfParts sums(a, t, parts);
  in_parallel(parts, [&](int64_t i) {
    const int64_t first = a.examples * i / parts;
    Call part = a;
    part.examples = a.examples * (i + 1) / parts - first, part.threads = 1;
    part.chunk_kept = std::max(LEAST_ROWS, a.chunk_kept / parts);
    Tensors own = t;
    skip_examples(a, first, own);
    sums.redirect(i, own);
    Direction direction(part, own, a.examples);
    run(direction);
  });
  sums.add_up(a.threads);
}

}  // namespace

extern "C" {

// Size of the tensors that a call saves, in floats.
int64_t ln_zoo_call_keeps(const Call* call) { return Direction::keeps(*call); }

void ln_zoo_call_forward(const Call* call, const Tensors* t) {
  by_examples(*call, *t, [](Direction& direction) { direction.forward(); });
}

void ln_zoo_call_backward(const Call* call, const Tensors* t) {
  by_examples(*call, *t, [](Direction& direction) { direction.backward(); });
}

// Write or add the gradients of both weights from the rows of several steps.
void ln_zoo_call_weights(const Call* call, const Rooms* rooms, int64_t rows, float* dw_ih,
                         float* dw_hh, int64_t add) {
  const int64_t G = gates_of(call->cell) * call->hidden, H = call->hidden, I = call->inputs;
  Arena arena;
  float* const room = arena.take(Direction::weight_room(rows, G, H, I));
  if (!rooms->dv) {
    Direction::weight_gradients(rows, G, rooms->du, rooms->h, H, dw_hh, rooms->x, I, dw_ih, add,
                                room, call->threads);
    return;
  }
  Direction::weight_gradient(rows, G, rooms->dv, rooms->x, I, dw_ih, add, room, call->threads);
  Direction::weight_gradient(rows, G, rooms->du, rooms->h, H, dw_hh, add, room, call->threads);
}

}  // extern "C"
