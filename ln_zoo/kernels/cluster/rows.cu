// Row operations of the layer norms outside the time loop: statistics before, gradients after.
//
// Macros: KIND of v, u and their gradients in memory (0 float32, 1 bfloat16, 2 float16); those of
// gates.h; INPUT and RECURRENT: whether v and u are divided by their root mean squares. Means are
// 0, since the weights are centred. Computation is in float32.
#include "gates.h"

#if KIND == 0
typedef float Number;
DEVICE float widen(Number x) { return x; }
DEVICE Number narrow(float x) { return x; }
#else
typedef u16 Number;
DEVICE float widen(Number x) { return KIND == 1 ? from_bfloat16(x) : from_half(x); }
DEVICE Number narrow(float x) { return (Number)(KIND == 1 ? to_bfloat16(x) : to_half(x)); }
#endif

// Four columns: one access of 16 or 8 bytes where rows are aligned, else single numbers.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

DEVICE float as_float(float x) { return x; }
#if KIND != 0
DEVICE float as_float(u16 x) { return widen(x); }
#endif

template <bool aligned, class T>
DEVICE void load4(float (&to)[4], const T* from, int valid) {
  if (aligned) {
    Four<T> four = *(const Four<T>*)from;
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = as_float(four.x[e]);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = e < valid ? as_float(from[e]) : 0.0f;
  }
}

template <bool aligned>
DEVICE void store4(Number* to, const float (&from)[4], int valid) {
  if (aligned) {
    Four<Number> four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.x[e] = narrow(from[e]);
    *(Four<Number>*)to = four;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < valid) to[e] = narrow(from[e]);
  }
}

DEVICE bool is_aligned(const void* pointer, u32 bytes) { return (u64)pointer % bytes == 0; }

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += shuffle_xor(x, lane);
  return x;
}

// Reciprocal root mean square of each group of each row of v.

struct StatisticsArguments {
  const Number* v;  // (rows, GATES * H)
  float* stats;     // (rows, stride)
  long long rows;
  int H, stride, offset;  // a row's results are stats[row * stride + offset + group]
  float eps;
};

template <bool aligned>
DEVICE void statistics(const StatisticsArguments& a) {
  const int lane = thread_index() % 32;
  const long long step = 8ll * block_count();
  for (long long row = 8ll * block_index() + thread_index() / 32; row < a.rows; row += step) {
#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
      const Number* v = a.v + row * GATES * a.H + gates_in(0, k) * a.H;
      const int count = gates_in(k, k + 1) * a.H;
      float sum = 0;
#pragma unroll 4
      for (int c = 4 * lane; c < count; c += 128) {
        float x[4];
        load4<aligned>(x, v + c, count - c);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum += x[e] * x[e];
      }
      const float mean = warp_sum(sum) / (float)count;
      if (lane == 0) a.stats[row * a.stride + a.offset + k] = reciprocal_root(mean + a.eps);
    }
  }
}

KERNEL(256, 1) void input_statistics(const StatisticsArguments a) {
  if ((GROUPS == 1 ? GATES : 1) * a.H % 4 == 0 && is_aligned(a.v, 4 * sizeof(Number))) statistics<true>(a);
  else statistics<false>(a);
}

// Gradients of v and u, and sums over rows, from the gradients of pre-activations.
//
// With a_hat = r a, a group's gradient is r (d - a_hat mean(d a_hat)), where d = gain dp. A team of
// 1, 2, 4 or 12 warps processes a row at a time; each thread has all gates of the same four units
// in all its rows, and their sums in registers. Blocks write partial sums, in a fixed order.

struct AfterLoopArguments {
  const float* work;   // (rows, W, H): LSTM dp of i, f, g, o; GRU r, z, q, dw; RNN dp
  const Number* v;     // (rows, G), G = GATES * H; read if INPUT
  const Number* u;     // (rows, G); read if RECURRENT; RNN: v + u
  const float* stats;  // (rows, stride)
  const float *gain_v, *gain_u;           // (G)
  Number *dv, *du;                        // (rows, G), or null; may be v and u
  float *bias, *bias_hn, *sum_v, *sum_u;  // (blocks, G), bias_hn (blocks, H); or null
  long long rows;
  int H, stride, offset_v, offset_u;  // H is at most 4 * after_threads
};

// With this many threads, each has up to 168 registers; with more, they spill.
constexpr int after_threads = 384;
constexpr int warp_count = after_threads / 32;

// Means of a row: v's groups, then u's.
DEVICE constexpr bool has_mean(int i) { return i < GROUPS ? INPUT : RECURRENT; }

// Write a block's sums over its rows, adding its teams in order.
template <int count, class Value>
DEVICE void write_sums(float* shared, float* to, int H, int team_threads, Value value) {
  if (to == nullptr) return;
  const int width = count * H, team = thread_index() / team_threads;
  const int unit = 4 * (thread_index() % team_threads);
  block_barrier();
#pragma unroll
  for (int j = 0; j < count; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (unit + e < H) shared[team * width + j * H + unit + e] = value(j, e);
  block_barrier();
  for (int c = thread_index(); c < width; c += after_threads) {
    float sum = 0;
    for (int other = 0; other < after_threads / team_threads; ++other)
      sum += shared[other * width + c];
    to[(u64)block_index() * width + c] = sum;
  }
}

template <bool aligned>
DEVICE void after(const AfterLoopArguments& a, unsigned char* memory) {
  constexpr int W = CELL == RNN ? 1 : 4;
  const int H = a.H, G = GATES * H;
  int team_threads = 32;
  while (4 * team_threads < H && team_threads < after_threads)
    team_threads = team_threads < 128 ? 2 * team_threads : after_threads;
  const int teams = after_threads / team_threads, warps = team_threads / 32;
  const int team = thread_index() / team_threads;
  const int unit = 4 * (thread_index() % team_threads), valid = H - unit;

  float(*partial)[warp_count][2 * GROUPS] = (float(*)[warp_count][2 * GROUPS])memory;
  const float* gain_v = (const float*)(memory + 2 * sizeof(*partial));
  const float* gain_u = gain_v + (INPUT ? (G + 3) / 4 * 4 : 0);
  for (int c = thread_index(); c < G; c += after_threads) {
    if (INPUT) ((float*)gain_v)[c] = a.gain_v[c];
    if (RECURRENT) ((float*)gain_u)[c] = a.gain_u[c];
  }
  block_barrier();

  // Only a GRU's candidate has different gradients of its two terms, p and q.
  float bias[GATES][4] = {}, bias_hn[4] = {}, sum_v[GATES][4] = {}, sum_u[GATES][4] = {};
  const long long step = (long long)block_count() * teams;
  const bool active = valid > 0;
  int set = 0;
  for (long long row = (long long)block_index() * teams + team; row < a.rows; row += step) {
    float p[GATES][4] = {}, q[4] = {}, v[GATES][4] = {}, u[GATES][4] = {};
    float root_v[GROUPS] = {}, root_u[GROUPS] = {}, means[2 * GROUPS] = {};
    if (active) {
      const float* work = a.work + row * W * H + unit;
      const long long place = row * G + unit;
#pragma unroll
      for (int j = 0; j < GATES; ++j) {
        load4<aligned>(p[j], work + j * H, valid);
        if (INPUT) load4<aligned>(v[j], a.v + place + j * H, valid);
        if (RECURRENT) load4<aligned>(u[j], a.u + place + j * H, valid);
      }
      if (CELL == GRU) load4<aligned>(q, work + 3 * H, valid);
#pragma unroll
      for (int k = 0; k < GROUPS; ++k) {
        if (INPUT) root_v[k] = a.stats[row * a.stride + a.offset_v + k];
        if (RECURRENT) root_u[k] = a.stats[row * a.stride + a.offset_u + k];
      }
#pragma unroll
      for (int j = 0; j < GATES; ++j) {
        const int k = group(j);
        const bool two_terms = CELL == GRU && j == 2;
        float gain[4];
        if (INPUT) {
          load4<aligned>(gain, gain_v + j * H + unit, valid);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            v[j][e] *= root_v[k];
            sum_v[j][e] += p[j][e] * v[j][e];
            means[k] += gain[e] * p[j][e] * v[j][e];
          }
        }
        if (RECURRENT) load4<aligned>(gain, gain_u + j * H + unit, valid);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float d = two_terms ? q[e] : p[j][e];
          bias[j][e] += p[j][e];
          if (two_terms) bias_hn[e] += d;
          if (RECURRENT) {
            u[j][e] *= root_u[k];
            sum_u[j][e] += d * u[j][e];
            means[GROUPS + k] += gain[e] * d * u[j][e];
          }
        }
      }
    }
    if (INPUT || RECURRENT) {
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; ++i) {
        if (!has_mean(i)) continue;
        means[i] = warp_sum(means[i]);
        if (warps > 1 && thread_index() % 32 == 0) partial[set][thread_index() / 32][i] = means[i];
      }
      if (warps > 1) {
        part_barrier(1 + team, team_threads);  // teams may be at different rows
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i) {
          if (!has_mean(i)) continue;
          means[i] = 0;
          for (int w = 0; w < warps; ++w) means[i] += partial[set][team * warps + w][i];
        }
        set ^= 1;  // double buffer, so that one barrier per turn suffices
      }
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; ++i)
        means[i] /= (float)(gates_in(i % GROUPS, i % GROUPS + 1) * H);
    }
    if (!active) continue;
    const long long place = row * G + unit;
#pragma unroll
    for (int j = 0; j < GATES; ++j) {
      const int k = group(j);
      const bool two_terms = CELL == GRU && j == 2;
      float gain[4];
      if (a.du != nullptr) {
        if (RECURRENT) load4<aligned>(gain, gain_u + j * H + unit, valid);
        float du[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          du[e] = two_terms ? q[e] : p[j][e];
          if (RECURRENT) du[e] = root_u[k] * (gain[e] * du[e] - u[j][e] * means[GROUPS + k]);
        }
        store4<aligned>(a.du + place + j * H, du, valid);
      }
      if (a.dv != nullptr) {
        if (INPUT) load4<aligned>(gain, gain_v + j * H + unit, valid);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (INPUT) p[j][e] = root_v[k] * (gain[e] * p[j][e] - v[j][e] * means[k]);
        store4<aligned>(a.dv + place + j * H, p[j], valid);
      }
    }
  }

  float* shared = (float*)memory;
  write_sums<GATES>(shared, a.bias, H, team_threads, [&](int j, int e) { return bias[j][e]; });
  if (CELL == GRU)
    write_sums<1>(shared, a.bias_hn, H, team_threads, [&](int, int e) { return bias_hn[e]; });
  if (INPUT)
    write_sums<GATES>(shared, a.sum_v, H, team_threads, [&](int j, int e) { return sum_v[j][e]; });
  if (RECURRENT)
    write_sums<GATES>(shared, a.sum_u, H, team_threads, [&](int j, int e) { return sum_u[j][e]; });
}

KERNEL(after_threads, 1) void after_loop(const AfterLoopArguments a) {
  SHARED_MEMORY(memory);
  const u32 bytes = 4 * sizeof(Number);
  const bool aligned = a.H % 4 == 0 && is_aligned(a.work, 16) && is_aligned(a.v, bytes) &&
                       is_aligned(a.u, bytes) && is_aligned(a.dv, bytes) && is_aligned(a.du, bytes);
  if (aligned) after<true>(a, memory);
  else after<false>(a, memory);
}
