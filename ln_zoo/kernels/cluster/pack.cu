// Pack recurrent weights for the time loop: centred, scaled, in 16-bit pieces, in order of use.
//
// Macros: PIECES of a weight, 1 or 2; KIND: 1 for bfloat16, which needs no scale; else float16.
#include "device.h"

struct ScaleArguments {
  const void* w;  // (G, H)
  float* centred;  // (G, H)
  u32* largest;    // bits of max |centred|, at least 0; zeroed by the caller
  int G, H;
  int groups;    // of statistics
  int group_of;  // group index of each gate, two bits each, first gate lowest
  int centre;    // whether to subtract the mean over a group's rows from each column
  int kind;      // of w: 0 float32, 1 bfloat16, 2 float16
};

DEVICE float element(const ScaleArguments& a, u64 i) {
  if (a.kind == 0) return ((const float*)a.w)[i];
  u32 bits = ((const u16*)a.w)[i];
  return a.kind == 1 ? from_bfloat16(bits) : from_half(bits);
}

// Block groups * i + k has columns [32 i, 32 i + 32) of group k; a warp has every 32nd row.
KERNEL(1024, 1) void scale_weights(const ScaleArguments a) {
  SHARED_MEMORY(memory);
  float(*sums)[32] = (float(*)[32])memory;
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int column = block_index() / a.groups * 32 + lane, group = block_index() % a.groups;
  int first = 0, last = 0;
  for (int row = 0; row < a.G; row += a.H) {
    const int found = a.group_of >> 2 * (row / a.H) & 3;
    if (found < group) first = row + a.H;
    if (found <= group) last = row + a.H;
  }
  float mean = 0;
  if (a.centre) {
    float sum = 0;
    if (column < a.H) {
#pragma unroll 8
      for (int row = first + warp; row < last; row += 32)
        sum += element(a, (u64)row * a.H + column);
    }
    sums[warp][lane] = sum;
    block_barrier();
    for (int i = 0; i < 32; ++i) mean += sums[i][lane];
    mean /= (float)(last - first);
  }
  u32 largest = 0;
  if (column < a.H) {
#pragma unroll 4
    for (int row = first + warp; row < last; row += 32) {
      float x = element(a, (u64)row * a.H + column) - mean;
      a.centred[(u64)row * a.H + column] = x;
      // Bits of nonnegative floats have the order of the floats; NaN is above infinity.
      u32 bits = float_bits(x) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    u32 other = shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  if (lane == 0) global_max(a.largest, largest);
}

struct PackArguments {
  const float* centred;
  const int* index;    // (count): indices in centred, or -1 for zero
  const u32* largest;  // from scale_weights
  u16 *high, *low;     // (count); low only with two pieces
  float* unscale;      // the reciprocal of the scale
  int count;
};

// Exponent k such that 2^-k scales weights to at most 1, from the bits of the largest; limited so
// that 2^k and 2^-k are normal, and 0 for zero, infinity and NaN.
DEVICE int scale_exponent(u32 largest) {
  if (largest == 0 || largest >= 0x7f800000) return 0;
  int k = (int)(largest >> 23) - 127 + ((largest & 0x7fffff) != 0);
  return k < -126 ? -126 : k > 126 ? 126 : k;
}

DEVICE float power_of_two(int exponent) { return bits_float((u32)(exponent + 127) << 23); }

KERNEL(256, 1) void pack_weights(const PackArguments a) {
  const int k = KIND == 1 ? 0 : scale_exponent(*a.largest);
  const float scale = power_of_two(-k);
  const int step = 256 * block_count();
  for (int i = 256 * block_index() + thread_index(); i < a.count; i += step) {
    const int from = a.index[i];
    const float x = from < 0 ? 0.0f : a.centred[from] * scale;
    const u32 high = KIND == 1 ? to_bfloat16(x) : to_half(x);
    a.high[i] = (u16)high;
    if (PIECES == 2) a.low[i] = (u16)to_half((x - from_half(high)) * 2048);
  }
  if (block_index() == 0 && thread_index() == 0) *a.unscale = power_of_two(k);
}
