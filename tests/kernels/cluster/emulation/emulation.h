// The names of ln_zoo/kernels/cluster/device.h for the CPU: kernels run without a GPU.
//
// Each thread of a cluster is a fiber with a stack of its own, on one thread of the CPU. A fiber
// runs until it has to wait. Clusters run one after another. Everything that a GPU would leave to
// chance or ignore, and that can be detected here, ends the run with a message: see `fail`.
//
// Found: wrong indices, alignment and addresses of shared memory, byte counts of messages, hangs,
// waits that are missing (messages and asynchronous copies arrive early or late, at random).
// Not found: races that need another order of threads, memory ordering, limits of registers.
#define LN_ZOO_DEVICE_H  // device.h stays empty

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

#define DEVICE [[maybe_unused]] static inline
#define MEMBER inline
#define __restrict__ __restrict

namespace emulation {

constexpr u32 BASE = 1024;          // of a block's shared memory; so that 0 is no valid address
constexpr u32 SPAN = 1 << 20;       // of addresses of a block
constexpr u32 MAX_BARRIERS = 64, MAX_MESSAGES = 4096, MAX_COPIES = 512;
constexpr size_t STACK = 128 << 10, GUARD = 4096, HEADER = 128;

struct Message { u32 address, words, values[4]; };
struct Barrier {
  u32 address, pending, phase;
  long bytes;  // announced and not arrived
  long announced;  // for the present phase
  Message late[MAX_MESSAGES];
  u32 count;
};
struct Warp {
  u32 arrived, generation;
  const char* kind;
  bool advanced;  // a thread has gone on since the first lane had its turn
  float values[2][32][12];
};
struct Part { u32 arrived, generation, threads; };
struct Block {
  unsigned char* memory;  // between guards
  Warp warps[32];
  Part parts[16];
  Barrier* barriers;
  u32 barrier_count, running;
};
struct Copy { unsigned char* to; const void* from; u32 bytes, group; };
struct Thread {
#if defined(__x86_64__)
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  u32 index, rank;
  bool done;
  const char* waits_for;
  u32 detail;
  Copy copies[MAX_COPIES];
  u32 copy_count, group;
};

struct Shape { u32 threads, cluster; };
inline Shape shapes[64];
inline u32 shape_count;
struct Declared {
  Declared(u32 threads, u32 cluster) { shapes[shape_count++ % 64] = {threads, cluster}; }
};

inline Thread* threads;
inline Thread scheduler;
inline Block* blocks;
inline u32 thread_total, threads_per_block, cluster_size, running, current;
inline u32 first_block, grid, cluster_arrived, cluster_generation;
inline size_t shared_bytes;
inline u64 idle, random_state;
inline void (*body)();
inline char message[2048];

// Switches stacks. The callee-saved registers are on the stack that is left.
#if defined(__x86_64__)
extern "C" void ln_zoo_switch(void** from, void* to);
asm(R"(
.text
.local ln_zoo_switch
.type ln_zoo_switch, @function
ln_zoo_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void change(Thread& from, Thread& to) {
  ln_zoo_switch(&from.stack_pointer, to.stack_pointer);
}
inline void start(Thread& thread, unsigned char* stack, void (*entry)()) {
  void** top = (void**)(stack + STACK) - 2;  // as after a call: 8 bytes off a multiple of 16
  *--top = nullptr;
  *--top = (void*)entry;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread.stack_pointer = top;
}
#else
inline void change(Thread& from, Thread& to) { swapcontext(&from.context, &to.context); }
inline void start(Thread& thread, unsigned char* stack, void (*entry)()) {
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = stack;
  thread.context.uc_stack.ss_size = STACK;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, entry, 0);
}
#endif

inline Thread& me() { return threads[current]; }
inline Block& my_block() { return blocks[me().rank]; }
inline Warp& my_warp() { return my_block().warps[me().index / 32]; }

// Ends the run.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  if (n < 1500)
    snprintf(message + n, sizeof message - n, " (block %u, rank %u, thread %u)",
             first_block + me().rank, me().rank, me().index);
  change(me(), scheduler);
  abort();
}

inline bool coin() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return random_state >> 63;
}

// Gives the turn to another thread. A warp keeps it as long as one of its threads goes on.
inline void pass_on() {
  Thread& from = me();
  for (;;) {
    if (current % 32 == 31) {
      Warp& warp = my_warp();
      current = warp.advanced ? current - 31 : (current + 1) % thread_total;
      warp.advanced = false;
    } else {
      ++current;
    }
    if (!me().done) break;
  }
  if (&me() != &from) change(from, me());
}

inline void hang() {
  int n = snprintf(message, sizeof message, "hang:");
  u32 named = 0;
  for (u32 i = 0; i < thread_total; ++i) {
    Thread& t = threads[i];
    if (t.done) continue;
    if (i > 0 && !threads[i - 1].done && t.waits_for == threads[i - 1].waits_for &&
        t.detail == threads[i - 1].detail && t.rank == threads[i - 1].rank)
      continue;
    if (++named <= 12)
      n += snprintf(message + n, sizeof message - n, " rank %u thread %u waits for %s %u;", t.rank,
                    t.index, t.waits_for, t.detail);
  }
  snprintf(message + n, sizeof message - n, " %u threads have ended", thread_total - running);
  change(me(), scheduler);
}

template <class Ready>
inline void wait(const char* what, u32 detail, Ready ready) {
  me().waits_for = what;
  me().detail = detail;
  while (!ready()) {
    if (++idle > 4ull * thread_total + 128) hang();
    pass_on();
  }
  idle = 0;
  my_warp().advanced = true;
}

inline void meet(u32& arrived, u32& generation, u32 count, const char* what, u32 detail) {
  u32 before = generation;
  if (++arrived == count) {
    arrived = 0;
    ++generation;
  }
  wait(what, detail, [&] { return generation != before; });
}

// Warps: all lanes must come to the same operation. Two sets of values, so that one barrier does.
inline float (*exchange(const char* kind, const float* values, u32 count))[12] {
  Warp& warp = my_warp();
  if (warp.arrived == 0) warp.kind = kind;
  if (warp.kind != kind) fail("a lane is at %s while another one is at %s", kind, warp.kind);
  u32 set = warp.generation % 2;
  memcpy(warp.values[set][me().index % 32], values, count * sizeof(float));
  meet(warp.arrived, warp.generation, 32, kind, me().index / 32);
  return warp.values[set];
}

// Shared memory.

inline unsigned char* place(u32 address, u32 bytes, bool own) {
  u32 rank = address / SPAN, offset = address % SPAN - BASE;
  if (rank >= cluster_size || offset > shared_bytes || offset + bytes > shared_bytes)
    fail("%u bytes at rank %u, offset %d are not in shared memory", bytes, rank, (int)offset);
  if (address % bytes) fail("offset %u is not a multiple of %u", offset, bytes);
  if (rank != me().rank) {
    if (own) fail("the address must be in this block, not in rank %u", rank);
    if (cluster_generation == 0) fail("access to rank %u before the first cluster_barrier", rank);
    if (blocks[rank].running == 0) fail("access to rank %u, which has ended", rank);
  }
  return blocks[rank].memory + offset;
}

inline Barrier& barrier_at(u32 address, bool own) {
  place(address, 8, own);
  Block& block = blocks[address / SPAN];
  for (u32 i = 0; i < block.barrier_count; ++i)
    if (block.barriers[i].address == address) return block.barriers[i];
  fail("no barrier at offset %u of rank %u", address % SPAN - BASE, address / SPAN);
}

inline void complete(Barrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes < 0)
    fail("%ld bytes more than announced at the barrier at offset %u of rank %u", -barrier.bytes,
         barrier.address % SPAN - BASE, barrier.address / SPAN);
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = 1;
    ++barrier.phase;
  }
}

inline void deliver(Barrier& barrier, const Message& sent) {
  u32 offset = sent.address % SPAN - BASE;
  memcpy(blocks[sent.address / SPAN].memory + offset, sent.values, 4 * sent.words);
  barrier.bytes -= 4 * sent.words;
  complete(barrier);
}

inline void push(u32 address, u32 barrier, const Message& sent) {
  place(address, 4 * sent.words, false);
  if (address / SPAN != barrier / SPAN) fail("a message and its barrier are in different blocks");
  Barrier& b = barrier_at(barrier, false);
  if (coin() || b.count == MAX_MESSAGES) deliver(b, sent);
  else b.late[b.count++] = sent;
}

inline void copy_async(u32 to, const void* from, u32 bytes) {
  unsigned char* target = place(to, bytes, true);
  if ((u64)from % bytes) fail("%u bytes are copied from %p, which is not aligned", bytes, from);
  Thread& t = me();
  if (coin() || t.copy_count == MAX_COPIES) memcpy(target, from, bytes);
  else t.copies[t.copy_count++] = {target, from, bytes, t.group};
}

inline void copy_wait(u32 pending) {
  Thread& t = me();
  u32 kept = 0;
  for (u32 i = 0; i < t.copy_count; ++i) {
    Copy& copy = t.copies[i];
    if (copy.group + pending < t.group) memcpy(copy.to, copy.from, copy.bytes);
    else t.copies[kept++] = copy;
  }
  t.copy_count = kept;
}

template <class From>
inline void mma(float (&d)[4], const char* kind, const u32 (&operands)[6], From from) {
  float own[12];
  for (int i = 0; i < 12; ++i) own[i] = from(operands[i / 2] >> (16 * (i % 2)) & 0xffff);
  auto values = exchange(kind, own, 12);
  u32 lane = me().index % 32;
  for (u32 e = 0; e < 4; ++e) {
    u32 row = lane / 4, column = 2 * (lane % 4) + e % 2;
    double sum = d[e];
    for (u32 k = 0; k < 16; ++k)
      sum += (double)values[4 * row + k % 8 / 2][2 * (e / 2 + k / 8 * 2) + k % 2] *
             values[4 * column + k % 8 / 2][8 + 2 * (k / 8) + k % 2];
    d[e] = (float)sum;
  }
}

}  // namespace emulation

#define EMULATION_JOIN_(a, b) a##b
#define EMULATION_JOIN(a, b) EMULATION_JOIN_(a, b)
#define KERNEL(threads, cluster)                                                                \
  static const emulation::Declared EMULATION_JOIN(declared_, __COUNTER__)((threads), (cluster)); \
  static
#define SHARED_MEMORY(name) unsigned char* name = emulation::my_block().memory

DEVICE u32 thread_index() { return emulation::me().index; }
DEVICE u32 block_index() { return emulation::first_block + emulation::me().rank; }
DEVICE u32 block_count() { return emulation::grid; }
DEVICE u32 cluster_rank() { return emulation::me().rank; }

DEVICE u32 shared_address(const void* pointer) {
  size_t offset = (const unsigned char*)pointer - emulation::my_block().memory;
  if (offset > emulation::shared_bytes) emulation::fail("%p is not in shared memory", pointer);
  return emulation::me().rank * emulation::SPAN + emulation::BASE + (u32)offset;
}
DEVICE u32 peer_address(u32 address, u32 rank) {
  if (rank >= emulation::cluster_size) emulation::fail("there is no rank %u", rank);
  return address % emulation::SPAN + rank * emulation::SPAN;
}

DEVICE void cluster_barrier() {
  using namespace emulation;
  meet(cluster_arrived, cluster_generation, thread_total, "cluster_barrier", 0);
}
namespace emulation {
inline void part(u32 id, u32 count) {
  Part& p = my_block().parts[id];
  if (p.arrived == 0) p.threads = count;
  if (p.threads != count) fail("barrier %u is for %u threads and for %u", id, p.threads, count);
  meet(p.arrived, p.generation, count, "barrier", id);
}
}  // namespace emulation
DEVICE void block_barrier() { emulation::part(0, emulation::threads_per_block); }
template <int id, int threads>
DEVICE void part_barrier() {
  static_assert(id > 0 && id < 16 && threads % 32 == 0, "ids are 1 to 15, for whole warps");
  emulation::part(id, threads);
}
DEVICE void part_barrier(u32 id, u32 threads) {
  if (id == 0 || id > 15 || threads % 32) emulation::fail("barrier %u of %u threads", id, threads);
  emulation::part(id, threads);
}
DEVICE void warp_barrier() { emulation::exchange("warp_barrier", nullptr, 0); }

DEVICE void barrier_init(u32 barrier) {
  using namespace emulation;
  place(barrier, 8, true);
  Block& block = my_block();
  for (u32 i = 0; i < block.barrier_count; ++i)
    if (block.barriers[i].address == barrier) fail("the barrier is initialised twice");
  if (block.barrier_count == MAX_BARRIERS) fail("more than %u barriers", MAX_BARRIERS);
  Barrier& b = block.barriers[block.barrier_count++];
  b.address = barrier;
  b.pending = 1;
  b.phase = b.count = 0;
  b.bytes = 0;
}
DEVICE void barrier_init_fence() {}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  emulation::Barrier& b = emulation::barrier_at(barrier, true);
  if (b.pending == 0) emulation::fail("a phase of the barrier is announced twice");
  b.pending = 0;
  b.bytes += bytes;
  b.announced = bytes;
  emulation::complete(b);
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  using namespace emulation;
  if (parity > 1) fail("parity %u", parity);
  Barrier& b = barrier_at(barrier, true);
  wait("the message barrier at offset", barrier % SPAN - BASE, [&] {
    u32 count = b.count;
    b.count = 0;
    for (u32 i = 0; i < count; ++i) deliver(b, b.late[i]);
    return b.phase % 2 != parity;
  });
}

DEVICE void push2(u32 address, u32 barrier, u32 x, u32 y) {
  emulation::push(address, barrier, {address, 2, {x, y}});
}
DEVICE void push4(u32 address, u32 barrier, u32 x, u32 y, u32 z, u32 w) {
  emulation::push(address, barrier, {address, 4, {x, y, z, w}});
}
DEVICE void store2(u32 address, u32 x, u32 y) {
  u32 values[] = {x, y};
  memcpy(emulation::place(address, 8, false), values, 8);
}
DEVICE void store4(u32 address, u32 x, u32 y, u32 z, u32 w) {
  u32 values[] = {x, y, z, w};
  memcpy(emulation::place(address, 16, false), values, 16);
}

DEVICE void copy_async4(u32 to, const void* from) { emulation::copy_async(to, from, 4); }
DEVICE void copy_async8(u32 to, const void* from) { emulation::copy_async(to, from, 8); }
DEVICE void copy_async16(u32 to, const void* from) { emulation::copy_async(to, from, 16); }
DEVICE void copy_commit() { ++emulation::me().group; }
template <int pending>
DEVICE void copy_wait() {
  emulation::copy_wait(pending);
}

DEVICE float shuffle_xor(float value, int mask) {
  return emulation::exchange("shuffle", &value, 1)[(emulation::me().index ^ mask) % 32][0];
}
DEVICE u32 float_bits(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
DEVICE float bits_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
DEVICE u32 shuffle_xor(u32 value, int mask) {
  return float_bits(shuffle_xor(bits_float(value), mask));
}

DEVICE void shared_max(u32 address, u32 value) {
  u32* to = (u32*)emulation::place(address, 4, true);
  if (value > *to) *to = value;
}
DEVICE void global_max(u32* to, u32 value) {
  if (value > *to) *to = value;
}

DEVICE float reciprocal_root(float x) { return 1 / sqrtf(x); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE float divide(float x, float y) { return x / y; }

DEVICE u32 to_half(float x) {
  _Float16 half = (_Float16)x;
  u16 bits;
  memcpy(&bits, &half, 2);
  return bits;
}
DEVICE float from_half(u32 bits) {
  u16 low = (u16)bits;
  _Float16 half;
  memcpy(&half, &low, 2);
  return (float)half;
}
DEVICE u32 to_bfloat16(float x) {
  u32 bits = float_bits(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE float from_bfloat16(u32 bits) { return bits_float(bits << 16); }

DEVICE void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulation::mma(d, "mma_half", {a0, a1, a2, a3, b0, b1}, from_half);
}
DEVICE void mma_bfloat16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulation::mma(d, "mma_bfloat16", {a0, a1, a2, a3, b0, b1}, from_bfloat16);
}

// What -fsanitize=alignment,null,bounds calls: the run ends with the line of the source.
namespace emulation {
struct Location { const char* file; u32 line, column; };
}
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(
    emulation::Location* at, void* pointer) {
  emulation::fail("%s:%u: %p is null or not aligned", at->file, at->line, pointer);
}
extern "C" inline __attribute__((used)) void __ubsan_handle_out_of_bounds(emulation::Location* at,
                                                                         void* index) {
  emulation::fail("%s:%u: index %ld is out of bounds", at->file, at->line, (long)index);
}

// The launch; the harness defines `kernel`, by the macros of `emulate` in __init__.py.
namespace emulation {

inline const void* arguments;
inline size_t argument_bytes;
template <class A>
inline void call(void (*kernel)(A)) {
  if (sizeof(A) != argument_bytes)
    fail("Arguments has %zu bytes, %zu are given", sizeof(A), argument_bytes);
  A copy;
  memcpy((void*)&copy, arguments, sizeof(A));
  kernel(copy);
}

inline void thread_main() {
  body();
  me().done = true;
  my_warp().advanced = true;
  idle = 0;
  --my_block().running;
  if (--running == 0) change(me(), scheduler);
  pass_on();
}

inline void run_cluster(unsigned char* stacks, unsigned char* memory) {
  size_t stride = shared_bytes + 2 * GUARD;
  stride += (HEADER - stride % HEADER) % HEADER;
  memset(memory, 0xa5, stride * cluster_size);
  running = thread_total;
  cluster_arrived = cluster_generation = current = 0;
  idle = 0;
  for (u32 rank = 0; rank < cluster_size; ++rank) {
    Block& block = blocks[rank];
    block.memory = memory + rank * stride + GUARD;
    memset(block.memory, 0xff, shared_bytes);
    memset(block.warps, 0, sizeof block.warps);
    memset(block.parts, 0, sizeof block.parts);
    block.barrier_count = 0;
    block.running = threads_per_block;
  }
  for (u32 i = 0; i < thread_total; ++i) {
    Thread& t = threads[i];
    t.index = i % threads_per_block;
    t.rank = i / threads_per_block;
    t.done = false;
    t.copy_count = t.group = 0;
    memset(stacks + i * STACK, 0xa5, 64);
    start(t, stacks + i * STACK, thread_main);
  }
  change(scheduler, threads[0]);
  if (message[0]) return;
  unsigned char pattern[GUARD];
  memset(pattern, 0xa5, GUARD);
  for (u32 i = 0; i < thread_total; ++i)
    if (memcmp(stacks + i * STACK, pattern, 64)) snprintf(message, 200, "a stack is too small");
  for (u32 rank = 0; rank < cluster_size; ++rank) {
    Block& block = blocks[rank];
    if (memcmp(block.memory - GUARD, pattern, GUARD) ||
        memcmp(block.memory + shared_bytes, pattern, GUARD))
      snprintf(message, 200, "rank %u wrote outside of its shared memory", rank);
    // A barrier may be armed for a phase that never begins.
    for (u32 i = 0; i < block.barrier_count; ++i)
      if (block.barriers[i].count ||
          block.barriers[i].bytes != (block.barriers[i].pending ? 0 : block.barriers[i].announced))
        snprintf(message, 200, "rank %u ended before messages to its barrier at offset %u arrived",
                 rank, block.barriers[i].address % SPAN - BASE);
  }
}

inline void* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

// Returns null, or the message of a failure.
inline const char* run(void (*kernel)(), u32 grid_blocks, u32 block_threads, u32 cluster,
                       size_t shared, const void* structure, size_t bytes, u64 seed) {
  message[0] = 0;
  bool declared = false;
  for (u32 i = 0; i < shape_count && i < 64; ++i)
    declared |= shapes[i].threads == block_threads && shapes[i].cluster == cluster;
  if (!declared) return "no KERNEL has these numbers of threads and blocks in a cluster";
  if (block_threads % 32 || block_threads > 1024 || grid_blocks % cluster || cluster > 16)
    return "threads must be whole warps, and blocks whole clusters";
  if (shared > 227 << 10) return "more than 227 KB of shared memory";
  body = kernel;
  grid = grid_blocks;
  threads_per_block = block_threads;
  cluster_size = cluster;
  thread_total = block_threads * cluster;
  shared_bytes = shared;
  arguments = structure;
  argument_bytes = bytes;
  random_state = seed;
  size_t memory_bytes = cluster * (shared + 2 * GUARD + HEADER);
  size_t barrier_bytes = cluster * MAX_BARRIERS * sizeof(Barrier);
  threads = (Thread*)reserve(thread_total * sizeof(Thread));
  blocks = (Block*)reserve(cluster * sizeof(Block));
  auto barriers = (Barrier*)reserve(barrier_bytes);
  auto stacks = (unsigned char*)reserve(thread_total * STACK);
  auto memory = (unsigned char*)reserve(memory_bytes);
  if (!threads || !blocks || !barriers || !stacks || !memory) return "out of memory";
  for (u32 rank = 0; rank < cluster; ++rank) blocks[rank].barriers = barriers + rank * MAX_BARRIERS;
  for (first_block = 0; first_block < grid_blocks && !message[0]; first_block += cluster)
    run_cluster(stacks, memory);
  munmap(threads, thread_total * sizeof(Thread));
  munmap(blocks, cluster * sizeof(Block));
  munmap(barriers, barrier_bytes);
  munmap(stacks, thread_total * STACK);
  munmap(memory, memory_bytes);
  return message[0] ? message : nullptr;
}

}  // namespace emulation
