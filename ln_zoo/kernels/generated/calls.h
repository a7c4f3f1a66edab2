// Passes of a generated kernel over all steps. Before it: the constants, `hoist`, `forward` and
// `backward` of a step.

#pragma once

namespace {

const int64_t K = int64_t(PRODUCTS.size()), STATES = int64_t(WIDTHS.size());

// Tensors of a step

const float* Work::before(int64_t t, int64_t i) const {
  return t ? after(t - 1, i) : initial[i];
}
float* Work::after(int64_t t, int64_t i) const {
  return states[i] + (kept[i] ? offsets[t] : t % 2 * examples) * WIDTHS[i];
}
float* Work::gradient(int64_t t, int64_t i) const {
  return gradients[i] + t % 2 * examples * WIDTHS[i];
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

void Work::multiply_forward(int64_t k, int64_t t, int64_t first, int64_t end) const {
  const Product& p = PRODUCTS[k];
  const float* const from = left_of(t, k) + first * p.inner;
  float* const to = product(t, k) + first * p.width;
  if (t == 0 && all_zero(from, (end - first) * p.inner)) {
    std::fill(to, to + (end - first) * p.width, 0.0f);
  } else {
    forward[k].multiply(end - first, from, p.inner, 1, to, false);
  }
}

void Work::multiply_backward(int64_t k, int64_t t, int64_t first, int64_t end, float* to,
                             bool add) const {
  const Product& p = PRODUCTS[k];
  const float* const from = du[k] + (offsets[t] + first) * p.width;
  transposed[k].multiply(end - first, from, p.width, 1, to, add);
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

// Pack (K, N) for products with about `rows` rows.
Matrix packed(Arena& arena, const Work& a, const float* from, int64_t row, int64_t column,
              int64_t inner, int64_t outer, int64_t rows, const float* means = nullptr,
              int64_t hidden = 1) {
  const Products& of = *a.products;
  const int64_t kind = of.kind(rows, inner, outer, false, a.narrow);
  Matrix m{&of, kind, inner, outer, arena.take(of.size(kind, inner, outer))};
  of.pack(kind, from, row, column, inner, outer, m.data, means, hidden, a.threads);
  return m;
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
    if (m0 < m1) m.multiply(m1 - m0, a + m0 * row, row, column, c + m0 * m.N, add);
  });
}

// Parts of a call

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

// First examples of each thread's part, of about equally many rows.
std::vector<int64_t> parts_of(const Work& a, int64_t threads) {
  std::vector<int64_t> found{0};
  int64_t t = a.steps, rows = 0;
  for (int64_t n = 0; n < a.examples; n++) {
    if (rows >= a.offsets[a.steps] * int64_t(found.size()) / threads) found.push_back(n);
    while (t > 0 && a.sizes[t - 1] <= n) t--;
    rows += t;
  }
  found.push_back(a.examples);
  return found;
}

template <class Body>
void over_examples(const std::vector<int64_t>& parts, Body body) {
  const int64_t count = int64_t(parts.size()) - 1;
  in_parallel(count, [&](int64_t i) { body(parts[i], parts[i + 1], i); });
}

Work work_of(const Call& call, Arena& arena) {
  Work a{call, {}, {}, {}, {}, nullptr, nullptr};
  a.offsets.resize(a.steps + 1);
  for (int64_t t = 0; t < a.steps; t++) a.offsets[t + 1] = a.offsets[t] + a.sizes[t];
  int64_t widest = H;
  for (int64_t width : WIDTHS) widest = std::max(widest, width);
  a.hoisted = arena.take(HOISTED * widest + 1);
  hoist(a, a.hoisted);
  return a;
}

void write_finals(const Work& a) {
  for (int64_t i = 0; i < STATES; i++) {
    for (int64_t t = 0; t < a.steps; t++) {
      const int64_t first = t + 1 < a.steps ? a.sizes[t + 1] : 0, width = WIDTHS[i];
      const float* const from = a.after(t, i);
      std::copy(from + first * width, from + a.sizes[t] * width, a.finals[i] + first * width);
    }
  }
}

// Rows of the left operand of a product in a span, in place or copied to `room`.
const float* rows_of_left(const Work& a, const Span& span, int64_t k, float* room) {
  const int64_t inner = PRODUCTS[k].inner;
  const bool in_place = PRODUCTS[k].left_state < 0 ||
                        (span.from > 0 && a.sizes[span.from - 1] == a.sizes[span.to - 1]);
  if (in_place) return a.left_of(span.from, k);
  for (int64_t t = span.from; t < span.to; t++) {
    const float* const from = a.left_of(t, k);
    std::copy(from, from + a.sizes[t] * inner,
              room + (a.offsets[t] - a.offsets[span.from]) * inner);
  }
  return room;
}

// Gradients of weights from the rows of a chunk.
class WeightGradients {
 public:
  WeightGradients(const Work& a, Arena& arena, int64_t most, int64_t widest) {
    int64_t size = 0;
    for (int64_t kind = 0; kind < 3; kind++) {
      size = std::max(size, a.products->size(kind, most, widest));
    }
    room_ = arena.take(size), copies_ = arena.take(most * widest);
  }

  // Write them, or add to them if later chunks have written.
  void add(const Work& a, const Span& c, const float* dv, bool more) const {
    const int64_t first = a.offsets[c.from], count = a.offsets[c.to] - first;
    if (a.dw_ih) of(a, count, dv, G, a.x + first * a.inputs, a.inputs, a.dw_ih, more);
    for (int64_t k = 0; k < K; k++) {
      const Product& p = PRODUCTS[k];
      if (!a.dweights[p.weight]) continue;
      of(a, count, a.du[k], p.width, rows_of_left(a, c, k, copies_), p.inner,
         a.dweights[p.weight] + p.first * p.inner, more || ADDS[k]);
    }
  }

 private:
  float *room_, *copies_;

  // to (width, inner) = d^T left, or +=; d and left have `count` rows.
  void of(const Work& a, int64_t count, const float* d, int64_t width, const float* left,
          int64_t inner, float* to, bool add) const {
    const Products& of = *a.products;
    const int64_t kind = of.kind(width, count, inner, true, a.narrow);
    of.pack(kind, left, inner, 1, count, inner, room_, nullptr, 1, a.threads);
    const Matrix m{&of, kind, count, inner, room_};
    multiply_rows(m, width, d, 1, width, to, add, a.threads);
  }
};

// A thread's sums of the gradients of parameters.
std::vector<float*> zeros_of_parameters(Arena& arena) {
  std::vector<float*> found;
  for (int64_t size : SIZES) {
    found.push_back(arena.take(size));
    std::fill(found.back(), found.back() + size, 0.0f);
  }
  return found;
}

void write_sums(const Work& a, const std::vector<std::vector<float*>>& sums) {
  for (size_t i = 0; i < SIZES.size(); i++) {
    float* const to = a.dparameters[i];
    if (!to) continue;
    std::fill(to, to + SIZES[i], 0.0f);
    for (const auto& own : sums) {
      for (int64_t j = 0; j < SIZES[i]; j++) to[j] += own[SAME_SUMS[i]][j];
    }
  }
}

}  // namespace

extern "C" {

int64_t ln_zoo_abi() { return LN_ZOO_ABI; }

void ln_zoo_cell_forward(const Call* call) {
  Arena arena;
  Work a = work_of(*call, arena);
  const int64_t I = a.inputs, rows = a.offsets[a.steps];
  const int64_t threads = threads_for(a.threads, a.examples);
  const std::vector<int64_t> parts = parts_of(a, threads);
  const Matrix w_ih =
      packed(arena, a, a.w_ih, 1, I, I, G, rows, means_of(arena, a.w_ih, G / H, H, I, INPUT_GROUPS),
             H);
  for (const Product& p : PRODUCTS) {
    const float* const w = a.weights[p.weight] + p.first * p.inner;
    const float* const means =
        means_of(arena, w, p.width / p.unit, p.unit, p.inner, p.groups.data());
    a.forward.push_back(packed(arena, a, w, 1, p.inner, p.inner, p.width, a.examples / threads,
                               means, p.unit));
  }
  const std::vector<Span> chunks = chunks_of(a);
  float* const room = a.v ? a.v : arena.take(most_rows(a, chunks) * G);
  for (const Span& c : chunks) {
    const int64_t first = a.offsets[c.from], count = a.offsets[c.to] - first;
    float* const v = a.saves ? room + first * G : room;
    multiply_rows(w_ih, count, a.x + first * I, I, 1, v, false, a.threads);
    Work part = a;
    part.v = v - first * G;
    over_examples(parts, [&](int64_t from, int64_t end, int64_t) {
      forward(part, c.from, c.to, from, end);
    });
  }
  write_finals(a);
}

void ln_zoo_cell_backward(const Call* call) {
  Arena arena;
  Work a = work_of(*call, arena);
  const int64_t I = a.inputs, threads = threads_for(a.threads, a.examples);
  const std::vector<int64_t> parts = parts_of(a, threads);
  const std::vector<Span> chunks = chunks_of(a);
  const int64_t most = most_rows(a, chunks);
  int64_t widest = I;
  for (const Product& p : PRODUCTS) {
    const float* const w = a.weights[p.weight] + p.first * p.inner;
    a.transposed.push_back(
        packed(arena, a, w, p.inner, 1, p.width, p.inner, a.examples / threads));
    a.du.push_back(arena.take(most * p.width));
    widest = std::max(widest, p.inner);
  }
  float* const dv = arena.take(most * G);
  Matrix w_ih{};
  if (a.dx) w_ih = packed(arena, a, a.w_ih, I, 1, G, I, a.offsets[a.steps]);
  const WeightGradients gradients(a, arena, most, widest);
  std::vector<std::vector<float*>> sums(parts.size() - 1);
  for (auto& own : sums) own = zeros_of_parameters(arena);
  for (size_t i = chunks.size(); i-- > 0;) {
    const Span& c = chunks[i];
    const int64_t first = a.offsets[c.from], count = a.offsets[c.to] - first;
    Work part = a;
    part.dv = dv - first * G;
    for (int64_t k = 0; k < K; k++) part.du[k] -= first * PRODUCTS[k].width;
    over_examples(parts, [&](int64_t from, int64_t end, int64_t thread) {
      backward(part, c.from, c.to, from, end, sums[thread]);
    });
    gradients.add(a, c, dv, i + 1 < chunks.size());
    if (a.dx) multiply_rows(w_ih, count, dv, G, 1, a.dx + first * I, false, a.threads);
  }
  write_sums(a, sums);
}

}  // extern "C"
