// DRAW between the matrix products of a glimpse (equations: loops/draw.py). Examples are
// independent; only sums over examples depend on the number of threads and are added in thread
// order. T is the type of products.

#pragma once

#include "steps.h"

extern "C" {

// One of the LSTMs. Rows of inputs are [r; h_dec; h_enc] in the encoder, [z; h_dec] in the decoder.
struct DrawLSTM {
  Rows norm;                         // of the cell state on its way to the output
  const float *bias, *gain, *shift;  // (4H,), (H,), (H,)
  void* inputs;                      // T (slots, N, I + H)
  float *gates, *cells, *stats;      // (slots, N, 4H), (slots, N, H), (slots, N, 2)
  // Backward only.
  float* dcells;        // (N, H)
  const void* dinputs;  // T (N, I + H)
  void* dgates;         // T (chunk, N, 4H)
};

// Buffers. If `kept`, there are steps + 1 slots, one per glimpse; otherwise two alternate. Slot 0
// has the initial states.
struct Draw {
  int64_t narrow, kept, steps, examples, height, width, hidden, latents, read, write;
  int64_t adds_eps;  // whether filters are divided by their sum and eps, or sum to 1
  int64_t chunk, threads;
  double eps, log_clamp;
  DrawLSTM lstms[2];            // encoder, decoder
  const float *images, *noise;  // (N, B, A), (steps, N, Z)
  const float* posterior_bias;  // (2Z,)
  float* states;                // (slots, N, H): the decoder's h; null where T is float
  float* heads;                 // (slots, N, 10 + W^2): read, write, patch
  float *canvases, *logits;     // (slots, N, B, A); the last one, (N, B, A)
  float *means, *log_stds;      // (steps, N, Z)
  // Forward only.
  const void *sums, *posterior;  // T (N, 4H), T (N, 2Z): products; where T is float, the sums
                                 // are in `gates`
  int64_t* clamped;              // (threads, 3): numbers beyond the clamp
  // Backward only. Glimpse t has row t % chunk of the operands of products over a chunk of
  // glimpses; the gradients of means and log_stds may be null.
  const float *means_gradient, *log_stds_gradient;  // (steps, N, Z)
  float *dcanvas, *dheads;                          // (N, B, A), (steps + 1, N, 10 + W^2)
  const float* dstates;                             // (N, H): gradient of h through the heads
  const void* dencoded;                             // T (N, H): gradient of h through the posterior
  void* dposterior;                                 // T (chunk, N, 2Z)
  float* totals;  // (threads, 12H + 2Z): bias, gain, shift of each, posterior
};

}  // extern "C"

namespace {

enum Which : int64_t { ENCODER, DECODER };
constexpr int64_t NUMBERS = 5;  // parameters of a patch

struct DrawShape {
  int64_t N, P, H, Z, heads, patches, row[2];
  const Draw& s;
  explicit DrawShape(const Draw& s)
      : N(s.examples),
        P(s.height * s.width),
        H(s.hidden),
        Z(s.latents),
        heads(2 * NUMBERS + s.write * s.write),
        patches(2 * s.read * s.read),
        row{patches + 2 * H, Z + H},
        s(s) {}
  // The row of example n in a tensor of slots.
  int64_t at(int64_t t, int64_t n) const { return (s.kept ? t : t % 2) * N + n; }
  float* canvas(int64_t t, int64_t n) const {
    return t == s.steps ? s.logits + n * P : s.canvases + at(t, n) * P;
  }
  float* totals(int64_t thread) const { return s.totals + thread * (12 * H + 2 * Z); }
};

// Calls body(thread, first, last) for ranges of examples, one for each thread.
template <class Body>
void for_examples(const Draw& s, Body body) {
  const int64_t threads = threads_for(s.threads, s.examples);
  in_parallel(threads, [&](int64_t i) {
    const int64_t first = s.examples * i / threads, last = s.examples * (i + 1) / threads;
    if (first < last) body(i, first, last);
  });
}

// Arguments of cells.h for one of the LSTMs.
Steps draw_steps(const Draw& s, int64_t which) {
  Steps found{};
  found.cell = LSTM, found.hidden = s.hidden;
  const DrawLSTM& lstm = s.lstms[which];
  found.bias = lstm.bias, found.gain_out = lstm.gain, found.shift_out = lstm.shift;
  return found;
}

template <class T>
void draw_lstm(const Draw& s, int64_t which, int64_t t) {
  const DrawShape shape(s);
  const Steps steps = draw_steps(s, which);
  const Shape of_cell(steps);
  const DrawLSTM& lstm = s.lstms[which];
  const int64_t H = shape.H, G = 4 * H;
  for_examples(s, [&](int64_t, int64_t first, int64_t last) {
    std::vector<float> memory(2 * H);
    float *const h = memory.data(), *const o = h + H;
    for (int64_t n = first; n < last; n++) {
      const int64_t before = shape.at(t, n), after = shape.at(t + 1, n);
      float *sums = lstm.gates + before * G, *c = lstm.cells + after * H;
      if constexpr (sizeof(T) == 2) widen(static_cast<const T*>(s.sums) + n * G, G, sums);
      lstm_gates(of_cell, Summed{steps.bias, H, sums}, lstm.cells + before * H, c, o);
      float* stats = lstm.stats + before * 2;
      mean_and_deviation(lstm.norm, c, H, stats);
      lstm_out(steps, of_cell, Centred(stats), c, o, h);
      T* encoder =
          static_cast<T*>(s.lstms[ENCODER].inputs) + after * shape.row[ENCODER] + shape.patches;
      if (which == ENCODER) {
        copy(h, H, encoder + H);
      } else {
        copy(h, H, encoder);
        copy(h, H, static_cast<T*>(s.lstms[DECODER].inputs) + after * shape.row[DECODER] + shape.Z);
        if (s.states) copy(h, H, s.states + after * H);
      }
    }
  });
}

// Gradient of an LSTM's h: the sum over all readers.
template <class T>
void draw_lstm_back(const Draw& s, int64_t which, int64_t t) {
  const DrawShape shape(s);
  const Steps steps = draw_steps(s, which);
  const Shape of_cell(steps);
  const DrawLSTM& lstm = s.lstms[which];
  const int64_t H = shape.H, G = 4 * H;
  for_examples(s, [&](int64_t thread, int64_t first, int64_t last) {
    std::vector<float> memory(7 * H + (sizeof(T) == 2 ? G : 0));
    float *const dh = memory.data(), *const room = dh + H, *const scratch = room + 2 * H;
    SumsAt sums{};
    sums.bias = shape.totals(thread) + which * 6 * H;
    sums.gain_out = sums.bias + G, sums.shift_out = sums.gain_out + H;
    const auto add_to_dh = [&](const void* from, int64_t offset) {
      add(floats(static_cast<const T*>(from) + offset, H, room), dh, H);
    };
    for (int64_t n = first; n < last; n++) {
      const int64_t encoder = n * shape.row[ENCODER] + shape.patches;
      const float* dout = s.dstates + n * H;
      std::fill(dh, dh + H, 0.0f);
      if (which == ENCODER) {
        dout = floats(static_cast<const T*>(s.dencoded) + n * H, H, room + H);
        add_to_dh(s.lstms[ENCODER].dinputs, encoder + H);
      } else {
        add_to_dh(s.lstms[ENCODER].dinputs, encoder);
        add_to_dh(s.lstms[DECODER].dinputs, n * shape.row[DECODER] + shape.Z);
      }
      const int64_t before = shape.at(t, n);
      const float* c_prev = lstm.cells + before * H;
      const float* c = lstm.cells + shape.at(t + 1, n) * H;
      const Centred norm(lstm.stats + before * 2);
      const Gates terms{H, lstm.gates + before * G};
      T* to = static_cast<T*>(lstm.dgates) + (t % s.chunk * shape.N + n) * G;
      float* dp;
      if constexpr (sizeof(T) == 2) {
        dp = scratch + 4 * H;
      } else {
        dp = to;
      }
      RowTotals<NO_NORMS> totals(steps, of_cell, sums);
      lstm_out_back<KEPT>(steps, of_cell, terms, norm, c, c_prev, dout, dh, nullptr, dp, scratch,
                          totals);
      totals.out.finish(lstm.norm, 1, H);
      lstm_gates_back<KEPT>(of_cell, terms, norm, totals.out.of(0), c, c_prev, lstm.dcells + n * H,
                             dp, scratch, totals);
      if constexpr (sizeof(T) == 2) narrow(dp, G, to);
    }
  });
}

template <class T>
void draw_latent(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t Z = shape.Z;
  const vec clamp = all(float(s.log_clamp));
  for_examples(s, [&](int64_t thread, int64_t first, int64_t last) {
    std::vector<float> memory(3 * Z);
    float *const wide = memory.data(), *const z = wide + 2 * Z;
    ivec beyond{};
    for (int64_t n = first; n < last; n++) {
      const float* p = floats(static_cast<const T*>(s.posterior) + n * 2 * Z, 2 * Z, wide);
      const int64_t row = (t * shape.N + n) * Z;
      for_units(Z, [&](int64_t j, auto block) {
        vec mean = block.read(p + j) + block.read(s.posterior_bias + j);
        vec spread = block.read(p + Z + j) + block.read(s.posterior_bias + Z + j);
        // True lanes are -1.
        beyond -= (spread > clamp) + (spread < -clamp);
        spread = spread > clamp ? clamp : spread;
        spread = spread < -clamp ? -clamp : spread;
        block.write(s.means + row + j, mean);
        block.write(s.log_stds + row + j, spread);
        block.write(z + j, mean + exponential(spread) * block.read(s.noise + row + j));
      });
      copy(z, Z, static_cast<T*>(s.lstms[DECODER].inputs) + shape.at(t, n) * shape.row[DECODER]);
    }
    for (int64_t i = 0; i < L; i++) s.clamped[3 * thread] += beyond[i];
  });
}

template <class T>
void draw_latent_back(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t Z = shape.Z;
  const vec clamp = all(float(s.log_clamp)), zero{};
  for_examples(s, [&](int64_t thread, int64_t first, int64_t last) {
    std::vector<float> memory(4 * Z);
    float *const wide = memory.data(), *const d = wide + Z, *const none = d + 2 * Z;
    float* bias_sum = shape.totals(thread) + 12 * shape.H;
    for (int64_t n = first; n < last; n++) {
      const T* from = static_cast<const T*>(s.lstms[DECODER].dinputs) + n * shape.row[DECODER];
      const float* dz = floats(from, Z, wide);
      const int64_t row = (t * shape.N + n) * Z;
      const float* dmean = s.means_gradient ? s.means_gradient + row : none;
      const float* dspread = s.log_stds_gradient ? s.log_stds_gradient + row : none;
      for_units(Z, [&](int64_t j, auto block) {
        vec spread = block.read(s.log_stds + row + j), g = block.read(dz + j);
        vec a = g + block.read(dmean + j);
        vec b = g * exponential(spread) * block.read(s.noise + row + j) + block.read(dspread + j);
        b = (spread >= clamp) | (spread <= -clamp) ? zero : b;
        block.write(d + j, a);
        block.write(d + Z + j, b);
        accumulate(block, bias_sum, j, a);
        accumulate(block, bias_sum, Z + j, b);
      });
      copy(d, 2 * Z, static_cast<T*>(s.dposterior) + (t % s.chunk * shape.N + n) * 2 * Z);
    }
  });
}

// Position of a patch of K times K filters, from the five parameters.
struct Patch {
  double x, y, stride, gamma;
  float sharpness;  // 1 / (2 sigma^2)
  bool variance_clamped, stride_clamped;
  Patch(const Draw& s, const float* p, int64_t K)
      : x(0.5 * double(s.width + 1) * (double(p[0]) + 1.0) - 1.0),
        y(0.5 * double(s.height + 1) * (double(p[1]) + 1.0) - 1.0),
        stride(0.0),
        gamma(std::exp(double(p[4]))),
        sharpness(float(0.5 * std::exp(-clamp(p[2], s.log_clamp)))),
        variance_clamped(std::fabs(double(p[2])) > s.log_clamp),
        stride_clamped(std::fabs(double(p[3])) > s.log_clamp) {
    if (K == 1) return;
    const double whole = double(std::max(s.height, s.width) - 1);
    stride = whole / double(K - 1) * std::exp(clamp(p[3], s.log_clamp));
  }
  void count(int64_t* clamped) const {
    clamped[1] += variance_clamped;
    clamped[2] += stride_clamped;
  }

 private:
  static double clamp(double a, double bound) {
    return a > bound ? bound : a < -bound ? -bound : a;
  }
};

// Rows of scratch memory are padded to whole vectors: a load soon after a masked store would stall.
inline int64_t whole(int64_t n) { return (n + L - 1) / L * L; }

template <class Body>
inline void for_vectors(int64_t n, Body body) {
  for (int64_t j = 0; j < n; j += L) body(j);
}

inline float dot(const float* a, const float* b, int64_t n) {
  vec sum{};
  for_vectors(n, [&](int64_t j) { sum += load(a + j) * load(b + j); });
  return total(sum);
}

// to (n,) += factor * a (n,).
inline void add_scaled(float factor, const float* a, int64_t n, float* to) {
  const vec f = all(factor);
  for_vectors(n, [&](int64_t j) { store(to + j, load(to + j) + f * load(a + j)); });
}

// Rows of scratch memory, each a vector or more.
struct Scratch {
  int64_t rows, width;
  std::vector<float> memory;
  Scratch(int64_t rows, int64_t n) : rows(rows), width(whole(n)), memory(rows * width) {}
  float* row(int64_t i) { return memory.data() + i * width; }
  const float* row(int64_t i) const { return memory.data() + i * width; }
  void clear() { std::fill(memory.begin(), memory.end(), 0.0f); }
};

// Filters along one axis of S pixels, zero-padded. Distances are relative to the pixel nearest to
// the filter's centre, `shift` away, whose exponent 0 is the largest: no underflow, however far the
// window is outside the image.
struct Filters {
  int64_t K, S;
  Scratch rows;
  std::vector<float> nearest, shift;
  Filters(int64_t K, int64_t S) : K(K), S(S), rows(K, S), nearest(K), shift(K) {}

  static vec distance(int64_t j, float nearest) {
    vec u;
    for (int64_t i = 0; i < L; i++) u[i] = float(i);
    return u + (float(j) - nearest);
  }

  void fill(const Draw& s, double center, const Patch& patch) {
    const vec sharpness = all(patch.sharpness), none{};
    for (int64_t k = 0; k < K; k++) {
      const double mean = center + (double(k) - 0.5 * double(K - 1)) * patch.stride;
      const double pixel = std::nearbyint(mean), last = double(S - 1);
      nearest[k] = float(pixel < 0.0 ? 0.0 : pixel > last ? last : pixel);
      shift[k] = float(mean - double(nearest[k]));
      const vec m = all(shift[k]);
      float* row = rows.row(k);
      vec sum{};
      for_units(S, [&](int64_t j, auto block) {
        vec u = distance(j, nearest[k]);
        vec square = s.adds_eps ? (u - m) * (u - m) : u * (u - 2.0f * m);
        vec exponent = sharpness * square;
        vec e = block.keep(exponent > all(87.0f) ? none : exponential(-exponent));
        store(row + j, e);
        sum += e;
      });
      const vec scale = all(1.0f / (total(sum) + (s.adds_eps ? float(s.eps) : 0.0f)));
      for_vectors(rows.width, [&](int64_t j) { store(row + j, scale * load(row + j)); });
    }
  }

  // Backpropagate from the filters to centre, stride and log sigma^2 (added).
  void back(const Draw& s, const Scratch& gradient, const Patch& patch, double* dcenter,
            double* dstride, double* dvariance) const {
    for (int64_t k = 0; k < K; k++) {
      const float *row = rows.row(k), *d = gradient.row(k);
      const vec mean = all(dot(row, d, rows.width));
      vec zeroth{}, first{}, second{};
      for_vectors(rows.width, [&](int64_t j) {
        vec u = distance(j, nearest[k]);
        vec e = load(row + j) * (load(d + j) - mean);
        zeroth += e;
        first += e * u;
        second += e * u * u;
      });
      // If filters sum to 1, the first of these sums is 0.
      const double m = shift[k], none = s.adds_eps ? total(zeroth) : 0.0f;
      const double one = total(first), two = total(second);
      const double dmean = 2.0 * patch.sharpness * (one - m * none);
      *dcenter += dmean;
      *dstride += (double(k) - 0.5 * double(K - 1)) * dmean;
      *dvariance += patch.sharpness * (two - 2.0 * m * one + m * m * none);
    }
  }
};

// Filters of both axes, and their backward.
struct Bank {
  Filters x, y;
  Bank(const Draw& s, int64_t K) : x(K, s.width), y(K, s.height) {}
  void fill(const Draw& s, const Patch& patch) {
    x.fill(s, patch.x, patch);
    y.fill(s, patch.y, patch);
  }
  void back(const Draw& s, const Scratch& dx, const Scratch& dy, const Patch& patch,
            double dlog_gamma, float* d) const {
    double center_x = 0.0, center_y = 0.0, stride = 0.0, variance = 0.0;
    x.back(s, dx, patch, &center_x, &stride, &variance);
    y.back(s, dy, patch, &center_y, &stride, &variance);
    d[0] = float(center_x * 0.5 * double(s.width + 1));
    d[1] = float(center_y * 0.5 * double(s.height + 1));
    d[2] = patch.variance_clamped ? 0.0f : float(variance);
    d[3] = patch.stride_clamped ? 0.0f : float(stride * patch.stride);
    d[4] = float(dlog_gamma);
  }
};

template <class T>
void draw_read(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t R = s.read, A = s.width, B = s.height;
  for_examples(s, [&](int64_t thread, int64_t first, int64_t last) {
    Bank bank(s, R);
    // Rows of filters times the image, and times its error.
    Scratch seen(2 * R, A);
    std::vector<float> patches(shape.patches);
    for (int64_t n = first; n < last; n++) {
      const Patch patch(s, s.heads + shape.at(t, n) * shape.heads, R);
      patch.count(s.clamped + 3 * thread);
      bank.fill(s, patch);
      const float *x = s.images + n * shape.P, *canvas = shape.canvas(t, n);
      seen.clear();
      for (int64_t b = 0; b < B; b++, x += A, canvas += A) {
        for_units(A, [&](int64_t a, auto block) {
          vec pixel = block.read(x + a), error = pixel - sigmoid(block.read(canvas + a));
          for (int64_t k = 0; k < R; k++) {
            const vec f = all(bank.y.rows.row(k)[b]);
            float *of_pixels = seen.row(k) + a, *of_errors = seen.row(R + k) + a;
            store(of_pixels, load(of_pixels) + f * pixel);
            store(of_errors, load(of_errors) + f * error);
          }
        });
      }
      for (int64_t i = 0; i < 2 * R; i++) {
        for (int64_t j = 0; j < R; j++) {
          const float sum = dot(seen.row(i), bank.x.rows.row(j), seen.width);
          patches[i * R + j] = float(patch.gamma) * sum;
        }
      }
      copy(patches.data(), shape.patches,
           static_cast<T*>(s.lstms[ENCODER].inputs) + shape.at(t, n) * shape.row[ENCODER]);
    }
  });
}

template <class T>
void draw_read_back(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t R = s.read, A = s.width, B = s.height;
  for_examples(s, [&](int64_t, int64_t first, int64_t last) {
    Bank bank(s, R);
    Scratch seen(2 * R, A), across(2 * R, A), rows(2, A), dx(R, A), dy(R, B);
    std::vector<float> wide(shape.patches), d(shape.patches);
    float *const pixels = rows.row(0), *const errors = rows.row(1);
    for (int64_t n = first; n < last; n++) {
      const Patch patch(s, s.heads + shape.at(t, n) * shape.heads, R);
      bank.fill(s, patch);
      const T* from = static_cast<const T*>(s.lstms[ENCODER].dinputs) + n * shape.row[ENCODER];
      const float* dr = floats(from, shape.patches, wide.data());
      for (int64_t i = 0; i < shape.patches; i++) d[i] = float(patch.gamma) * dr[i];
      across.clear();
      for (int64_t i = 0; i < 2 * R; i++) {
        for (int64_t j = 0; j < R; j++) {
          add_scaled(d[i * R + j], bank.x.rows.row(j), across.width, across.row(i));
        }
      }
      const float *x = s.images + n * shape.P, *canvas = shape.canvas(t, n);
      float* dcanvas = s.dcanvas + n * shape.P;
      seen.clear();
      for (int64_t b = 0; b < B; b++, x += A, canvas += A, dcanvas += A) {
        for_units(A, [&](int64_t a, auto block) {
          vec pixel = block.read(x + a), p = sigmoid(block.read(canvas + a));
          vec error = pixel - p, derror{};
          store(pixels + a, pixel);
          store(errors + a, error);
          for (int64_t k = 0; k < R; k++) {
            const vec f = all(bank.y.rows.row(k)[b]);
            float *of_pixels = seen.row(k) + a, *of_errors = seen.row(R + k) + a;
            store(of_pixels, load(of_pixels) + f * pixel);
            store(of_errors, load(of_errors) + f * error);
            derror += f * load(across.row(R + k) + a);
          }
          block.write(dcanvas + a, block.read(dcanvas + a) - derror * p * (1.0f - p));
        });
        for (int64_t k = 0; k < R; k++) {
          vec sum{};
          for_vectors(rows.width, [&](int64_t a) {
            sum += load(across.row(k) + a) * load(pixels + a);
            sum += load(across.row(R + k) + a) * load(errors + a);
          });
          dy.row(k)[b] = total(sum);
        }
      }
      dx.clear();
      double dlog_gamma = 0.0;
      for (int64_t i = 0; i < 2 * R; i++) {
        for (int64_t j = 0; j < R; j++) add_scaled(d[i * R + j], seen.row(i), dx.width, dx.row(j));
        dlog_gamma += dot(seen.row(i), across.row(i), seen.width);
      }
      bank.back(s, dx, dy, patch, dlog_gamma, s.dheads + (t * shape.N + n) * shape.heads);
    }
  });
}

// The rows of a patch (W, W) over gamma, spread over the width of the image.
void spread(const float* patch, const Filters& x, float scale, Scratch& to) {
  to.clear();
  for (int64_t i = 0; i < x.K; i++) {
    for (int64_t j = 0; j < x.K; j++) {
      add_scaled(scale * patch[i * x.K + j], x.rows.row(j), to.width, to.row(i));
    }
  }
}

void draw_write(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t W = s.write, A = s.width, B = s.height;
  for_examples(s, [&](int64_t thread, int64_t first, int64_t last) {
    Bank bank(s, W);
    Scratch wide(W, A);
    for (int64_t n = first; n < last; n++) {
      const float* heads = s.heads + shape.at(t + 1, n) * shape.heads + NUMBERS;
      const Patch patch(s, heads, W);
      patch.count(s.clamped + 3 * thread);
      bank.fill(s, patch);
      spread(heads + NUMBERS, bank.x, float(1.0 / patch.gamma), wide);
      const float* before = shape.canvas(t, n);
      float* after = shape.canvas(t + 1, n);
      for (int64_t b = 0; b < B; b++, before += A, after += A) {
        for_units(A, [&](int64_t a, auto block) {
          vec sum{};
          for (int64_t k = 0; k < W; k++) sum += bank.y.rows.row(k)[b] * load(wide.row(k) + a);
          block.write(after + a, block.read(before + a) + sum);
        });
      }
    }
  });
}

void draw_write_back(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t W = s.write, A = s.width, B = s.height;
  for_examples(s, [&](int64_t, int64_t first, int64_t last) {
    Bank bank(s, W);
    Scratch wide(W, A), down(W, A), line(1, A), dx(W, A), dy(W, B);
    for (int64_t n = first; n < last; n++) {
      const float* heads = s.heads + shape.at(t + 1, n) * shape.heads + NUMBERS;
      const Patch patch(s, heads, W);
      bank.fill(s, patch);
      const float* pixels = heads + NUMBERS;
      const float scale = float(1.0 / patch.gamma);
      spread(pixels, bank.x, scale, wide);
      down.clear();
      const float* dcanvas = s.dcanvas + n * shape.P;
      for (int64_t b = 0; b < B; b++, dcanvas += A) {
        float* d = line.row(0);
        for_units(A, [&](int64_t a, auto block) { store(d + a, block.read(dcanvas + a)); });
        for (int64_t k = 0; k < W; k++) {
          dy.row(k)[b] = dot(d, wide.row(k), line.width);
          add_scaled(bank.y.rows.row(k)[b], d, line.width, down.row(k));
        }
      }
      float* dheads = s.dheads + ((t + 1) * shape.N + n) * shape.heads + NUMBERS;
      dx.clear();
      double dlog_gamma = 0.0;
      for (int64_t i = 0; i < W; i++) {
        for (int64_t j = 0; j < W; j++) {
          const float pixel = pixels[i * W + j];
          const float dpixel = scale * dot(down.row(i), bank.x.rows.row(j), down.width);
          dheads[NUMBERS + i * W + j] = dpixel;
          dlog_gamma -= double(pixel) * double(dpixel);
          add_scaled(scale * pixel, down.row(i), dx.width, dx.row(j));
        }
      }
      bank.back(s, dx, dy, patch, dlog_gamma, dheads);
    }
  });
}

}  // namespace

extern "C" {

// Stages of glimpse t: the patches that the encoder reads; an LSTM from pre-activations to h; z;
// the next canvas. The backward pass runs in the opposite order.

void ln_zoo_draw_read(const Draw* s, int64_t t) {
  s->narrow ? draw_read<bfloat>(*s, t) : draw_read<float>(*s, t);
}

void ln_zoo_draw_lstm(const Draw* s, int64_t which, int64_t t) {
  s->narrow ? draw_lstm<bfloat>(*s, which, t) : draw_lstm<float>(*s, which, t);
}

void ln_zoo_draw_latent(const Draw* s, int64_t t) {
  s->narrow ? draw_latent<bfloat>(*s, t) : draw_latent<float>(*s, t);
}

void ln_zoo_draw_write(const Draw* s, int64_t t) { draw_write(*s, t); }

void ln_zoo_draw_read_back(const Draw* s, int64_t t) {
  s->narrow ? draw_read_back<bfloat>(*s, t) : draw_read_back<float>(*s, t);
}

void ln_zoo_draw_lstm_back(const Draw* s, int64_t which, int64_t t) {
  s->narrow ? draw_lstm_back<bfloat>(*s, which, t) : draw_lstm_back<float>(*s, which, t);
}

void ln_zoo_draw_latent_back(const Draw* s, int64_t t) {
  s->narrow ? draw_latent_back<bfloat>(*s, t) : draw_latent_back<float>(*s, t);
}

void ln_zoo_draw_write_back(const Draw* s, int64_t t) { draw_write_back(*s, t); }

}  // extern "C"
