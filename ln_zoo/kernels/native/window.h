// One row of a window over a text, forward and backward.

#pragma once

#include "cells.h"

namespace {

// The window of one row: from the parameters (3K,), without bias, to the weighted sum w of
// characters. `scratch` has size 2U and starts with 1, 2, ..., U.
void window_row(const Window& a, const float* parameters, const float* text, float* terms,
                float* kappa, float* w, float* scratch) {
  const int64_t K = a.components, U = a.characters, E = a.letters;
  const float* places = scratch;
  float* phi = scratch + U;
  for_units(3 * K, [&](int64_t j, auto block) {
    block.write(terms + j, exponential(block.read(parameters + j) + block.read(a.bias + j)));
  });
  std::fill(phi, phi + U, 0.0f);
  for (int64_t k = 0; k < K; k++) {
    kappa[k] += terms[2 * K + k];
    terms[3 * K + k] = kappa[k];
    const vec alpha = all(terms[k]), beta = all(terms[K + k]), center = all(kappa[k]);
    for_units(U, [&](int64_t u, auto block) {
      vec d = center - block.read(places + u);
      block.write(phi + u, block.read(phi + u) + alpha * exponential(-(beta * d * d)));
    });
  }
  std::fill(w, w + E, 0.0f);
  for (int64_t u = 0; u < U; u++) {
    const vec share = all(phi[u]);
    for_units(E, [&](int64_t j, auto block) {
      block.write(w + j, block.read(w + j) + share * block.read(text + u * E + j));
    });
  }
}

// Its adjoint: dkappa is the gradient of kappa after the step and becomes that before it.
void window_row_back(const Window& a, const float* dw, const float* text, const float* terms,
                     float* dkappa, float* dparameters, float* scratch) {
  const int64_t K = a.components, U = a.characters, E = a.letters;
  const float* places = scratch;
  float* dphi = scratch + U;
  for (int64_t u = 0; u < U; u++) {
    vec sum{};
    for_units(E, [&](int64_t j, auto block) {
      sum += block.read(dw + j) * block.read(text + u * E + j);
    });
    dphi[u] = total(sum);
  }
  for (int64_t k = 0; k < K; k++) {
    const float alpha = terms[k], beta = terms[K + k];
    const vec b = all(beta), center = all(terms[3 * K + k]);
    vec sum{}, first{}, second{};
    for_units(U, [&](int64_t u, auto block) {
      vec d = center - block.read(places + u);
      vec p = exponential(-(b * d * d)) * block.read(dphi + u);
      sum += p, first += p * d, second += p * d * d;
    });
    dkappa[k] -= 2.0f * alpha * beta * total(first);
    dparameters[k] = alpha * total(sum);
    dparameters[K + k] = -alpha * beta * total(second);
    dparameters[2 * K + k] = dkappa[k] * terms[2 * K + k];
  }
}

}  // namespace
