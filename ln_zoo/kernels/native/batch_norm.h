// The places of a padded call that normalise over the examples of each step.

#pragma once

#include "scratch.h"
#include "batch.h"

namespace {

enum Place { INPUT, RECURRENT, OUT, PLACES };

// Subtract from rows (T, N, F) their means over the examples of each step, `means` (T, F); may be
// in place.
void without_means(int64_t T, int64_t N, int64_t F, const float* a, float* to, float* means,
                   int64_t threads) {
  threads = threads_for(threads, std::min(T, T * N * F / 32768 + 1));
  in_parallel(threads, [&](int64_t i) {
    for (int64_t t = T * i / threads; t < T * (i + 1) / threads; t++) {
      const float* from = a + t * N * F;
      float *mean = means + t * F, *out = to + t * N * F;
      std::fill(mean, mean + F, 0.0f);
      for (int64_t n = 0; n < N; n++) add(from + n * F, mean, F);
      for (int64_t j = 0; j < F; j++) mean[j] /= float(N);
      for (int64_t n = 0; n < N; n++) {
        for_units(F, [&](int64_t j, auto block) {
          block.write(out + n * F + j, block.read(from + n * F + j) - block.read(mean + j));
        });
      }
    }
  });
}

// Statistics of a call, and slices of them.
class OverExamples {
 public:
  OverExamples(const Call& call, const Tensors& tensors, const Shape& shape)
      : a_(call), t_(tensors), widths_{shape.G, shape.G, shape.H}, merged_(shape.gates == 1) {
    float* next = t_.statistics;
    for (int k = 0; k < PLACES; k++) {
      if (own(k)) means_[k] = next, next += 2 * a_.steps * widths_[k];
    }
  }

  bool any() const { return a_.sources[INPUT] || a_.sources[RECURRENT] || a_.sources[OUT]; }
  bool own(int place) const { return a_.sources[place] == OWN; }
  float* means(int place, int64_t step) const { return means_[place] + step * widths_[place]; }

  // Allocate memory for this many steps.
  void reserve(int64_t steps, Arena& arena) {
    for (int k = 0; k < PLACES; k++) {
      if (!a_.sources[k]) continue;
      rooms_[k] = {0, arena.take(steps * widths_[k]), nullptr, arena.take(steps * widths_[k])};
    }
  }

  // Arguments of the forward pass.
  Batch forward(int64_t step, int64_t steps) const {
    return of(step, steps, [&](int place, Statistics& s) {
      if (place == INPUT) {
        s.mean = nullptr;  // inputs are centred
      } else if (!merged_) {
        s.mean = means(place, step);
      }
    });
  }

  // Add the means of the sum; call after `forward`, when `means` has those of the input products.
  void add_means(int64_t step, int64_t steps) const {
    if (merged_ && own(OUT)) add(rooms_[OUT].mean, means(OUT, step), steps * widths_[OUT]);
  }

  // Arguments of the backward pass.
  Batch backward(int64_t step, int64_t steps) const {
    return of(step, steps, [&](int place, Statistics& s) {
      // Products are saved centred.
      s.mean = place == OUT && !merged_ ? means(place, step) : nullptr;
      const float spread = float(a_.examples) / float(a_.examples - a_.correction);
      factors(place, s.var, steps * widths_[place], spread, s.factor);
    });
  }

 private:
  const Call& a_;
  const Tensors& t_;
  const int64_t widths_[PLACES];
  const bool merged_;
  float* means_[PLACES] = {};
  Statistics rooms_[PLACES] = {};

  double eps(int place) const {
    return place == INPUT ? a_.input.eps : place == RECURRENT ? a_.recurrent.eps : a_.out.eps;
  }

  // Reciprocal deviations.
  void factors(int place, const float* var, int64_t n, float spread, float* to) const {
    const float small = float(eps(place));
    for (int64_t j = 0; j < n; j++) to[j] = 1.0f / std::sqrt(var[j] * spread + small);
  }

  // `own_place` modifies places with batch statistics.
  template <class Own>
  Batch of(int64_t step, int64_t steps, Own own_place) const {
    Batch batch{a_.correction, {}, {}, {}};
    Statistics* const to[] = {&batch.input, &batch.recurrent, &batch.out};
    for (int k = 0; k < PLACES; k++) {
      Statistics s = rooms_[k];
      if (own(k)) {
        s.batch = 1;
        s.var = means(k, a_.steps + step);
        own_place(k, s);
      } else if (a_.sources[k] == GIVEN) {
        given(k, step, steps, s);
      }
      *to[k] = s;
    }
    return batch;
  }

  void given(int place, int64_t step, int64_t steps, const Statistics& to) const {
    const int64_t F = widths_[place], K = t_.given_rows[place];
    for (int64_t i = 0; i < steps; i++) {
      const int64_t row = std::min(step + i, K - 1);
      copy(t_.given[place] + row * F, F, to.mean + i * F);
      factors(place, t_.given[place] + (K + row) * F, F, 1.0f, to.factor + i * F);
    }
  }
};

}  // namespace
