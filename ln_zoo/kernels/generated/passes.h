// Passes of a generated kernel over all steps of a call, or of a part of its examples. Before it:
// the constants, `hoist`, and the levels of a step, FORWARD and BACKWARD.

#pragma once

namespace {

const int64_t K = int64_t(PRODUCTS.size()), STATES = int64_t(WIDTHS.size());
// Places in `Call::given`.
constexpr int64_t GIVEN_WEIGHTS = 2, GIVEN_STATES = 4, GIVEN_PARAMETERS = 4 + WIDTHS.size();
constexpr int64_t GIVEN_DROPPED = GIVEN_PARAMETERS + SIZES.size();
constexpr int64_t GIVEN = GIVEN_DROPPED + 2 + WIDTHS.size();

// Tensors of a step

// First row of x, output and their gradients.
int64_t Work::outer_row(int64_t t) const { return offsets[t] + t * skipped; }
// Input terms, of which a call without a backward pass has one step or one chunk.
// Without an input weight, they are x.
float* Work::term(int64_t t) const {
  if (!given[1]) return const_cast<float*>(given[0]) + outer_row(t) * G;
  return v + (saves || !each_step ? offsets[t] * G : 0);
}
const bool* Work::held(int64_t i) const {
  return reinterpret_cast<const bool*>(given[GIVEN_DROPPED + 2 + i]);
}
const float* Work::before(int64_t t, int64_t i) const {
  return t ? after(t - 1, i) : given[GIVEN_STATES + i];
}
float* Work::after(int64_t t, int64_t i) const {
  if (i == 0) return states[0] + outer_row(t) * WIDTHS[0];
  return states[i] + (saves && KEPT[i] ? offsets[t] : t % 2 * examples) * WIDTHS[i];
}
float* Work::gradient(int64_t t, int64_t i) const {
  return dstates[i] + t % 2 * examples * WIDTHS[i];
}
float* Work::product(int64_t t, int64_t k) const {
  return terms[k] + (saves ? offsets[t] * PRODUCTS[k].width : 0);
}
float* Work::left(int64_t t, int64_t k) const {
  return lefts[k] + (saves ? offsets[t] * PRODUCTS[k].inner : 0);
}
const float* Work::left_of(int64_t t, int64_t k) const {
  const int64_t state = PRODUCTS[k].left_state;
  return state < 0 ? left(t, k) : before(t, state);
}

// Products of a step

// All pieces of a product, those of a block one after the other.
std::vector<Piece> pieces_of(const Product& p) {
  if (p.blocks == 1) return {{0, p.first, 0, p.inner, p.width, true}};
  std::vector<Piece> found;
  const int64_t D = p.inner / p.blocks;
  for (int64_t k = 0; k < p.blocks; k++) {
    const int64_t row = (k * p.rows + p.first) / p.blocks;
    for (int64_t g = 0; g < p.width / p.inner; g++) {
      found.push_back({k * D, row + g * D, g * p.inner + k * D, D, D, g == 0});
    }
  }
  return found;
}

const std::vector<std::vector<Piece>> PIECES = [] {
  std::vector<std::vector<Piece>> found;
  for (const Product& p : PRODUCTS) found.push_back(pieces_of(p));
  return found;
}();

// Call `body(piece, index, share, shares)` for a share of a product: of the blocks, or of the
// columns of a single piece.
template <class Body>
void for_pieces(int64_t k, int64_t share, int64_t shares, Body body) {
  const std::vector<Piece>& pieces = PIECES[k];
  const int64_t blocks = PRODUCTS[k].blocks, each = int64_t(pieces.size()) / blocks;
  if (blocks == 1) return body(pieces[0], 0, share, shares);
  for (int64_t i = blocks * share / shares * each; i < blocks * (share + 1) / shares * each; i++) {
    body(pieces[i], i, 0, 1);
  }
}

void Work::multiply_input(int64_t t, int64_t first, int64_t end) const {
  if (!given[1]) return;
  const float* const x = given[0] + (outer_row(t) + first) * inputs;
  w_ih.multiply(end - first, x, inputs, 1, term(t) + first * G, G, false);
}

void Work::multiply_forward(int64_t k, int64_t t, int64_t first, int64_t end, int64_t share,
                            int64_t shares) const {
  const Product& p = PRODUCTS[k];
  const float* const from = left_of(t, k) + first * p.inner;
  float* const to = product(t, k) + first * p.width;
  if (t == 0 && all_zero(from, (end - first) * p.inner)) {
    if (share == 0) std::fill(to, to + (end - first) * p.width, 0.0f);
  } else {
    for_pieces(k, share, shares, [&](const Piece& q, int64_t i, int64_t s, int64_t n) {
      matrices[k][i].multiply(end - first, from + q.from, p.inner, 1, to + q.to, p.width, false, s,
                              n);
    });
  }
}

void Work::multiply_backward(int64_t k, int64_t t, int64_t first, int64_t end, int64_t share,
                             int64_t shares) const {
  const Product& p = PRODUCTS[k];
  const float* const from = du[k] + (offsets[t] + first) * p.width;
  float* const left = p.gradient_state < 0 ? dlefts[k] : gradient(t, p.gradient_state);
  float* const to = left + first * p.inner;
  for_pieces(k, share, shares, [&](const Piece& q, int64_t i, int64_t s, int64_t n) {
    matrices[k][i].multiply(end - first, from + q.to, p.width, 1, to + q.from, p.inner,
                            p.adds || !q.first, s, n);
  });
}

// Packing

// Means of the rows of a weight (blocks * unit, F) over the group of each block; null where no
// block is centred. groups[q] is the first block of the group of block q, or -1.
float* means_of(Arena& arena, const float* w, int64_t blocks, int64_t unit, int64_t F,
                const int64_t* groups) {
  if (std::all_of(groups, groups + blocks, [](int64_t q) { return q < 0; })) return nullptr;
  float* const means = arena.take(blocks * F);
  std::fill(means, means + blocks * F, 0.0f);
  for (int64_t q = 0, end; q < blocks; q = end) {
    for (end = q + 1; end < blocks && groups[q] >= 0 && groups[end] == groups[q];) end++;
    float* const mean = means + q * F;
    for (int64_t k = q * unit; groups[q] >= 0 && k < end * unit; k++) {
      for (int64_t j = 0; j < F; j++) mean[j] += w[k * F + j];
    }
    for (int64_t j = 0; j < F; j++) mean[j] /= float((end - q) * unit);
    for (int64_t k = q + 1; k < end; k++) std::copy_n(mean, F, means + k * F);
  }
  return means;
}

// Rows of a call up to which its weights are not packed.
constexpr int64_t FEW_ROWS = 24;

// Pack (K, N) for products with about `rows` rows, unless the call has few.
Matrix packed(Arena& arena, const Work& a, const float* from, int64_t row, int64_t column,
              int64_t inner, int64_t outer, int64_t rows, const float* means = nullptr,
              int64_t hidden = 1) {
  const Products& of = *a.products;
  if (!means && !a.narrow && a.offsets[a.steps] <= FEW_ROWS) {
    return {&of, 0, inner, outer, nullptr, from, row, column};
  }
  const int64_t kind = of.kind(rows, inner, outer, a.narrow);
  Matrix m{&of, kind, inner, outer, arena.take(of.size(kind, inner, outer))};
  of.pack(kind, from, row, column, inner, outer, m.data, means, hidden, a.threads);
  return m;
}

// Rows of the weight of a piece, (width, inner).
const float* rows_of(const Work& a, const Product& p, const Piece& q) {
  return a.given[GIVEN_WEIGHTS + p.weight] + q.row * q.inner;
}

// C (M, N) = A (M, K) times a matrix, or C +=; threads split the rows.
void multiply_rows(const Matrix& m, int64_t M, const float* a, int64_t row, int64_t column,
                   float* c, bool add, int64_t threads) {
  constexpr int64_t HEIGHT = 6;
  const int64_t blocks = (M + HEIGHT - 1) / HEIGHT;
  threads = threads_for(threads, std::min(blocks, M * m.N * m.K / 65536 + 1));
  in_parallel(threads, [&](int64_t i) {
    const int64_t m0 = blocks * i / threads * HEIGHT;
    const int64_t m1 = std::min(M, blocks * (i + 1) / threads * HEIGHT);
    if (m0 < m1) m.multiply(m1 - m0, a + m0 * row, row, column, c + m0 * m.N, m.N, add);
  });
}

// Chunks and threads

struct Span {
  int64_t from, to;  // steps
};

std::vector<Span> chunks_of(const Work& a) {
  const int64_t rows = a.offsets[a.steps];
  std::vector<Span> found;
  for (int64_t from = 0, to = 0; from < a.steps; from = to) {
    while (to < a.steps && a.offsets[to] - a.offsets[from] < a.chunk) to++;
    // A small rest joins the last chunk.
    if (rows - a.offsets[to] < a.chunk / 2) to = a.steps;
    found.push_back({from, to});
  }
  return found;
}

int64_t most_rows(const Work& a, const std::vector<Span>& chunks) {
  int64_t most = 0;
  for (const Span& c : chunks) most = std::max(most, a.offsets[c.to] - a.offsets[c.from]);
  return most;
}

// Shares of the columns of products, one per thread; 1: threads split the examples.
int64_t shares_of(const Call& a) {
  int64_t numbers = 0;
  for (const Product& p : PRODUCTS) numbers += p.width * p.inner / p.blocks;
  if (!numbers || a.narrow) return 1;
  return a.products->shares(numbers, H, a.examples, threads_for(a.threads, a.threads));
}

// Each thread's examples, of about equally many rows, with its memory.
std::vector<Part> parts_of(const Work& a, const Pass& pass, int64_t threads, Arena& arena) {
  std::vector<int64_t> starts{0};
  int64_t t = a.steps, rows = 0;
  for (int64_t n = 0; n < a.examples; n++) {
    if (rows >= a.offsets[a.steps] * int64_t(starts.size()) / threads) starts.push_back(n);
    while (t > 0 && a.sizes[t - 1] <= n) t--;
    rows += t;
  }
  starts.resize(threads + 1, a.examples);
  std::vector<Part> found;
  for (int64_t i = 0; i < threads; i++) {
    const int64_t first = starts[i], last = starts[i + 1], count = last - first;
    found.push_back({first,
                     last,
                     arena.take((pass.rows_apart ? count : 1) * pass.spills),
                     arena.take(count * pass.crossing),
                     {},
                     {},
                     0});
  }
  return found;
}

// Count the rows of a step whose gradients are added next, after adding sums of about sqrt(rows)
// rows to the totals: the rounding errors of one long sum would be larger.
void count_rows(const Work& a, Part& part, int64_t t) {
  const int64_t rows = std::max<int64_t>(0, std::min(part.last, a.sizes[t]) - part.first);
  if (part.summed && part.summed * part.summed >= a.offsets[a.steps]) {
    for (size_t i = 0; i < part.sums.size(); i++) {
      float *const from = part.sums[i], *const to = part.totals[i];
      for (int64_t j = 0; j < SIZES[i]; j++) to[j] += from[j], from[j] = 0.0f;
    }
    part.summed = 0;
  }
  part.summed += rows;
}

// Run a chunk. Each thread runs its own examples, without waiting; or, with shares of products, all
// wait for each other after each level and after each product.
void run(const Work& a, const Pass& pass, const Span& chunk, std::vector<Part>& parts,
         bool shared) {
  const int64_t count = int64_t(parts.size()), steps = chunk.to - chunk.from;
  const auto multiply = [&](int64_t level, int64_t t, int64_t first, int64_t end, int64_t share,
                            int64_t shares) {
    if (first >= end) return;
    pass.backward ? a.multiply_backward(K - 1 - level, t, first, end, share, shares)
                  : a.multiply_forward(level, t, first, end, share, shares);
  };
  const auto rows = [&](int64_t level, int64_t t, Part& part) {
    if (level == 0 && pass.backward) count_rows(a, part, t);
    if (pass.levels[level]) pass.levels[level](a, part, t);
  };
  if (shared) {
    std::vector<Stage> stages;
    for (int64_t level = 0; level <= K; level++) {
      if (pass.levels[level] || (level == 0 && pass.backward)) {
        stages.push_back(
            [&, level](int64_t i, int64_t k) { rows(level, chunk.from + k, parts[i]); });
      }
      if (level == K) break;
      stages.push_back([&, level](int64_t i, int64_t k) {
        multiply(level, chunk.from + k, 0, a.sizes[chunk.from + k], i, count);
      });
    }
    return by_steps(count, steps, pass.backward, stages);
  }
  in_parallel(count, [&](int64_t i) {
    Part& part = parts[i];
    for (int64_t k = 0; k < steps; k++) {
      const int64_t t = pass.backward ? chunk.to - 1 - k : chunk.from + k;
      const int64_t end = std::min(part.last, a.sizes[t]);
      if (a.each_step && !pass.backward) a.multiply_input(t, part.first, end);
      for (int64_t level = 0; level <= K; level++) {
        rows(level, t, part);
        if (level < K) multiply(level, t, part.first, end, 0, 1);
      }
    }
  });
}

// Place in memory what a forward pass writes and the backward pass reads; returns its size.
int64_t lay_out(Work& a, float* memory) {
  const int64_t rows = a.offsets[a.steps], some = a.saves ? rows : a.examples;
  int64_t size = 0;
  const auto take = [&](int64_t n) {
    float* const found = memory ? memory + size : nullptr;
    size += (n + 15) / 16 * 16;
    return found;
  };
  a.v = a.saves && a.given[1] ? take(rows * G) : nullptr;
  a.stats = take(some * STATS);
  a.states = {a.output}, a.terms.clear(), a.lefts.clear();
  for (int64_t i = 1; i < STATES; i++) {
    a.states.push_back(take((a.saves && KEPT[i] ? rows : 2 * a.examples) * WIDTHS[i]));
  }
  for (const Product& p : PRODUCTS) {
    a.terms.push_back(take(some * p.width));
    a.lefts.push_back(p.left_state < 0 ? take(some * p.inner) : nullptr);
  }
  return size;
}

void write_finals(const Work& a) {
  for (int64_t i = 0; i < STATES; i++) {
    for (int64_t t = 0; t < a.steps; t++) {
      const int64_t first = t + 1 < a.steps ? a.sizes[t + 1] : 0, width = WIDTHS[i];
      const float* const from = a.after(t, i);
      if (from == a.finals[i]) continue;  // the output of a single step
      std::copy(from + first * width, from + a.sizes[t] * width, a.finals[i] + first * width);
    }
  }
}

// Rows of a span, in place or copied to `room`; `of_step` finds those of a step.
template <class OfStep>
const float* rows_of(const Work& a, const Span& c, int64_t width, bool in_place, float* room,
                     OfStep of_step) {
  if (in_place) return of_step(c.from);
  float* to = room;
  for (int64_t t = c.from; t < c.to; t++) to = std::copy_n(of_step(t), a.sizes[t] * width, to);
  return room;
}

// Add the part of a chunk to the gradient of a weight in blocks, or write it. Threads share the
// blocks; pieces are copied, to be contiguous.
void add_gradient_in_blocks(const Work& a, int64_t k, int64_t count, const float* d,
                            const float* left, float* to, bool add) {
  const Product& p = PRODUCTS[k];
  const int64_t D = p.inner / p.blocks, shares = threads_for(a.threads, p.blocks);
  in_parallel(shares, [&](int64_t share) {
    Arena arena;
    float *const own_left = arena.take(count * D), *const own_d = arena.take(count * D);
    const auto copy = [&](const float* from, int64_t row, float* room) {
      for (int64_t i = 0; i < count; i++) std::copy_n(from + i * row, D, room + i * D);
    };
    for_pieces(k, share, shares, [&](const Piece& q, int64_t, int64_t, int64_t) {
      if (q.first) copy(left + q.from, p.inner, own_left);
      copy(d + q.to, p.width, own_d);
      a.products->outer(count, D, D, own_d, own_left, to + q.row * D, add, a.narrow, 1);
    });
  });
}

// Write gradients of weights from the rows of a chunk, or add to them if later chunks have written;
// `room` is for copies of the rows.
void add_gradients(const Work& a, const Span& c, const float* dv, const std::vector<float*>& du,
                   bool more, float* room) {
  const int64_t I = a.inputs, count = a.offsets[c.to] - a.offsets[c.from];
  const auto outer = [&](const float* d, int64_t width, const float* left, int64_t inner, float* to,
                         bool add) {
    a.products->outer(count, width, inner, d, left, to, add, a.narrow, a.threads);
  };
  if (a.gradients[1]) {
    const auto inputs = [&](int64_t t) { return a.given[0] + a.outer_row(t) * I; };
    outer(dv, G, rows_of(a, c, I, !a.skipped, room, inputs), I, a.gradients[1], more);
  }
  for (int64_t k = 0; k < K; k++) {
    const Product& p = PRODUCTS[k];
    float* const to = a.gradients[GIVEN_WEIGHTS + p.weight];
    if (!to) continue;
    const bool equal = c.from > 0 && a.sizes[c.from - 1] == a.sizes[c.to - 1];
    const bool in_place = p.left_state < 0 || (equal && !(p.left_state == 0 && a.skipped));
    const float* const left =
        rows_of(a, c, p.inner, in_place, room, [&](int64_t t) { return a.left_of(t, k); });
    if (p.blocks > 1) {
      add_gradient_in_blocks(a, k, count, du[k], left, to, more || ADDS[k]);
    } else {
      outer(du[k], p.width, left, p.inner, to + p.first * p.inner, more || ADDS[k]);
    }
  }
}

// Write the gradient of the inputs of a chunk; `room` is for the rows of a part.
void write_input_gradient(const Work& a, const Span& c, const float* dv, float* room) {
  const int64_t I = a.inputs, count = a.offsets[c.to] - a.offsets[c.from];
  float *const dx = a.gradients[0], *const to = a.skipped ? room : dx + a.offsets[c.from] * I;
  if (!a.given[1]) {
    std::copy_n(dv, count * G, to);
  } else if (!a.products->thin(count, G, I, dv, a.given[1], to, a.threads)) {
    multiply_rows(a.w_ih, count, dv, G, 1, to, false, a.threads);
  }
  for (int64_t t = c.from; a.skipped && t < c.to; t++) {
    std::copy_n(room + (a.offsets[t] - a.offsets[c.from]) * I, a.examples * I,
                dx + a.outer_row(t) * I);
  }
}

std::vector<float*> zeros_of_parameters(Arena& arena) {
  std::vector<float*> found;
  for (int64_t size : SIZES) {
    found.push_back(arena.take(size));
    std::fill(found.back(), found.back() + size, 0.0f);
  }
  return found;
}

void write_sums(const Work& a, const std::vector<Part>& parts) {
  for (size_t i = 0; i < SIZES.size(); i++) {
    float* const to = a.gradients[GIVEN_PARAMETERS + i];
    if (!to) continue;
    if (!a.rooms) std::fill(to, to + SIZES[i], 0.0f);
    for (const Part& part : parts) {
      const float *const sums = part.sums[SAME_SUMS[i]], *const totals = part.totals[SAME_SUMS[i]];
      for (int64_t j = 0; j < SIZES[i]; j++) to[j] += totals[j] + sums[j];
    }
  }
}

// Places of the products in `Call::rooms`.
constexpr int64_t ROOMS_PRODUCTS = 2;

// Copy the left operands of the products of a step, and its inputs.
void keep_operands(const Work& a) {
  if (a.given[1]) std::copy_n(a.given[0], a.examples * a.inputs, a.rooms[1]);
  for (int64_t k = 0; k < K; k++) {
    std::copy_n(a.left_of(0, k), a.examples * PRODUCTS[k].inner,
                a.rooms[ROOMS_PRODUCTS + 2 * k + 1]);
  }
}

// Gradients of states, of the last step and the one before in turn; both start as those after the
// last step.
void start_gradients(Work& a, Arena& arena) {
  for (int64_t i = 0; i < STATES; i++) {
    const int64_t size = a.examples * WIDTHS[i];
    float* const to = arena.take(2 * size);
    a.dstates.push_back(to);
    for (float* half : {to, to + size}) {
      a.dfinals[i] ? std::copy_n(a.dfinals[i], size, half) : std::fill_n(half, size, 0.0f);
    }
  }
}

// Passes

void forward(Work& a, Arena& arena) {
  const int64_t I = a.inputs, rows = a.offsets[a.steps], shares = shares_of(a);
  const int64_t threads = shares > 1 ? shares : threads_for(a.threads, a.examples);
  const int64_t of_product = shares > 1 ? 1 : a.examples / threads;
  const float* const w = a.given[1];
  if (w) {
    const float* const means = means_of(arena, w, G / H, H, I, INPUT_GROUPS);
    a.w_ih = packed(arena, a, w, 1, I, I, G, rows, means, H);
  }
  for (const Product& p : PRODUCTS) {
    std::vector<Matrix> matrices;
    for (const Piece& q : PIECES[a.matrices.size()]) {
      const float* const w = rows_of(a, p, q);
      const float* const means =
          p.blocks > 1 ? nullptr
                       : means_of(arena, w, p.width / p.unit, p.unit, p.inner, p.groups.data());
      matrices.push_back(
          packed(arena, a, w, 1, q.inner, q.inner, q.width, of_product, means, p.unit));
    }
    a.matrices.push_back(matrices);
  }
  std::vector<Part> parts = parts_of(a, FORWARD, threads, arena);
  const std::vector<Span> chunks = chunks_of(a);
  const int64_t most = a.each_step ? a.examples : most_rows(a, chunks);
  float* const room = a.saves || !w ? a.v : arena.take(most * G);
  for (const Span& c : chunks) {
    const int64_t first = a.offsets[c.from], count = a.offsets[c.to] - first;
    a.v = a.saves || a.each_step ? room : room - first * G;
    if (w && !a.each_step) {
      multiply_rows(a.w_ih, count, a.given[0] + first * I, I, 1, a.term(c.from), false, a.threads);
    }
    run(a, FORWARD, c, parts, shares > 1);
  }
  write_finals(a);
}

void backward(Work& a, Arena& arena) {
  const int64_t I = a.inputs, shares = shares_of(a);
  const int64_t threads = shares > 1 ? shares : threads_for(a.threads, a.examples);
  const int64_t of_product = shares > 1 ? 1 : a.examples / threads;
  const std::vector<Span> chunks = chunks_of(a);
  const int64_t most = most_rows(a, chunks);
  int64_t widest = I;
  std::vector<float*> du;
  for (const Product& p : PRODUCTS) {
    std::vector<Matrix> matrices;
    for (const Piece& q : PIECES[a.matrices.size()]) {
      matrices.push_back(
          packed(arena, a, rows_of(a, p, q), q.inner, 1, q.width, q.inner, of_product));
    }
    a.matrices.push_back(matrices);
    du.push_back(a.rooms ? a.rooms[ROOMS_PRODUCTS + 2 * du.size()] : arena.take(most * p.width));
    a.dlefts.push_back(p.gradient_state < 0 ? arena.take(a.examples * p.inner) : nullptr);
    widest = std::max(widest, p.inner);
  }
  float* const dv = a.rooms ? a.rooms[0] : arena.take(most * G);
  float* const room = arena.take(most * widest);
  if (a.gradients[0] && a.given[1]) {
    a.w_ih = packed(arena, a, a.given[1], I, 1, G, I, a.offsets[a.steps]);
  }
  std::vector<Part> parts = parts_of(a, BACKWARD, threads, arena);
  for (Part& part : parts) {
    part.sums = zeros_of_parameters(arena), part.totals = zeros_of_parameters(arena);
  }
  float* const zeros = arena.take(WIDTHS[0]);
  std::fill_n(zeros, WIDTHS[0], 0.0f);
  a.zeros = zeros;
  start_gradients(a, arena);
  for (size_t i = chunks.size(); i-- > 0;) {
    const Span& c = chunks[i];
    const int64_t first = a.offsets[c.from];
    a.dv = dv - first * G, a.du = du;
    for (int64_t k = 0; k < K; k++) a.du[k] -= first * PRODUCTS[k].width;
    run(a, BACKWARD, c, parts, shares > 1);
    add_gradients(a, c, dv, du, i + 1 < chunks.size(), room);
    if (a.gradients[0]) write_input_gradient(a, c, dv, room);
  }
  write_sums(a, parts);
  if (a.rooms) keep_operands(a);
  for (int64_t i = 0; i < STATES; i++) {
    float* const to = a.gradients[GIVEN_STATES + i];
    if (to) std::copy_n(a.gradient(0, i), a.examples * WIDTHS[i], to);
  }
}

}  // namespace
