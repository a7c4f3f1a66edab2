// Shared by forward and backward pass: vectors over units in shared memory, and pre-activations.

#pragma once

#include "layout.h"

DEVICE float sigmoid(float x) { return divide(1.0f, 1.0f + exponential(-x)); }

DEVICE float hyperbolic_tangent(float x) {
  const float far = 1.0f - divide(2.0f, 1.0f + exponential(2.0f * x));
  if (PIECES == 1) return far;
  // That cancels for small x: use an odd polynomial, fitted to |x| <= 0.625.
  const float square = x * x;
  float p = -5.70498872745e-3f * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return square < 0.390625f ? p * square * x + x : far;
}

// Uses the functions above.
#include "../equations.h"

// Features that share statistics.
DEVICE constexpr float features(int group) { return gates_in(group, group + 1) * (float)HIDDEN; }

// Vectors over units, [vector][unit], zero past the last unit.
enum Vector {
  GAIN_RECURRENT = 0,
  GAIN_INPUT = GATES,
  BIAS = 2 * GATES,
  GAIN_OUT = 3 * GATES,
  BIAS_CANDIDATE = GAIN_OUT,  // only a GRU has one, and it has no output site
  SHIFT_OUT,
  VECTORS
};
constexpr int VECTORS_BYTES = VECTORS * PITCH * 4;

struct Operands {
  const float *bias, *bias_candidate, *gain_input, *gain_recurrent, *gain_out, *shift_out;

  MEMBER void load(float* to, const Place& p) const {
    for (int i = p.thread; i < UNITS; i += THREADS) {
      const int unit = p.rank * UNITS + i;
      if (unit >= HIDDEN) continue;
#pragma unroll
      for (int k = 0; k < GATES; ++k) {
        if (RECURRENT) to[(GAIN_RECURRENT + k) * PITCH + i] = gain_recurrent[k * HIDDEN + unit];
        if (INPUT) to[(GAIN_INPUT + k) * PITCH + i] = gain_input[k * HIDDEN + unit];
        if (bias) to[(BIAS + k) * PITCH + i] = bias[k * HIDDEN + unit];
      }
      if (CELL == GRU && bias_candidate) to[BIAS_CANDIDATE * PITCH + i] = bias_candidate[unit];
      if (OUT) {
        to[GAIN_OUT * PITCH + i] = gain_out[unit];
        to[SHIFT_OUT * PITCH + i] = shift_out[unit];
      }
    }
  }
};

// The vectors at one unit.
struct AtUnit {
  const float* at;
  MEMBER AtUnit(const float* vectors, int unit) : at(vectors + unit) {}
  MEMBER float operator[](int vector) const { return at[vector * PITCH]; }

  // Input term of gate k, with the bias.
  MEMBER float input(int k, float v, float reciprocal) const {
    return (INPUT ? v * reciprocal * (*this)[GAIN_INPUT + k] : v) + (*this)[BIAS + k];
  }
  // Recurrent term of gate k.
  MEMBER float recurrent(int k, float u, float reciprocal) const {
    return RECURRENT ? u * reciprocal * (*this)[GAIN_RECURRENT + k] : u;
  }
};

// Regularisers at one step, read a step ahead.
struct Held {
  const u8 *mask_h, *mask_c;
  float share_h, share_c;
};

template <int N>
struct HeldAt {
  u8 h[ZONEOUT ? N : 1], c[ZONEOUT ? N : 1];

  MEMBER void load(const Held& held, int first, const Place& p) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (!ZONEOUT || !p.owns(j)) continue;
      const int at = (first + p.example()) * HIDDEN + p.global(j);
      if (held.mask_h) h[ZONEOUT ? j : 0] = held.mask_h[at];
      if (held.mask_c) c[ZONEOUT ? j : 0] = held.mask_c[at];
    }
  }
  // Share of a state that zoneout keeps.
  MEMBER float of_h(const Held& held, int j) const {
    if (!ZONEOUT) return 0.0f;
    return held.mask_h ? (h[ZONEOUT ? j : 0] ? 1.0f : 0.0f) : held.share_h;
  }
  MEMBER float of_c(const Held& held, int j) const {
    if (!ZONEOUT) return 0.0f;
    return held.mask_c ? (c[ZONEOUT ? j : 0] ? 1.0f : 0.0f) : held.share_c;
  }
};

DEVICE float mixed(float before, float now, float share) {
  if (!ZONEOUT) return now;
  return share == 1.0f ? before : now + share * (before - now);
}
// Gradient of a state before zoneout, from that after it.
DEVICE float passing(float d, float share) { return ZONEOUT ? d * (1.0f - share) : d; }
