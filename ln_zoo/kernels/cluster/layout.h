// Compile-time constants: the cell, its norms, the dtype, and the division of a cluster's work
// among blocks, warps and threads.
//
// A cluster of BLOCKS thread blocks runs ROWS rows of the batch through all time steps. Block b
// owns the hidden units b * UNITS ... of all gates: their recurrent weights stay in its registers
// and shared memory. A thread owns PAIRS pairs of a row and a unit between the products.

#pragma once

#include "gates.h"

typedef unsigned char u8;

enum Storage { FLOAT, BFLOAT16, HALF };

constexpr int INPUT_GROUPS = INPUT ? GROUPS : 0, RECURRENT_GROUPS = RECURRENT ? GROUPS : 0;
constexpr int OUT_STATS = OUT;  // 1: reciprocal deviation; 2: the mean as well
constexpr int STATS = INPUT_GROUPS + RECURRENT_GROUPS + OUT_STATS;
// Whether both terms are added first, so that only their sum is saved.
constexpr bool MERGED = JOINT || CELL == RNN || (CELL == LSTM && !INPUT && !RECURRENT);

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int WIDTH = GATES * HIDDEN;  // features of a row of v and u
constexpr int PAIRS = (ROWS * UNITS + THREADS - 1) / THREADS;
constexpr int PAIR_STEP = THREADS / ROWS;  // units between the pairs of a thread
static_assert(ROWS == 4 || ROWS == 8, "rows of a cluster");
static_assert(UNITS % 4 == 0, "four lanes share four units of a row");
static_assert(BLOCKS * UNITS >= HIDDEN, "every unit has an owner");

// Rows of float32 numbers in shared memory: 4 banks apart, so that 8 rows of 4 units do not
// collide.
constexpr int PITCH = (UNITS + 31) / 32 * 32 + 4;
// The same for rows of stored numbers.
#if KIND == 0
typedef float Stored;
constexpr int STORED_PITCH = PITCH;
#else
typedef u16 Stored;
constexpr int STORED_PITCH = (UNITS + 63) / 64 * 64 + 8;
#endif

DEVICE float load(float a) { return a; }
DEVICE float load(u16 a) { return KIND == BFLOAT16 ? from_bfloat16(a) : from_half(a); }
DEVICE void store(float* to, float a) { *to = a; }
DEVICE void store(u16* to, float a) {
  *to = (u16)(KIND == BFLOAT16 ? to_bfloat16(a) : to_half(a));
}

// Products: 16-bit operands, float32 sums. float32 operands are PIECES = 2 halves; the second is
// the remainder of the first, scaled by 2^11.
constexpr bool BRAIN = KIND == BFLOAT16;
constexpr float PIECE = 2048.0f, BELOW = 1.0f / 2048.0f;
// Four rows in two pieces fill the eight columns of one product.
constexpr bool SPLIT = PIECES == 2 && ROWS == 4;
#if BACKWARD
constexpr int CONTRACTED = GATES * UNITS, PRODUCED = HIDDEN;
#else
constexpr int CONTRACTED = HIDDEN, PRODUCED = GATES * UNITS;
#endif
// Tiles of 16 x 16 weights of the block, and of a warp.
constexpr int TILES_M = (PRODUCED + 15) / 16, TILES_K = (CONTRACTED + 15) / 16;
constexpr int OWN_M = (TILES_M + WARPS_M - 1) / WARPS_M;
constexpr int OWN_K = (TILES_K + WARPS_K - 1) / WARPS_K;
constexpr int OWN = OWN_M * OWN_K;
static_assert(WARPS_M * WARPS_K <= WARPS, "eight warps share the tiles");
static_assert(HIGH <= OWN && LOW <= OWN, "tiles in registers");
// Bytes of four operands of one row, of one lane's fragment, and of all operands of a step.
constexpr int QUARTET = 8 * PIECES, FRAGMENT = PIECES == 2 && ROWS == 8 ? 16 : 8;
constexpr int OPERANDS = WARPS_K * OWN_K * 32 * FRAGMENT;
// Weights in shared memory.
constexpr int SHARED_TILES = OWN - HIGH + (PIECES == 2 ? OWN - LOW : 0);
constexpr int WEIGHTS_BYTES = WARPS_M * WARPS_K * SHARED_TILES * 512;

// Units sent to other blocks, without padding past the last tile.
constexpr int ROUNDED = (HIDDEN + 15) / 16 * 16;
constexpr int SENT = BLOCKS * UNITS < ROUNDED ? BLOCKS * UNITS : ROUNDED;

// Stages of the pipeline that reads from memory, ahead of time.
constexpr int STAGES = 3;

// Bytes of an asynchronous copy, a divisor of a block's units and of a row.
DEVICE constexpr int aligned_bytes(int bytes) { return bytes % 16 == 0 ? 16 : bytes & -bytes; }
DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int COPY_BYTES = smaller(aligned_bytes(HIDDEN * (int)sizeof(Stored)),
                                   aligned_bytes(UNITS * (int)sizeof(Stored)));
constexpr int COPIED = COPY_BYTES / (int)sizeof(Stored);
constexpr int COPY_FLOATS = smaller(aligned_bytes(HIDDEN * 4), aligned_bytes(UNITS * 4)) / 4;

DEVICE constexpr int after(int offset, int bytes) { return (offset + bytes + 15) & ~15; }

// A thread's rows and units.
struct Place {
  int thread, lane, warp, rank;
  int first_row;  // of the cluster
  int row;        // within the cluster
  int unit;       // first unit, within the block

  MEMBER Place()
      : thread(thread_index()), lane(thread & 31), warp(thread >> 5),
        rank(BLOCKS > 1 ? cluster_rank() : 0), first_row(block_index() / BLOCKS * ROWS),
        row((thread >> 2) % ROWS), unit((thread >> 2) / ROWS * 4 + (lane & 3)) {}
  MEMBER int example() const { return first_row + row; }
  MEMBER int local(int j) const { return unit + j * PAIR_STEP; }
  MEMBER int global(int j) const { return rank * UNITS + local(j); }
  // Whether pair j exists in this block.
  MEMBER bool inside(int j) const { return PAIRS * THREADS == ROWS * UNITS || local(j) < UNITS; }
  MEMBER bool owns(int j) const { return inside(j) && global(j) < HIDDEN; }
  // Whether the lane writes for all lanes of its row.
  MEMBER bool leads() const { return (lane & 3) == 0 && (ROWS == 8 || lane < 16); }
};

// Steps of packed rows: step t owns rows [first_rows[t], first_rows[t + 1]); null: equal steps.
struct Sequence {
  const int* first_rows;
  int steps, examples;

  MEMBER int first(int t) const { return LENGTHS ? first_rows[t] : t * examples; }
  MEMBER bool active(int t, int example) const {
    return LENGTHS ? example < first_rows[t + 1] - first_rows[t] : example < examples;
  }
  // Steps in which an example is active: sizes never grow.
  MEMBER int length(int example) const {
    if (!LENGTHS) return steps;
    int low = 0, high = steps;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (active(middle, example)) low = middle + 1; else high = middle;
    }
    return low;
  }
};
