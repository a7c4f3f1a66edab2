// Primitives of Hopper GPUs as inline PTX, which NVRTC compiles without CUDA headers.
// tests/kernels/cluster/emulation/emulation.h defines the same names for the CPU.
#ifndef LN_ZOO_DEVICE_H
#define LN_ZOO_DEVICE_H

typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define DEVICE __device__ __forceinline__
// The same for member functions.
#define MEMBER __device__ __forceinline__

// Starts a kernel's definition: KERNEL(256, 4) void name(const Arguments a) { ... }
#define KERNEL(threads, cluster) \
  extern "C" __global__ __launch_bounds__(threads, 1) __cluster_dims__(cluster, 1, 1)

// Declares `unsigned char* name`, the dynamic shared memory.
#define SHARED_MEMORY(name)                                        \
  extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
  unsigned char* name = dynamic_shared

// Places.

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 block_count() { return gridDim.x; }

DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// 32-bit addresses in shared memory. An address of this block is also valid in the cluster's shared
// memory, where it refers to this block.
DEVICE u32 shared_address(const void* pointer) {
  u32 address;
  asm("{\n.reg .u64 wide;\ncvta.to.shared.u64 wide, %1;\ncvt.u32.u64 %0, wide;\n}"
      : "=r"(address)
      : "l"(pointer));
  return address;
}

// The same place in the shared memory of block `rank` of the cluster.
DEVICE u32 peer_address(u32 address, u32 rank) {
  u32 peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// Barriers of threads.

// Orders plain stores to peers' shared memory before the loads that follow it.
DEVICE void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

DEVICE void block_barrier() { asm volatile("barrier.sync.aligned 0;" ::: "memory"); }

// Barrier of `threads` threads of the block; whole warps only.
template <int id, int threads>
DEVICE void part_barrier() {
  static_assert(id > 0 && id < 16 && threads % 32 == 0, "ids are 1 to 15, for whole warps");
  asm volatile("barrier.sync.aligned %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

// The same with a number of threads and an id known at run time.
DEVICE void part_barrier(u32 id, u32 threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void warp_barrier() { __syncwarp(); }

// Message barriers (mbarrier): a phase ends when the announced number of bytes has arrived.

DEVICE void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// After barrier_init: makes the barriers visible to peers, together with cluster_barrier().
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity has ended. The default scope, not .acquire.cluster, which
// would invalidate the L1 cache on each try.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Messages: stores that count their bytes at a barrier of the receiving block.

DEVICE void push2(u32 address, u32 barrier, u32 x, u32 y) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

DEVICE void push4(u32 address, u32 barrier, u32 x, u32 y, u32 z, u32 w) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Plain stores to the cluster's shared memory.

DEVICE void store2(u32 address, u32 x, u32 y) {
  asm volatile("st.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y)
               : "memory");
}

DEVICE void store4(u32 address, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

// Asynchronous copies from device memory to this block's shared memory.

DEVICE void copy_async4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void copy_async8(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void copy_async16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Closes a group of this thread's copies.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `pending` newest groups of this thread are not complete.
template <int pending>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Warp shuffles; all 32 lanes participate.

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(~0u, value, mask); }

// Atomic maxima; results do not depend on their order.

DEVICE void shared_max(u32 address, u32 value) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE void global_max(u32* to, u32 value) {
  asm volatile("red.global.max.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Fast arithmetic; errors are a few units in the last place.

DEVICE float reciprocal_root(float x) { return rsqrtf(x); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float divide(float x, float y) { return __fdividef(x, y); }

// Bits of numbers. 16-bit numbers are in the low half; the high half is ignored.

DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 bits) { return __uint_as_float(bits); }

DEVICE u32 to_half(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

DEVICE float from_half(u32 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
  return x;
}

DEVICE u32 to_bfloat16(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

DEVICE float from_bfloat16(u32 bits) { return __uint_as_float(bits << 16); }

// Matrix products of a warp, 16 x 8 x 16, added to d in float32. In lane 4 r + c, each register of
// a and b holds two numbers with adjacent k: a0 row r, k 2c; a1 row r + 8; a2, a3 the same at
// k 2c + 8; b0 column r, k 2c; b1 at k 2c + 8. d holds (r, 2c), (r, 2c + 1), then row r + 8.

DEVICE void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_bfloat16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif
