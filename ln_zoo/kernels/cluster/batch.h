// Statistics over the rows of a step, or GIVEN ones, in one cluster that has all rows, EIGHTS tiles
// of eight. A warp owns LINE units of the block, and one of PARTS parts of the rows; a lane one of
// the units, and one row of each line. Sums over rows stay within a block.

#pragma once

#include "exchange.h"
#include "terms.h"
#include "weights.h"

static_assert(ROWS == 8 && UNITS <= 32, "eight warps share the units");
constexpr int ALL_ROWS = 8 * EIGHTS;
static_assert(ALL_ROWS <= THREADS, "a thread for each row");
// Eight units make wider accesses to memory, four more lines of rows.
constexpr int LINE = UNITS % 8 == 0 && EIGHTS > 1 ? 8 : 4, LINE_ROWS = 32 / LINE;
constexpr int LINES = UNITS / LINE, PARTS = WARPS / LINES;
constexpr int MINE = (ALL_ROWS / LINE_ROWS + PARTS - 1) / PARTS;  // rows of a lane
// Rows of units in shared memory: an odd number of lines apart, so that they do not collide.
constexpr int TERM_PITCH = (LINES | 1) * LINE;
// Groups of warps that share the tiles of a product, and tiles that a group takes at a time.
constexpr int WARPS_N = WARPS / (WARPS_M * WARPS_K), TOGETHER = smaller(EIGHTS, 2);
// Features of a unit at the input and the recurrent site.
constexpr int INPUTS = INPUT * GATES, RECURRENTS = RECURRENT * GATES;

struct Owner {
  int part, in_line, local, unit;
  bool works;

  MEMBER explicit Owner(const Place& p)
      : part(p.warp / LINES), in_line(p.lane / LINE),
        local(p.warp % LINES * LINE + p.lane % LINE), unit(p.rank * UNITS + local),
        works(part < PARTS) {}
  MEMBER int row(int j) const { return (part + j * PARTS) * LINE_ROWS + in_line; }
  MEMBER int tile(int j) const { return row(j) / 8; }
  MEMBER bool there(int j) const { return works && row(j) < ALL_ROWS; }
  // Whether row j is one of a step's n rows.
  MEMBER bool owns(int j, int n) const { return there(j) && row(j) < n && unit < HIDDEN; }
  // Whether the thread writes what all rows of its unit share.
  MEMBER bool leads() const { return part == 0 && in_line == 0 && unit < HIDDEN; }
};

// The warps that multiply, as if each group were alone.
struct Multiplier {
  int group;
  bool works;
  Weights weights;

  MEMBER Multiplier(const uint4* high, const uint4* low, unsigned char* memory, const Place& p)
      : group(p.warp / (WARPS_M * WARPS_K)), works(group < WARPS_N),
        weights(high, low, memory, in_group(p)) {}

  MEMBER static Place in_group(Place p) {
    p.warp %= WARPS_M * WARPS_K;
    return p;
  }

  // Calls `use(tile, sums)` for each tile of this group.
  template <class Use>
  MEMBER void multiply(const unsigned char* operands, const Use& use) const {
    if (!works) return;
    // The last tiles may overlap.
    for (int i = group; i < (EIGHTS + TOGETHER - 1) / TOGETHER; i += WARPS_N) {
      const int first = smaller(i * TOGETHER, EIGHTS - TOGETHER);
      Weights::Sums sums[TOGETHER];
      weights.products(sums, operands + first * OPERANDS);
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n)
        if (first + n >= i * TOGETHER) use(first + n, sums[n]);
    }
  }
};

DEVICE int rows_of_step(const Sequence& sequence, int t) {
  return LENGTHS ? sequence.first(t + 1) - sequence.first(t) : sequence.examples;
}

// N sums of a unit over all rows.
template <int N>
struct BatchSums {
  static constexpr int BYTES = PARTS > 1 ? PARTS * N * UNITS * 4 : 0;

  // Replaces a, the sum of this thread's rows; its memory is free again after the next barrier of
  // the block.
  MEMBER static void sum(float (&a)[N], unsigned char* memory, const Owner& o) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int mask = LINE; mask < 32; mask *= 2) a[n] += shuffle_xor(a[n], mask);
    if (PARTS == 1) return;
    float* parts = (float*)memory + o.local;
    if (o.works && o.in_line == 0)
#pragma unroll
      for (int n = 0; n < N; ++n) parts[(o.part * N + n) * UNITS] = a[n];
    block_barrier();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      a[n] = parts[n * UNITS];
#pragma unroll
      for (int part = 1; part < PARTS; ++part) a[n] += parts[(part * N + n) * UNITS];
    }
  }
};

// Statistics of a step with n rows; the sum of squares is divided by n - correction.
struct Step {
  float inverse, less, spread;

  MEMBER Step(int n, int correction)
      : inverse(1.0f / n), less(1.0f / (n - correction)), spread(GIVEN ? 1.0f : n * less) {}
  MEMBER float reciprocal(float var, float eps) const {
    return reciprocal_root(var * spread + eps);
  }
  // Gradient of a value, from d of the normalised one a, and sums over rows of d and d a.
  MEMBER float through(float d, float a, float sum, float sum_a, float factor) const {
    return (GIVEN ? d : d - sum * inverse - a * (sum_a * less)) * factor;
  }
};

// Means and variances, (steps, F) each; null where a site does not normalise, and means of saved
// products unless GIVEN.
struct Statistics {
  float *mean_input, *var_input, *mean_recurrent, *var_recurrent, *mean_out, *var_out;
  float eps_input, eps_recurrent, eps_out;
  int correction;
};

// One unit's of a step.
struct AtStep {
  float mean_input[GATES], var_input[GATES], mean_recurrent[GATES], var_recurrent[GATES];
  float mean_out, var_out;

  MEMBER void read(const Statistics& a, int t, const Owner& o) {
    const bool inside = o.works && o.unit < HIDDEN;
#pragma unroll
    for (int k = 0; k < GATES; ++k) {
      const long long at = (long long)t * WIDTH + k * HIDDEN + o.unit;
      mean_input[k] = GIVEN && INPUT && inside ? a.mean_input[at] : 0.0f;
      var_input[k] = INPUT && inside ? a.var_input[at] : 1.0f;
      mean_recurrent[k] = GIVEN && RECURRENT && inside ? a.mean_recurrent[at] : 0.0f;
      var_recurrent[k] = RECURRENT && inside ? a.var_recurrent[at] : 1.0f;
    }
    const long long at = (long long)t * HIDDEN + o.unit;
    mean_out = OUT && inside ? a.mean_out[at] : 0.0f;
    var_out = OUT && inside ? a.var_out[at] : 1.0f;
  }
};
