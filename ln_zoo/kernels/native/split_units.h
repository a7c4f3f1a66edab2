// Steps whose units are split among threads: each runs its units of all examples, with a few
// barriers per step. A thread then reads only its part of the recurrent weight in every step,
// whereas threads that split the examples read all of it.

#pragma once

#include <unistd.h>

#include "cells.h"
#include "stages.h"

namespace {

// The units of one share, and their place in rows of G.
struct Team {
  int64_t first, count, gates, H;
  int64_t width() const { return gates * count; }
  int64_t wide(int64_t q) const { return q * H + first; }
};

Team team_of(int64_t share, int64_t shares, int64_t gates, int64_t H) {
  constexpr int64_t grain = 4;  // units, a quarter of a cache line
  const int64_t pieces = (H + grain - 1) / grain;
  const int64_t from = std::min(H, pieces * share / shares * grain);
  return {from, std::min(H, pieces * (share + 1) / shares * grain) - from, gates, H};
}

// Size of the packed columns of one share, in floats.
int64_t packed_columns(int64_t K, int64_t N) { return K * ((N + L - 1) / L * L); }

// A core's own cache in bytes, as reported by the system. (The reported third level may be that of
// all cores, which a virtual machine does not have.)
int64_t own_cache() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t size = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (size > 0) return size;
#endif
  return 1 << 20;
}

// Values exchanged per row: for each gate, at most two sums of either product.
constexpr int64_t TOLD = 4 * MAX_GATES;

class Told {
 public:
  Told(int64_t shares, int64_t rows)
      : shares_(shares), rows_(rows), numbers_(shares * rows * TOLD) {}
  float* of(int64_t share, int64_t row) { return numbers_.data() + (share * rows_ + row) * TOLD; }
  // Sums over the shares, in their order.
  void sums(int64_t row, int64_t from, int64_t n, double* to) {
    std::fill(to, to + n, 0.0);
    for (int64_t share = 0; share < shares_; share++) {
      for (int64_t k = 0; k < n; k++) to[k] += of(share, row)[from + k];
    }
  }

 private:
  const int64_t shares_, rows_;
  std::vector<float> numbers_;
};

// Publish the squares of a share's part of each gate; `apart` is the stride of gates.
void tell_squares(const Rows& rows, const float* a, int64_t gates, int64_t apart, int64_t units,
                  float* told) {
  for (int64_t q = 0; rows.scale && q < gates; q++) told[q] = sum_of_squares(a + q * apart, units);
}

// As `deviations`, from squares of all gates.
void deviations(const Rows& rows, const double* squares, int64_t gates, int64_t H, float* r) {
  std::fill(r, r + gates, 1.0f);
  for (int64_t q = 0, end; rows.scale && q < gates; q = end) {
    end = group_end(rows, gates, q);
    double sum = 0.0;
    for (int64_t k = q; k < end; k++) sum += squares[k];
    std::fill(r + q, r + end, reciprocal_deviation(sum, (end - q) * H, rows.eps));
  }
}

void tell_means(const Rows& rows, const Means& means, int64_t gates, float* told) {
  for (int64_t q = 0; rows.scale && q < gates; q++) {
    told[q] = total(means.d[q]), told[MAX_GATES + q] = total(means.da[q]);
  }
}

// Means from the published sums of all shares, starting at index `from`.
Means means_of(const Rows& rows, Told& told, int64_t row, int64_t from, int64_t gates, int64_t H) {
  Means means;
  double sums[2 * MAX_GATES];
  told.sums(row, from, 2 * MAX_GATES, sums);
  for (int64_t q = 0, end; q < gates; q = end) {
    end = group_end(rows, gates, q);
    double sum = 0.0, product = 0.0;
    for (int64_t k = q; k < end; k++) sum += sums[k], product += sums[MAX_GATES + k];
    means.set(rows, q, end, H, float(sum), float(product));
  }
  return means;
}

// A share of a call: its arguments start at its units.
struct Share {
  Team team;
  Shape shape;
  Steps s;
  const float* weight;

  Share(const Steps& call, const Shape& whole, int64_t share, const float*& weights, bool backward)
      : team(team_of(share, call.shares, whole.gates, whole.H)),
        shape(whole),
        s(call),
        weight(weights) {
    const int64_t first = team.first;
    shape.units = team.count;
    s.bias += first, s.bias_hn += first, s.gain_input += first, s.gain_recurrent += first;
    s.gain_out += first, s.shift_out += first;
    weights +=
        backward ? packed_columns(shape.G, team.count) : packed_columns(shape.H, team.width());
  }
};

std::vector<int64_t> first_rows(const Steps& s) {
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  return offsets;
}

void shared_forward(const Steps& call) {
  const Shape shape(call);
  const Spaced spaced(call, shape);
  const Steps& s = spaced.steps;
  const int64_t H = shape.H, G = shape.G, gates = shape.gates, N = s.examples;
  const bool merged = keeps_sum(s.cell, s.joint);
  float *const v = static_cast<float*>(s.v), *const output = static_cast<float*>(s.output);
  float* const kept = merged ? v : static_cast<float*>(s.u);
  struct Own : Share {
    using Share::Share;
    std::vector<float> u, o, stats;  // (n, width), (n, units), (n, STATS)
  };
  std::vector<Own> owns;
  owns.reserve(s.shares);
  const float* weights = static_cast<const float*>(s.weight);
  for (int64_t i = 0; i < s.shares; i++) {
    Own& own = owns.emplace_back(s, shape, i, weights, false);
    own.u.resize(N * own.team.width()), own.o.resize(N * own.team.count);
    own.stats.resize(N * STATS);
  }
  const std::vector<int64_t> offsets = first_rows(s);
  restart(s, 0, 0, s.sizes[0], H, s.h, s.c);
  Told squares(s.shares, N), ends(s.shares, N);

  // Publish the moments of an LSTM's last site, or an RNN's only one.
  const auto tell = [&](const Own& own, int64_t share, int64_t n, const float* a) {
    if (!s.out.scale) return;
    const Moments found = moments(s.out, a, own.team.count);
    ends.of(share, n)[0] = found.mean, ends.of(share, n)[1] = found.squares;
  };
  const auto ask = [&](int64_t n, float* mean) {
    mean[0] = 0.0f, mean[1] = 1.0f;
    if (!s.out.scale) return;
    double sum = 0.0, all_squares = 0.0;
    for (const Own& own : owns) {
      sum += double(ends.of(&own - owns.data(), n)[0]) * double(own.team.count);
    }
    const double middle = sum / double(H);
    for (const Own& own : owns) {
      const float* told = ends.of(&own - owns.data(), n);
      const double off = double(told[0]) - middle;
      all_squares += told[1] + double(own.team.count) * off * off;
    }
    mean[0] = float(middle), mean[1] = reciprocal_deviation(all_squares, H, s.out.eps);
  };
  const auto finish = [&](Own& own, int64_t share, int64_t t, int64_t n) {
    const int64_t row = offsets[t] + n, first = own.team.first, units = own.team.count;
    copy(s.h + n * H + first, units, output + row * H + first);
    if (s.cells) copy(s.c + n * H + first, units, s.cells + row * H + first);
    if (s.stats && share == 0) copy(own.stats.data() + n * STATS, STATS, s.stats + row * STATS);
    // Prepare the next step, in which all shares read all of h.
    if (t + 1 < s.steps && n < s.sizes[t + 1]) {
      restart(s, offsets[t + 1], n, n + 1, units, s.h + first, s.c ? s.c + first : nullptr);
    }
  };

  const Stage products = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const int64_t units = own.team.count, W = own.team.width(), first = own.team.first;
    if (t == 0 && all_zero(s.h, s.sizes[t] * H)) {
      std::fill(own.u.begin(), own.u.begin() + s.sizes[t] * W, 0.0f);
    } else {
      product(s.sizes[t], W, H, Left<float>{s.h, H, 1}, own.weight, own.u.data(), W, false);
    }
    for (int64_t n = 0; n < s.sizes[t]; n++) {
      float* u = own.u.data() + n * W;
      float* row = v + (offsets[t] + n) * G + first;
      if (merged) {
        for (int64_t q = 0; q < gates; q++) add(row + q * H, u + q * units, units);
      }
      for (int64_t q = 0; kept && q < gates; q++) {
        copy(u + q * units, units, kept + (offsets[t] + n) * G + own.team.wide(q));
      }
      if (gates == 1) {
        tell(own, share, n, u);
        continue;
      }
      tell_squares(s.input, row, gates, H, units, squares.of(share, n));
      tell_squares(s.recurrent, u, gates, units, units, squares.of(share, n) + MAX_GATES);
    }
  };
  const Stage pointwise = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const int64_t units = own.team.count, first = own.team.first;
    for (int64_t n = 0; n < s.sizes[t]; n++) {
      float *h = s.h + n * H + first, *stats = own.stats.data() + n * STATS;
      const float* u = own.u.data() + n * own.team.width();
      const float* row = v + (offsets[t] + n) * G + first;
      if (gates == 1) {
        ask(n, stats + 2 * MAX_GATES);
        rnn_out(own.s, own.shape, Centred(stats + 2 * MAX_GATES), u, h);
        finish(own, share, t, n);
        continue;
      }
      double sums[2 * MAX_GATES];
      squares.sums(n, 0, 2 * MAX_GATES, sums);
      deviations(s.input, sums, gates, H, stats);
      deviations(s.recurrent, sums + MAX_GATES, gates, H, stats + MAX_GATES);
      with_terms(own.s, own.shape, stats, row, u, units, [&](const auto& terms) {
        if (has_update(s.cell)) {
          gru_gates(own.s, own.shape, terms, h, h);
          finish(own, share, t, n);
        } else {
          float* c = s.c + n * H + first;
          lstm_gates(own.shape, terms, c, c, own.o.data() + n * units);
          tell(own, share, n, c);
        }
      });
    }
  };
  const Stage last = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    for (int64_t n = 0; n < s.sizes[t]; n++) {
      float* stats = own.stats.data() + n * STATS;
      ask(n, stats + 2 * MAX_GATES);
      const int64_t at = n * H + own.team.first;
      const float* o = own.o.data() + n * own.team.count;
      const Centred norm(stats + 2 * MAX_GATES);
      s.carried ? lstm_out<true>(own.s, own.shape, norm, s.c + at, o, s.h + at)
                : lstm_out<false>(own.s, own.shape, norm, s.c + at, o, s.h + at);
      finish(own, share, t, n);
    }
  };
  std::vector<Stage> stages{products, pointwise};
  if (s.cell == LSTM) stages.push_back(last);
  by_steps(s.shares, s.steps, false, stages);
}

void shared_backward(const Steps& call) {
  const Shape shape(call);
  const Spaced spaced(call, shape);
  const Steps& s = spaced.steps;
  const int64_t H = shape.H, G = shape.G, gates = shape.gates, N = s.examples;
  const float *const v = static_cast<const float*>(s.v), *const u = static_cast<const float*>(s.u);
  const float* const dout = static_cast<const float*>(s.output_gradient);
  const float* const h_prev = static_cast<const float*>(s.h_prev);
  float *const du = static_cast<float*>(s.du), *const dv = static_cast<float*>(s.dv);
  struct Own : Share {
    using Share::Share;
    std::vector<float> scratch;  // (n, 4, units)
  };
  std::vector<Own> owns;
  std::vector<Sums> sums;
  owns.reserve(s.shares), sums.reserve(s.shares);
  const float* weights = static_cast<const float*>(s.weight);
  for (int64_t i = 0; i < s.shares; i++) {
    Own& own = owns.emplace_back(s, shape, i, weights, true);
    own.scratch.resize(s.cell == LSTM ? N * 4 * own.team.count : 0);
    sums.emplace_back(shape).move(own.team.first);
  }
  const std::vector<float> zeros(H);
  const std::vector<int64_t> offsets = first_rows(s);
  Told ends(s.shares, N), means(s.shares, N);

  // Iterate over the rows of a step.
  const auto for_rows = [&](int64_t share, int64_t t, auto body) {
    Own& own = owns[share];
    const int64_t first = own.team.first;
    for (int64_t n = 0; n < s.sizes[t]; n++) {
      const int64_t row = offsets[t] + n, g = row * G + first, h = row * H + first;
      const float* stats = s.stats + row * STATS;
      with_terms(own.s, own.shape, stats, v + g, u + g, H, [&](const auto& terms) {
        body(own, n, g, h, terms, Centred(stats + 2 * MAX_GATES));
      });
    }
  };
  const auto gradient = [&](int64_t h) { return dout ? dout + h : zeros.data(); };
  const auto tell = [&](int64_t share, int64_t n, const auto& totals) {
    float* told = means.of(share, n);
    tell_means(s.input, totals.v, gates, told);
    tell_means(s.recurrent, totals.u, gates, told + 2 * MAX_GATES);
  };

  const Stage first = [&](int64_t share, int64_t t) {
    for_rows(
        share, t,
        [&](Own& own, int64_t n, int64_t g, int64_t h, const auto& terms, const Centred& norm) {
          const float *dh = s.dh + n * H + own.team.first, *d = gradient(h);
          RowTotals<std::decay_t<decltype(terms)>::norms> totals(own.s, own.shape, sums[share]);
          if (has_update(s.cell)) {
            gru_gates_back(own.s, own.shape, terms, h_prev + h, d, s.dh + n * H + own.team.first,
                           dv + g, du + g, totals);
            tell(share, n, totals);
            return;
          }
          if (s.cell == LSTM) {
            with_state(s, false, [&](auto state) {
              lstm_out_back<state.value>(own.s, own.shape, terms, norm, s.cells + h, s.c_prev + h,
                                         d, dh, s.dc + n * H + own.team.first, du + g,
                                         own.scratch.data() + n * 4 * own.team.count, totals);
            });
          } else {
            rnn_out_back(own.s, own.shape, norm, u + g, d, dh, du + g, totals);
          }
          tell_means(s.out, totals.out, 1, ends.of(share, n));
        });
  };
  const Stage cells = [&](int64_t share, int64_t t) {
    for_rows(
        share, t,
        [&](Own& own, int64_t n, int64_t g, int64_t h, const auto& terms, const Centred& norm) {
          RowTotals<std::decay_t<decltype(terms)>::norms> totals(own.s, own.shape, sums[share]);
          const Means found = means_of(s.out, ends, n, 0, 1, H);
          with_state(s, false, [&](auto state) {
            lstm_gates_back<state.value>(own.shape, terms, norm, found.of(0), s.cells + h,
                                         s.c_prev + h, s.dc + n * H + own.team.first, du + g,
                                         own.scratch.data() + n * 4 * own.team.count, totals);
          });
          tell(share, n, totals);
        });
  };
  const Stage last = [&](int64_t share, int64_t t) {
    for_rows(share, t,
             [&](Own& own, int64_t n, int64_t g, int64_t, const auto& terms, const Centred& norm) {
               if (gates == 1) {
                 const Means found = means_of(s.out, ends, n, 0, 1, H);
                 adjoint(own.shape.units, norm, found.of(0), own.s.gain_out, u + g, du + g, du + g);
                 return;
               }
               const Means mv = means_of(s.input, means, n, 0, gates, H);
               const Means mu = means_of(s.recurrent, means, n, 2 * MAX_GATES, gates, H);
               adjoints(own.s, own.shape, terms, mv, mu, s.cell == GRU ? dv + g : du + g, dv + g,
                        du + g);
             });
  };
  const Stage products = [&](int64_t share, int64_t t) {
    const Own& own = owns[share];
    const int64_t first = own.team.first, units = own.team.count;
    if (t > 0 || s.to_start) {
      product(s.sizes[t], units, G, Left<float>{du + offsets[t] * G, G, 1}, own.weight,
              s.dh + first, H, has_update(s.cell));
    }
    restart(s, offsets[t], 0, s.sizes[t], units, s.dh + first, s.dc ? s.dc + first : nullptr);
  };
  std::vector<Stage> stages{first};
  if (s.cell == LSTM) stages.push_back(cells);
  stages.push_back(last), stages.push_back(products);
  by_steps(s.shares, s.steps, true, stages);
  for (int64_t i = 0; i < s.shares; i++) sums[i].move(-owns[i].team.first);
  add(sums, shape, s);
}

}  // namespace

extern "C" {

// Number of shares of units for this many examples; 1: threads split the examples.
//
// Reading a weight from the third-level cache takes as long as about four multiplications, longer
// from memory. Threads with fewer examples are bound by reading weights, so splitting the units is
// faster, above all if each part fits the core's own cache. If the whole weight fits, splitting
// only adds barriers, unless it occupies threads that would have no example. Measured on two cores
// (docs/explanation/speed_limits.md).
int64_t ln_zoo_shares(int64_t gates, int64_t H, int64_t examples, int64_t threads) {
  constexpr int64_t MIB = 1 << 20, LEAST_UNITS = 16, LEAST_BYTES = MIB / 8;  // of a share
  const int64_t bytes = 4 * gates * H * H, rows = (examples + threads - 1) / threads;
  const auto few = [&] {
    if (bytes <= (2 * examples <= threads ? own_cache() / 4 : own_cache())) return 0;
    if (bytes > 32 * MIB) return 32;
    return bytes > 8 * MIB || bytes <= threads * own_cache() ? 8 : 3;
  };
  const int64_t most = std::min({threads, H / LEAST_UNITS, bytes / LEAST_BYTES});
  return rows > few() ? 1 : std::max(int64_t(1), most);
}

// Size of the result of ln_zoo_share_pack, in floats.
int64_t ln_zoo_share_packed_size(int64_t gates, int64_t H, int64_t shares, int64_t backward) {
  int64_t size = 0;
  for (int64_t i = 0; i < shares; i++) {
    const Team team = team_of(i, shares, gates, H);
    size += backward ? packed_columns(team.gates * H, team.count) : packed_columns(H, team.width());
  }
  return size;
}

// Pack the recurrent weight (G, H) for the forward or backward pass, share by share. `means` may be
// null (see Center).
void ln_zoo_share_pack(int64_t gates, int64_t H, int64_t shares, int64_t backward,
                       const float* w_hh, float* to, const float* means, int64_t threads) {
  for (int64_t i = 0; i < shares; i++) {
    const Team team = team_of(i, shares, gates, H);
    if (backward) {
      const Center center{means ? means + team.first : nullptr, H, H, false};
      pack(w_hh + team.first, H, int64_t(1), gates * H, team.count, to, threads, center);
      to += packed_columns(gates * H, team.count);
      continue;
    }
    // Panel by panel: gates are not aligned with panels.
    const Center center{means, team.count, H, true};
    const int64_t width = team.width(), panels = (width + WIDTH * L - 1) / (WIDTH * L);
    const int64_t used = threads_for(threads, panels);
    in_parallel(used, [&](int64_t thread) {
      std::vector<float> rows(WIDTH * L * H);
      for (int64_t p = panels * thread / used; p < panels * (thread + 1) / used; p++) {
        const int64_t n = p * WIDTH * L, columns = std::min(WIDTH * L, width - n);
        for (int64_t j = 0; j < columns; j++) {
          const int64_t gate = (n + j) / team.count, unit = (n + j) % team.count;
          std::memcpy(rows.data() + j * H, w_hh + (team.wide(gate) + unit) * H, 4 * H);
        }
        pack_panel(rows.data(), int64_t(1), H, H, n, columns, to + n * H, center);
      }
    });
    to += packed_columns(H, team.width());
  }
}

}  // extern "C"
