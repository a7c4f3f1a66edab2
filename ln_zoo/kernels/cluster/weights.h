// The recurrent weights of a block, resident for all steps, and their product with the operands of
// a step on tensor cores, 16 outputs x 8 columns at a time. Columns are rows of the batch; with
// SPLIT, the first four are high pieces and the last four low pieces.

#pragma once

#include "exchange.h"
#include "layout.h"

struct Weights {
  u32 high[HIGH > 0 ? HIGH : 1][4], low[LOW > 0 ? LOW : 1][4];
  unsigned char* shared;
  float column_scale;  // of a low piece's column
  int column;          // bytes to this lane's fragment in a tile of operands
  int warp_m, warp_k;
  bool works;

  MEMBER Weights(const uint4* all_high, const uint4* all_low, unsigned char* memory,
                 const Place& p)
      : warp_m(p.warp % WARPS_M), warp_k(p.warp / WARPS_M), works(p.warp < WARPS_M * WARPS_K) {
    const int quad = p.lane & 3, group = p.lane >> 2;
    column = SPLIT ? ((group & 3) * 4 + quad) * 16 + (group >> 2) * 8 : p.lane * FRAGMENT;
    column_scale = SPLIT && quad >= 2 ? BELOW : 1.0f;
    const int warp = works ? p.warp : 0;
    shared = memory + warp * SHARED_TILES * 512 + p.lane * 16;
    if (!works) return;
    const int first = (p.rank * WARPS_M * WARPS_K + warp) * OWN;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      keep(all_high[(first + i) * 32 + p.lane], i, HIGH, high, 0);
      if (PIECES == 2) keep(all_low[(first + i) * 32 + p.lane], i, LOW, low, OWN - HIGH);
    }
  }

  template <int N>
  MEMBER void keep(uint4 tile, int i, int in_registers, u32 (&registers)[N][4], int before) {
    if (i < in_registers) {
      u32* r = registers[i < N ? i : 0];
      r[0] = tile.x, r[1] = tile.y, r[2] = tile.z, r[3] = tile.w;
    } else {
      *(uint4*)(shared + (before + i - in_registers) * 512) = tile;
    }
  }

  template <int N>
  MEMBER uint4 tile(int i, int in_registers, const u32 (&registers)[N][4], int before) const {
    if (i < in_registers) {
      const u32* r = registers[i < N ? i : 0];
      return uint4{r[0], r[1], r[2], r[3]};
    }
    return *(const uint4*)(shared + (before + i - in_registers) * 512);
  }

  // Sums of this warp's tiles: `high x high`, and separately the terms to be scaled down.
  struct Sums {
    float main[OWN_M][4], below[PIECES == 2 ? OWN_M : 1][4];

    // Element e of tile m: output 16 m + lane / 4 (+ 8 for e >= 2), column 2 (lane % 4) + e % 2.
    MEMBER float operator()(int m, int e, float column_scale) const {
      if (PIECES == 1) return main[m][e];
      return (main[m][e] + below[m][e] * BELOW) * column_scale;
    }
  };

  MEMBER static void multiply(float (&sums)[4], uint4 a, u32 b0, u32 b1) {
    if (BRAIN) mma_bfloat16(sums, a.x, a.y, a.z, a.w, b0, b1);
    else mma_half(sums, a.x, a.y, a.z, a.w, b0, b1);
  }

  MEMBER Sums product(const unsigned char* operands) const {
    Sums sums[1];
    products(sums, operands);
    return sums[0];
  }

  // Products with the operands of consecutive tiles of rows. Several hide the latency of each
  // other's sums, and of weights in shared memory.
  template <int N>
  MEMBER void products(Sums (&sums)[N], const unsigned char* operands) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int m = 0; m < OWN_M; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[n].main[m][e] = 0.0f;
          if (PIECES == 2) sums[n].below[PIECES == 2 ? m : 0][e] = 0.0f;
        }
#pragma unroll
    for (int k = 0; k < OWN_K; ++k) {
      uint4 b[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const unsigned char* at =
            operands + n * OPERANDS + (warp_k * OWN_K + k) * 32 * FRAGMENT + column;
        b[n] = uint4{0, 0, 0, 0};
        if (FRAGMENT == 16) {
          b[n] = *(const uint4*)at;
        } else {
          const uint2 half = *(const uint2*)at;
          b[n].x = half.x, b[n].y = half.y;
        }
      }
#pragma unroll
      for (int m = 0; m < OWN_M; ++m) {
        const int i = k * OWN_M + m;
        const uint4 a = tile(i, HIGH, high, 0);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          multiply(sums[n].main[m], a, b[n].x, b[n].y);
          if (PIECES == 2 && !SPLIT)
            multiply(sums[n].below[PIECES == 2 ? m : 0], a, b[n].z, b[n].w);
        }
        if (PIECES == 1) continue;
        const uint4 rest = tile(i, LOW, low, OWN - HIGH);
#pragma unroll
        for (int n = 0; n < N; ++n)
          multiply(sums[n].below[PIECES == 2 ? m : 0], rest, b[n].x, b[n].y);
      }
    }
  }
};

// Operands of one row: an element is one or two 16-bit pieces.
DEVICE u32 high_piece(float a) { return BRAIN ? to_bfloat16(a) : to_half(a); }
DEVICE u32 low_piece(float a, u32 high) { return to_half((a - from_half(high)) * PIECE); }

// Byte offset of the four elements of a row that start with element n.
DEVICE int operand_offset(int row, int n) {
  return (n >> 4) * 32 * FRAGMENT + (row * 4 + ((n >> 2) & 3)) * QUARTET;
}

// Writes element n of a row to this block's own operands.
DEVICE void write_operand(unsigned char* operands, int row, int n, float a) {
  u16* to = (u16*)(operands + operand_offset(row, n)) + (n & 3);
  const u32 high = high_piece(a);
  to[0] = (u16)high;
  if (PIECES == 2) to[4] = (u16)low_piece(a, high);
}

// Four consecutive elements, aligned to four.
struct Quartet {
  u32 words[PIECES == 2 ? 4 : 2];

  MEMBER Quartet(const float (&a)[4]) {
    u32 high[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) high[e] = high_piece(a[e]);
    words[0] = high[0] | high[1] << 16, words[1] = high[2] | high[3] << 16;
    if constexpr (PIECES == 2) {
      u32 low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) low[e] = low_piece(a[e], high[e]);
      words[2] = low[0] | low[1] << 16, words[3] = low[2] | low[3] << 16;
    }
  }

  // Gather one element from each of four lanes, ordered by lane modulo 4; every lane gets all four.
  MEMBER static Quartet gather(float a, int lane) {
    Quartet found;
    const bool odd = lane & 1, upper = lane & 2;
    u32 pair, pair_below = 0;
    const u32 high = high_piece(a);
    if (PIECES == 2) {
      const u32 own = high | low_piece(a, high) << 16, other = shuffle_xor(own, 1);
      const u32 first = odd ? other : own, second = odd ? own : other;
      pair = (first & 0xffff) | second << 16;
      pair_below = first >> 16 | (second & 0xffff0000u);
    } else {
      const u32 other = shuffle_xor(high, 1);
      pair = odd ? other | high << 16 : high | other << 16;
    }
    const u32 far = shuffle_xor(pair, 2);
    found.words[0] = upper ? far : pair, found.words[1] = upper ? pair : far;
    if constexpr (PIECES == 2) {
      const u32 far_below = shuffle_xor(pair_below, 2);
      found.words[2] = upper ? far_below : pair_below;
      found.words[3] = upper ? pair_below : far_below;
    }
    return found;
  }

  MEMBER void send(u32 to, u32 barrier, int block) const {
    if constexpr (PIECES == 2) send4(to, barrier, block, words[0], words[1], words[2], words[3]);
    else send2(to, barrier, block, words[0], words[1]);
  }

  MEMBER void write(unsigned char* to) const {
    if constexpr (PIECES == 2) *(uint4*)to = uint4{words[0], words[1], words[2], words[3]};
    else *(uint2*)to = uint2{words[0], words[1]};
  }

 private:
  MEMBER Quartet() {}
};

#if BACKWARD
// Send the products of this warp to the owners of the units.
DEVICE void send_parts(const Weights& weights, const Weights::Sums& sums, const float* scales,
                       u32 parts, u32 barrier, const Place& p) {
  const int quad = p.lane & 3, group = p.lane >> 2;
  const int pair = ROWS == 8 ? 2 * quad : 2 * (quad & 1);
  const float first = scales[pair], second = scales[pair + 1];
  const u32 own = parts + (p.rank * WARPS_K + weights.warp_k) * UNITS * ROWS * 4;
#pragma unroll
  for (int m = 0; m < OWN_M; ++m) {
    const int tile = weights.warp_m * OWN_M + m;
    if (tile >= TILES_M) continue;
    float s[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[e] = sums(m, e, weights.column_scale) * (e % 2 ? second : first);
    // Exchange between lanes, so that each gets four rows of one unit: the lower lane of a pair
    // rows of unit `group`, the other rows of unit `group` + 8.
    float four[4];
    bool upper, sends = true;
    if (SPLIT) {
      upper = quad >= 2;
      const float x = (upper ? s[2] : s[0]) + shuffle_xor(upper ? s[0] : s[2], 2);
      const float y = (upper ? s[3] : s[1]) + shuffle_xor(upper ? s[1] : s[3], 2);
      four[0] = x, four[1] = y, four[2] = shuffle_xor(x, 1), four[3] = shuffle_xor(y, 1);
      sends = !(quad & 1);
    } else {
      upper = quad & 1;
      const float x = shuffle_xor(upper ? s[0] : s[2], 1), y = shuffle_xor(upper ? s[1] : s[3], 1);
      four[0] = upper ? x : s[0], four[1] = upper ? y : s[1];
      four[2] = upper ? s[2] : x, four[3] = upper ? s[3] : y;
      if (ROWS == 4) sends = quad < 2;
    }
    const int unit = tile * 16 + group + (upper ? 8 : 0);
    if (!sends || unit >= SENT) continue;
    const u32 to = own + unit % UNITS * ROWS * 4 + (ROWS == 8 ? (quad >> 1) * 16 : 0);
    send4(to, barrier, unit / UNITS, float_bits(four[0]), float_bits(four[1]),
          float_bits(four[2]), float_bits(four[3]));
  }
}
#endif
