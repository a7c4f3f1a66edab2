// Calls of a generated kernel: by parts of the examples, which threads run from end to end.

#pragma once

#include "passes.h"

namespace {

// How a call is split (see `ln_zoo_matrix_parts`).
struct Split {
  int64_t parts = 1;
  bool each_step = false;  // whether each step multiplies its own inputs

  explicit Split(const Call& a) {
    if (a.narrow || a.sizes[a.steps - 1] != a.examples || shares_of(a) > 1) return;
    const int64_t found = a.products->parts(a.steps, a.examples, a.inputs, G, H, a.threads);
    const auto masks = a.given + GIVEN_DROPPED;
    const bool masked = std::any_of(masks, a.given + GIVEN, [](auto mask) { return mask; });
    each_step = found > 0, parts = masked ? 1 : std::max<int64_t>(found, 1);
  }
};

// Move the arguments of a call to the examples from `first` on.
void skip_examples(Work& a, int64_t first) {
  const auto skip = [&](auto& array, auto& own, size_t size, size_t states) {
    if (!array) return;
    own.assign(array, array + size), array = own.data();
    for (size_t i = 0; i < WIDTHS.size(); i++) {
      if (own[states + i]) own[states + i] += first * WIDTHS[i];
    }
  };
  skip(a.given, a.own_given, GIVEN, GIVEN_STATES);
  skip(a.finals, a.own_finals, WIDTHS.size(), 0);
  skip(a.dfinals, a.own_dfinals, WIDTHS.size(), 0);
  skip(a.gradients, a.own_gradients, GIVEN_DROPPED, GIVEN_STATES);
  if (a.rooms) {
    a.own_rooms.assign(a.rooms, a.rooms + ROOMS_PRODUCTS + 2 * K);
    a.own_rooms[0] += first * G, a.own_rooms[1] += first * a.inputs;
    for (int64_t k = 0; k < K; k++) {
      a.own_rooms[ROOMS_PRODUCTS + 2 * k] += first * PRODUCTS[k].width;
      a.own_rooms[ROOMS_PRODUCTS + 2 * k + 1] += first * PRODUCTS[k].inner;
    }
    a.rooms = a.own_rooms.data();
  }
  a.own_given[0] += first * a.inputs, a.output += first * WIDTHS[0];
  if (a.dout) a.dout += first * WIDTHS[0];
  if (a.gradients && a.gradients[0]) a.own_gradients[0] += first * a.inputs;
}

// The arguments of a part.
Work work_of(const Call& call, const Split& split, int64_t i) {
  Work a{call};
  a.saves = call.kept != nullptr, a.each_step = split.each_step;
  if (split.parts > 1) {
    const int64_t first = call.examples * i / split.parts;
    a.examples = call.examples * (i + 1) / split.parts - first;
    a.skipped = call.examples - a.examples;
    a.threads = 1, a.chunk = std::max<int64_t>(256, call.chunk / split.parts);
    a.own_sizes.assign(a.steps, a.examples), a.sizes = a.own_sizes.data();
    skip_examples(a, first);
  }
  a.offsets.resize(a.steps + 1);
  for (int64_t t = 0; t < a.steps; t++) a.offsets[t + 1] = a.offsets[t] + a.sizes[t];
  a.parameters = a.given + GIVEN_PARAMETERS, a.dropped = a.given[GIVEN_DROPPED];
  a.reset = reinterpret_cast<const bool*>(a.given[GIVEN_DROPPED + 1]);
  return a;
}

// Numbers that a part keeps for the backward pass; the last part has the most examples.
int64_t keeps(const Call& call, const Split& split) {
  Work a = work_of(call, split, split.parts - 1);
  a.saves = true;
  return lay_out(a, nullptr);
}

// Run a pass of each part; `prepare` may change a part's arguments.
template <class Prepare>
void run_parts(const Call& call, const Split& split, void (*pass)(Work&, Arena&), Prepare prepare) {
  const int64_t size = call.kept && split.parts > 1 ? keeps(call, split) : 0;
  const auto run = [&](int64_t i) {
    Arena arena;
    Work a = work_of(call, split, i);
    lay_out(a, a.saves ? a.kept + i * size : arena.take(lay_out(a, nullptr)));
    a.hoisted = arena.take(HOISTED);
    hoist(a, a.hoisted);
    prepare(a, i);
    pass(a, arena);
  };
  split.parts > 1 ? in_parallel(split.parts, run) : run(0);
}

// Sizes of the gradients that are sums over examples, in the order of `Call::gradients`.
std::vector<int64_t> sizes_of_sums(const Call& a) {
  std::vector<int64_t> found(GIVEN_DROPPED);
  found[1] = G * a.inputs;
  std::copy(SIZES.begin(), SIZES.end(), found.begin() + GIVEN_PARAMETERS);
  for (const Product& p : PRODUCTS) {
    found[GIVEN_WEIGHTS + p.weight] = p.rows * p.inner / p.blocks;
  }
  return found;
}

}  // namespace

extern "C" {

int64_t ln_zoo_abi() { return LN_ZOO_ABI; }

int64_t ln_zoo_cell_keeps(const Call* call) {
  const Split split(*call);
  return split.parts * keeps(*call, split);
}

void ln_zoo_cell_forward(const Call* call) {
  run_parts(*call, Split(*call), forward, [](Work&, int64_t) {});
}

void ln_zoo_cell_backward(const Call* call) {
  const Split split(*call);
  Arena arena;
  // Parts after the first sum in memory of their own.
  const std::vector<int64_t> sizes = sizes_of_sums(*call);
  const int64_t size = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
  float* const others = arena.take((split.parts - 1) * size);
  std::fill_n(others, (split.parts - 1) * size, 0.0f);
  run_parts(*call, split, backward, [&](Work& a, int64_t part) {
    float* to = others + (part - 1) * size;
    for (size_t i = 0; part > 0 && i < sizes.size(); to += sizes[i++]) {
      if (sizes[i] && a.gradients[i]) a.own_gradients[i] = to;
    }
  });
  for (int64_t part = 1; part < split.parts; part++) {
    const float* from = others + (part - 1) * size;
    for (size_t i = 0; i < sizes.size(); from += sizes[i++]) {
      float* const to = call->gradients[i];
      for (int64_t j = 0; to && j < sizes[i]; j++) to[j] += from[j];
    }
  }
}

}  // extern "C"
