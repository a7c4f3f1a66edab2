// All primitives in one kernel, with faults that the emulation must find; see test_emulation.py.
#include "device.h"

struct Arguments {
  const float* x;  // (threads)
  float* y;        // (grid, threads)
  int n, fault;
};
enum Fault {
  none, early_access, no_announcement, too_few_bytes, misaligned_push, far_push, no_wait,
  divergence, no_copy_wait, misaligned_load, bad_index, overrun, twice_announced, wrong_count
};

constexpr int threads = 256;

KERNEL(threads, CLUSTER) void primitives(const Arguments a) {
  SHARED_MEMORY(memory);
  const u32 shared = shared_address(memory), t = thread_index();
  const u32 next = (cluster_rank() + 1) % CLUSTER;
  if (t == 0) {
    barrier_init(shared);
    barrier_init_fence();
  }
  if (a.fault != early_access) cluster_barrier();

  // Each thread sends (t, rank) to the next block.
  if (t == 0 && a.fault != no_announcement) {
    barrier_expect(shared, a.fault == too_few_bytes ? 8 * threads - 8 : 8 * threads);
    if (a.fault == twice_announced) barrier_expect(shared, 8);
  }
  u32 to = peer_address(shared + 16 + 8 * t, next);
  if (a.fault == misaligned_push) to += 4;
  if (a.fault == far_push) to += 100000;
  push2(to, peer_address(shared, next), t, cluster_rank());
  if (a.fault != no_wait) barrier_wait(shared, 0);
  uint2 received = *(uint2*)(memory + 16 + 8 * (t ^ 1));
  float sum = (float)(received.x + 1000 * received.y);
  sum += shuffle_xor(sum, 1);
  if (a.fault == divergence && t == 3) block_barrier();

  copy_async4(shared + 4096 + 4 * t, a.x + t);
  copy_commit();
  if (a.fault != no_copy_wait) copy_wait<0>();
  part_barrier<1, threads>();
  if (a.fault == wrong_count && t < 32) part_barrier<1, 32>();
  else part_barrier<1, threads>();
  sum += ((float*)(memory + 4096))[threads - 1 - t];

  // The product of A (16, 16), A[r][k] = r, and B (16, 8), B[k][n] = n + 1.
  const u32 row = to_half((float)(t % 32 / 4)), low_row = to_half((float)(t % 32 / 4 + 8));
  const u32 column = to_half((float)(t % 32 / 4 + 1));
  float d[4] = {1, 1, 1, 1};
  mma_half(d, row | row << 16, low_row | low_row << 16, row | row << 16, low_row | low_row << 16,
           column | column << 16, column | column << 16);
  sum += d[t % 4];
  if (a.fault == misaligned_load) sum += *(float*)(memory + 4097);
  if (a.fault == bad_index) d[a.n] = sum;
  if (a.fault == overrun) ((float*)memory)[2048 + t] = d[0];
  a.y[block_index() * threads + t] = sum + d[a.n % 4] - d[a.n % 4];
  cluster_barrier();
}
