// Exchange between the blocks of a cluster: sums over the units of each row, and message barriers.
// A single block uses its own shared memory and block barriers.

#pragma once

#include "layout.h"

// Sum over the lanes of four units.
DEVICE float quad_sum(float a) {
  a += shuffle_xor(a, 1);
  return a + shuffle_xor(a, 2);
}

// Sum over all units of a row in this warp.
DEVICE float row_sum(float a) {
  a = quad_sum(a);
  return ROWS == 4 ? a + shuffle_xor(a, 16) : a;
}

// Never -0: bits of magnitudes are compared.
DEVICE float magnitude(float a) { return bits_float(float_bits(a) & 0x7fffffff); }

DEVICE float larger(float a, float b) { return a > b ? a : b; }

DEVICE float row_max(float a) {
  a = larger(a, shuffle_xor(a, 1));
  a = larger(a, shuffle_xor(a, 2));
  return ROWS == 4 ? larger(a, shuffle_xor(a, 16)) : a;
}

// Barrier for messages of `bytes` per phase. The wait for a phase arms the next one; messages that
// arrive earlier are counted as well.
struct Inbox {
  u32 barrier, bytes;

  MEMBER void start() const {
    barrier_init(barrier);
    barrier_expect(barrier, bytes);
  }

  // Waits for phase number `phase`.
  MEMBER void wait(int phase) const {
    if (BLOCKS == 1) {
      block_barrier();
      return;
    }
    barrier_wait(barrier, phase & 1);
    if (thread_index() == 0) barrier_expect(barrier, bytes);
  }
};

// Sends 16 bytes to the same place of a block.
DEVICE void send4(u32 to, u32 barrier, int block, u32 x, u32 y, u32 z, u32 w) {
  if (BLOCKS > 1) push4(peer_address(to, block), peer_address(barrier, block), x, y, z, w);
  else store4(to, x, y, z, w);
}

DEVICE void send2(u32 to, u32 barrier, int block, u32 x, u32 y) {
  if (BLOCKS > 1) push2(peer_address(to, block), peer_address(barrier, block), x, y);
  else store2(to, x, y);
}

// N sums of each row over all units of the cluster. Each warp writes its part, [warp][row][n]; a
// block sends its total to all blocks, as [block][row][n].
template <int N>
struct RowSums {
  static constexpr int COUNT = ROWS * N;
  static constexpr int PART_BYTES = WARPS * COUNT * 4, ALL_BYTES = BLOCKS * COUNT * 4;
  static_assert(COUNT % 4 == 0 && BLOCKS * (COUNT / 4) <= THREADS, "a message of four each");

  MEMBER static void write(unsigned char* parts, const Place& p, const float (&a)[N]) {
    float* to = (float*)parts + (p.warp * ROWS + p.row) * N;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float total = row_sum(a[n]);
      if (p.leads()) to[n] = total;
    }
  }

  // After a barrier of the block.
  MEMBER static void send(const unsigned char* parts, u32 all, u32 barrier, const Place& p) {
    if (BLOCKS == 1 || p.thread >= BLOCKS * (COUNT / 4)) return;
    const int block = p.thread / (COUNT / 4), first = p.thread % (COUNT / 4) * 4;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const uint4 part = *(const uint4*)(parts + (warp * COUNT + first) * 4);
      sums[0] += bits_float(part.x), sums[1] += bits_float(part.y);
      sums[2] += bits_float(part.z), sums[3] += bits_float(part.w);
    }
    send4(all + (p.rank * COUNT + first) * 4, barrier, block, float_bits(sums[0]),
          float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3]));
  }

  // After the wait for all blocks: totals of this thread's row. The lanes of four units split the
  // work.
  MEMBER static void read(const unsigned char* parts, const unsigned char* all, const Place& p,
                          float (&total)[N]) {
    constexpr int SOURCES = BLOCKS > 1 ? BLOCKS : WARPS;
    const float* from = (const float*)(BLOCKS > 1 ? all : parts) + p.row * N;
#pragma unroll
    for (int n = 0; n < N; ++n) total[n] = 0.0f;
#pragma unroll
    for (int e = 0; e < (SOURCES + 3) / 4; ++e) {
      const int source = e * 4 + (p.lane & 3);
      if (source < SOURCES)
#pragma unroll
        for (int n = 0; n < N; ++n) total[n] += from[source * COUNT + n];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) total[n] = quad_sum(total[n]);
  }
};

// Prefetching

template <int BYTES>
DEVICE void copy_ahead(u32 to, unsigned char* shared, const void* from) {
  if constexpr (BYTES == 16) copy_async16(to, from);
  else if constexpr (BYTES == 8) copy_async8(to, from);
  else if constexpr (BYTES == 4) copy_async4(to, from);
  else *(u16*)shared = *(const u16*)from;  // rows of an odd number of 16-bit values
}
