// Consecutive steps of a layer that normalises rows, with or without a window.

#pragma once

#include "split_units.h"
#include "window.h"

namespace {

// Split the examples among threads, with about the same number of rows each.
std::vector<int64_t> shares(const Steps& s, int64_t threads) {
  int64_t rows = 0;
  for (int64_t t = 0; t < s.steps; t++) rows += s.sizes[t];
  std::vector<int64_t> bounds(threads + 1, s.examples);
  bounds[0] = 0;
  int64_t length = s.steps, before = 0, share = 1;
  for (int64_t n = 0; n < s.examples && share < threads; n++) {
    while (length > 0 && s.sizes[length - 1] <= n) length--;
    before += length;
    if (before * threads >= rows * share) bounds[share++] = n + 1;
  }
  return bounds;
}

// Rows of T as floats: in place, or widened into scratch memory.
inline const float* floats(const float* p, int64_t, float*) { return p; }
inline const float* floats(const bfloat* p, int64_t n, float* scratch) {
  widen(p, n, scratch);
  return scratch;
}

inline void copy(const float* from, int64_t n, bfloat* to) { narrow(from, n, to); }

// A product with the recurrent weight, packed (K, N).
template <class T>
void recurrent_product(const Steps& s, int64_t M, int64_t N, int64_t K, Left<T> a, float* c,
                       bool add) {
  if constexpr (sizeof(T) == 4) {
    if (s.parts) return parts_product(M, K, a, {{static_cast<const T*>(s.weight), N, c, N}}, add);
  }
  product(M, N, K, a, static_cast<const T*>(s.weight), c, N, add);
}

// Left operand of one step's product: the rows, or bfloat copies with whole lanes.
inline Left<float> operand(const float* rows, int64_t, int64_t K, std::vector<float>&) {
  return {rows, K, 1};
}
inline Left<bfloat> operand(const float* rows, int64_t n, int64_t K, std::vector<bfloat>& to) {
  const int64_t wide = padded<bfloat>(K);
  to.resize(n * wide);
  for (int64_t i = 0; i < n; i++) {
    narrow(rows + i * K, K, to.data() + i * wide);
    if (wide > K) to[i * wide + K] = 0;
  }
  return {to.data(), wide, 1};
}

// A thread's memory for windows.
class WindowRoom {
 public:
  WindowRoom(const Window* a, int64_t examples)
      : places_(a ? 2 * a->characters : 0), parameters_(a ? 3 * a->components * examples : 0) {
    for (int64_t u = 0; a && u < a->characters; u++) places_[u] = float(u + 1);
  }
  float* places() { return places_.data(); }          // 1 to U, and scratch of size U
  float* parameters() { return parameters_.data(); }  // (examples, 3K)

 private:
  std::vector<float> places_, parameters_;
};

template <class T>
void forward(const Steps& call, const Window* window = nullptr) {
  constexpr bool narrow_rows = sizeof(T) == 2;
  const Shape shape(call);
  const Spaced spaced(call, shape);
  const Steps& s = spaced.steps;
  const int64_t H = shape.H, G = shape.G;
  const bool merged = keeps_sum(s.cell, s.joint);
  T *const v = static_cast<T*>(s.v), *const kept = static_cast<T*>(merged ? s.v : s.u);
  const int64_t threads = threads_for(s.threads, s.examples);
  const std::vector<int64_t> bounds = shares(s, threads);
  in_parallel(threads, [&](int64_t thread) {
    const int64_t first = bounds[thread], last = bounds[thread + 1];
    if (first == last) return;
    // Products are written in place if saved, unless they must be narrowed first.
    std::vector<float> products(kept && !narrow_rows ? 0 : (last - first) * G);
    std::vector<float> terms(s.x && !v && !merged ? (last - first) * G : 0);
    std::vector<float> scratch(ROOM * H), wide(narrow_rows ? G : 0);
    std::vector<float> dropped(s.dropout ? (last - first) * H : 0);
    std::vector<T> left;
    float unused[STATS];
    WindowRoom room(window, last - first);
    int64_t offset = 0;
    for (int64_t t = 0; t < s.steps; offset += s.sizes[t++]) {
      const int64_t end = std::min(last, s.sizes[t]);
      if (end <= first) break;
      restart(s, offset, first, end, H, s.h, s.c);
      float* u = products.data();
      if constexpr (!narrow_rows) {
        if (kept) u = kept + (offset + first) * G;
      }
      if constexpr (!narrow_rows) {
        if (window) {
          const int64_t E = window->letters;
          const Left<float> w_rows{window->window + first * E, E, 1};
          product(end - first, G, E, w_rows, window->input_weight, v + (offset + first) * G, G,
                  true);
        }
      }
      const float* h_before = s.h + first * H;
      if (s.dropout) {
        drop(h_before, s.dropout + first * H, (end - first) * H, dropped.data(), false);
        h_before = dropped.data();
      }
      T* term = v ? v + (offset + first) * G : nullptr;
      if constexpr (!narrow_rows) {
        if (s.x) {
          if (!v) term = merged ? u : terms.data();
          const int64_t row = offset + first + t * s.skipped;
          const Left<float> x_rows{s.x + row * s.inputs, s.inputs, 1};
          product(end - first, G, s.inputs, x_rows, s.input_weight, term, G, false);
        }
      }
      const bool add = merged && !narrow_rows;
      // Most sequences start from zeros.
      if (t == 0 && all_zero(h_before, (end - first) * H)) {
        if (!add) std::fill(u, u + (end - first) * G, 0.0f);
      } else {
        const Left<T> h_rows = operand(h_before, end - first, H, left);
        recurrent_product(s, end - first, G, padded<T>(H), h_rows, u, add);
      }
      for (int64_t n = first; n < end; n++, u += G, term += G) {
        const int64_t row = offset + n;
        const float* input = floats(term, G, wide.data());
        if constexpr (narrow_rows) {
          if (merged)
            for_units(G, [&](int64_t j, auto block) {
              block.write(u + j, block.read(u + j) + block.read(input + j));
            });
          if (kept) narrow(u, G, kept + row * G);
        }
        float *h = s.h + n * H, *c = s.c ? s.c + n * H : nullptr;
        float* stats = s.stats ? s.stats + row * STATS : unused;
        forward_row(s, shape, row, input, u, h, c, stats, scratch.data());
        copy(h, H, static_cast<T*>(s.output) + (row + t * s.skipped) * H);
        if (s.cells) copy(c, H, s.cells + row * H);
      }
      if (!window) continue;
      const int64_t K = window->components, U = window->characters, E = window->letters;
      const Left<float> h_after{s.h + first * H, H, 1};
      product(end - first, 3 * K, H, h_after, window->weight, room.parameters(), 3 * K, false);
      for (int64_t n = first; n < end; n++) {
        const int64_t row = offset + n;
        float* w = window->window + n * E;
        window_row(*window, room.parameters() + (n - first) * 3 * K, window->text + n * U * E,
                   window->terms + row * 4 * K, window->kappa + n * K, w, room.places());
        copy(w, E, window->windows + row * E);
      }
    }
  });
}

template <class T>
void backward(const Steps& call, const Window* window = nullptr) {
  constexpr bool narrow_rows = sizeof(T) == 2;
  const Shape shape(call);
  const Spaced spaced(call, shape);
  const Steps& s = spaced.steps;
  const int64_t H = shape.H, G = shape.G;
  const bool merged = keeps_sum(s.cell, s.joint);
  const T *const v = static_cast<const T*>(s.v), *const u = static_cast<const T*>(s.u);
  const T* const dout = static_cast<const T*>(s.output_gradient);
  const T* const h_prev = static_cast<const T*>(s.h_prev);
  const int64_t threads = threads_for(s.threads, s.examples);
  const std::vector<int64_t> bounds = shares(s, threads);
  const std::vector<int64_t> offsets = first_rows(s);
  std::vector<Sums> sums;
  sums.reserve(threads);
  for (int64_t i = 0; i < threads; i++) sums.emplace_back(shape);
  in_parallel(threads, [&](int64_t thread) {
    const int64_t first = bounds[thread], last = bounds[thread + 1];
    if (first == last) return;
    std::vector<float> scratch(ROOM_BACK * H), zeros(H), wide(narrow_rows ? 2 * (G + H) : 0);
    std::vector<float> dropped(s.dropout ? (last - first) * H : 0);
    std::vector<float> gradients(narrow_rows ? (last - first) * G + G : 0);
    std::vector<T> left;
    float* const room = wide.data();
    WindowRoom window_room(window, 0);
    for (int64_t t = s.steps - 1; t >= 0; t--) {
      const int64_t end = std::min(last, s.sizes[t]);
      if (end <= first) continue;
      if (window) {
        const int64_t K = window->components, U = window->characters, E = window->letters;
        for (int64_t n = first; n < end; n++) {
          const int64_t row = offsets[t] + n;
          float* dw = window->dwindow + n * E;
          for (int64_t j = 0; window->windows_gradient && j < E; j++) {
            dw[j] += window->windows_gradient[row * E + j];
          }
          window_row_back(*window, dw, window->text + n * U * E, window->terms + row * 4 * K,
                          window->dkappa + n * K, window->dparameters + row * 3 * K,
                          window_room.places());
        }
        const Left<float> parameters{window->dparameters + (offsets[t] + first) * 3 * K, 3 * K, 1};
        product(end - first, H, 3 * K, parameters, window->weight, s.dh + first * H, H, true);
      }
      for (int64_t n = first; n < end; n++) {
        const int64_t row = offsets[t] + n;
        const float* u_row = floats(u + row * G, G, room);
        const float* v_row = merged ? nullptr : floats(v + row * G, G, room + G);
        const T* const d_out = dout ? dout + (row + t * s.skipped) * H : nullptr;
        const float* d_row = dout ? floats(d_out, H, room + 2 * G) : zeros.data();
        float *dh = s.dh + n * H, *du, *dv;
        if constexpr (narrow_rows) {
          du = gradients.data() + (n - first) * G;
          dv = gradients.data() + (last - first) * G;
        } else {
          du = static_cast<T*>(s.du) + row * G;
          dv = static_cast<T*>(s.dv) + row * G;
        }
        const float* h =
            has_update(s.cell) ? floats(h_prev + row * H, H, room + 2 * G + H) : nullptr;
        backward_row(s, shape, row, n, v_row, u_row, h, d_row, dh, dv, du, sums[thread],
                     scratch.data());
        if constexpr (narrow_rows) {
          narrow(du, G, static_cast<T*>(s.du) + row * G);
          if (!merged) narrow(dv, G, static_cast<T*>(s.dv) + row * G);
        }
      }
      const float* du = gradients.data();
      if constexpr (!narrow_rows) du = static_cast<const T*>(s.du) + (offsets[t] + first) * G;
      float *const dh = s.dh + first * H, *const to = s.dropout ? dropped.data() : dh;
      if (t > 0 || s.to_start) {
        recurrent_product(s, end - first, H, padded<T>(G), operand(du, end - first, G, left), to,
                          passes(s) && !s.dropout);
        if (s.dropout) drop(to, s.dropout + first * H, (end - first) * H, dh, passes(s));
      }
      restart(s, offsets[t], first, end, H, s.dh, s.dc);
      if constexpr (!narrow_rows) {
        if (window) {
          const int64_t E = window->letters;
          const Left<float> dv{static_cast<const T*>(s.dv) + (offsets[t] + first) * G, G, 1};
          product(end - first, E, G, dv, window->input_weight, window->dwindow + first * E, E,
                  false);
        }
      }
    }
  });
  add(sums, shape, s);
}

}  // namespace

extern "C" {

// Version of the structures and functions below.
int64_t ln_zoo_abi() { return 19; }

// Elements of a packed (K, N).
int64_t ln_zoo_packed_size(int64_t K, int64_t N, int64_t narrow) {
  return (narrow ? padded<bfloat>(K) : K) * ((N + L - 1) / L * L);
}

// Pack a strided (K, N) matrix; `to` is aligned to a cache line. `means` may be null (see Center).
void ln_zoo_pack(const void* from, int64_t row, int64_t column, int64_t K, int64_t N, void* to,
                 int64_t narrow, const float* means, int64_t hidden, int64_t transposed,
                 int64_t threads) {
  const Center center{means, hidden, transposed ? K : N, transposed != 0};
  if (narrow) {
    pack(static_cast<const bfloat*>(from), row, column, K, N, static_cast<bfloat*>(to), threads,
         Center{});
  } else {
    pack(static_cast<const float*>(from), row, column, K, N, static_cast<float*>(to), threads,
         center);
  }
}

// Means of the rows of a weight (gates * hidden, F) over each group, for every gate: (gates, F).
// groups[q] is the first gate that shares statistics with gate q.
void ln_zoo_means(const float* w, int64_t gates, int64_t hidden, int64_t F, const int64_t* groups,
                  float* means, int64_t threads) {
  threads = threads_for(threads, std::min(F, gates * hidden * F / 65536 + 1));
  in_parallel(threads, [&](int64_t i) {
    const int64_t from = F * i / threads, to = F * (i + 1) / threads;
    for (int64_t q = 0, end; q < gates; q = end) {
      for (end = q + 1; end < gates && groups[end] == q; end++) {
      }
      float* mean = means + q * F;
      std::fill(mean + from, mean + to, 0.0f);
      for (int64_t k = q * hidden; k < end * hidden; k++) {
        for (int64_t j = from; j < to; j++) mean[j] += w[k * F + j];
      }
      for (int64_t j = from; j < to; j++) mean[j] /= float((end - q) * hidden);
      for (int64_t k = q + 1; k < end; k++) {
        std::memcpy(means + k * F + from, mean + from, 4 * (to - from));
      }
    }
  });
}

// C (M, N) = A (M, K) B, or C += A B, with strided A, packed B, and row stride `ldc` of C.
void ln_zoo_product(int64_t M, int64_t N, int64_t K, const float* a, int64_t row, int64_t column,
                    const float* packed, float* c, int64_t ldc, int64_t add, int64_t threads) {
  const int64_t blocks = (M + HEIGHT - 1) / HEIGHT;
  threads = threads_for(threads, std::min(blocks, M * N * K / 65536 + 1));
  in_parallel(threads, [&](int64_t i) {
    const int64_t m0 = blocks * i / threads * HEIGHT;
    const int64_t m1 = std::min(M, blocks * (i + 1) / threads * HEIGHT);
    const Left<float> left{a + m0 * row, row, column};
    product(m1 - m0, N, K, left, packed, c + m0 * ldc, ldc, add);
  });
}

void ln_zoo_forward(const Steps* s) {
  if (s->shares > 1) return shared_forward(*s);
  s->narrow ? forward<bfloat>(*s) : forward<float>(*s);
}

void ln_zoo_backward(const Steps* s) {
  if (s->shares > 1) return shared_backward(*s);
  s->narrow ? backward<bfloat>(*s) : backward<float>(*s);
}

// The same for a layer with a window; v lacks the window's part.
void ln_zoo_window_forward(const Steps* s, const Window* window) { forward<float>(*s, window); }

void ln_zoo_window_backward(const Steps* s, const Window* window) { backward<float>(*s, window); }

}  // extern "C"
