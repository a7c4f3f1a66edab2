// Matrix products and packed matrices.

#pragma once

#include "threads.h"
#include "vectors.h"

namespace {

// Matrix products of float or bfloat factors, summed in float

// bfloat16: the upper half of a float.
typedef uint16_t bfloat;

inline vec widen(const bfloat* p) {
  ivec bits{};
  for (int64_t i = 0; i < L; i++) bits[i] = int32_t(uint32_t(p[i]) << 16);
  return (vec)bits;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bfloat narrow(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, 4);
  if (a != a) return bfloat(bits >> 16 | 64);
  return bfloat((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void widen(const bfloat* from, int64_t n, float* to) {
  int64_t j = 0;
  for (; j + L <= n; j += L) store(to + j, widen(from + j));
  for (; j < n; j++) {
    const uint32_t bits = uint32_t(from[j]) << 16;
    std::memcpy(to + j, &bits, 4);
  }
}

inline void narrow(const float* from, int64_t n, bfloat* to) {
  int64_t j = 0;
#ifdef __AVX512BF16__
  for (; j + L <= n; j += L) {
    const __m256bh part = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + j));
    std::memcpy(to + j, &part, sizeof part);
  }
#endif
  for (; j < n; j++) to[j] = narrow(from[j]);
}

// Content of a lane: one factor, or two adjacent factors of one sum.
template <class T>
struct Factors;

template <>
struct Factors<float> {
  typedef vec Vector;
  typedef unaligned_vec Stored;  // memory from malloc may be unaligned
  static constexpr int64_t PER_LANE = 1;
  static Vector left(const float* p) { return all(*p); }
  static void add(vec& sum, vec a, vec b) { sum += a * b; }
};

template <>
struct Factors<bfloat> {
  typedef ivec Vector;
  typedef unaligned_ivec Stored;
  static constexpr int64_t PER_LANE = 2;
  static Vector left(const bfloat* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return ivec{} + pair;
  }
  static void add(vec& sum, ivec a, ivec b) {
#ifdef __AVX512BF16__
    sum = (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const ivec upper = ivec{} + int32_t(0xffff0000);
    sum += (vec)(a << 16) * (vec)(b << 16);
    sum += (vec)(a & upper) * (vec)(b & upper);
#endif
  }
};

// K rounded up to whole lanes.
template <class T>
inline int64_t padded(int64_t K) {
  constexpr int64_t per = Factors<T>::PER_LANE;
  return (K + per - 1) / per * per;
}

// A packed matrix (K, N) consists of panels of WIDTH vectors of columns, the last as narrow as
// possible; a panel has its rows in order (rows of bfloat in pairs), so that a product reads it
// sequentially. Six rows by four vectors of sums, four vectors of the right and one of the left
// operand fill the 32 registers of AVX-512; six by two, two and one the 16 of AVX2.
#if defined(__x86_64__) && !defined(__AVX512F__)
constexpr int64_t WIDTH = 2, HEIGHT = 6;
#else
constexpr int64_t WIDTH = 4, HEIGHT = 6;
#endif
// Rows of a panel per block, at most 64 KiB for the second-level cache.
constexpr int64_t DEPTH = WIDTH * L > 32 ? 256 : 512;

// Keep a value in a register: GCC would reload it for every use, and a processor loads only one or
// two vectors per cycle.
#if defined(LN_ZOO_LANES)
#define KEEP(a)
#elif defined(__x86_64__) && defined(__AVX512F__)
#define KEEP(a) asm("" : "+v"(a))
#elif defined(__x86_64__)
#define KEEP(a) asm("" : "+x"(a))
#elif defined(__aarch64__)
#define KEEP(a) asm("" : "+w"(a))
#else
#define KEEP(a)
#endif

template <class T>
struct Left {  // the left operand: element (m, k); columns of bfloat are contiguous
  const T* data;
  int64_t row, column;
};

// Never inlined: GCC might run out of registers. The loop is unrolled and aligned to a cache line
// (compiler.py), since its speed depends on its address.
template <class T, int ROWS, int VECTORS>
__attribute__((noinline)) void tile(int64_t K, Left<T> a, const T* b, float* c, int64_t ldc,
                                    bool add, int64_t lanes) {
  constexpr int64_t per = Factors<T>::PER_LANE;
  typedef typename Factors<T>::Vector Vector;
  // Prefetch the result.
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < VECTORS; j++) __builtin_prefetch(c + i * ldc + j * L, 1);
  }
  vec sums[ROWS][VECTORS] = {};
  const T* left = a.data;
#pragma GCC unroll 4
  for (int64_t k = 0; k < K; k += per, b += per * VECTORS * L, left += per * a.column) {
    Vector right[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      right[j] = *reinterpret_cast<const typename Factors<T>::Stored*>(b + j * per * L);
      KEEP(right[j]);
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      const Vector factor = Factors<T>::left(left + i * a.row);
      for (int j = 0; j < VECTORS; j++) Factors<T>::add(sums[i][j], factor, right[j]);
    }
  }
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < VECTORS; j++) {
      float* to = c + i * ldc + j * L;
      if (j < VECTORS - 1 || lanes == L) {
        store(to, add ? load(to) + sums[i][j] : sums[i][j]);
      } else {
        const Rest rest(lanes);
        rest.write(to, add ? rest.read(to) + sums[i][j] : sums[i][j]);
      }
    }
  }
}

template <class T, int ROWS, int VECTORS = WIDTH>
void tile_of(int64_t vectors, int64_t K, Left<T> a, const T* b, float* c, int64_t ldc, bool add,
             int64_t lanes) {
  if (vectors == VECTORS) return tile<T, ROWS, VECTORS>(K, a, b, c, ldc, add, lanes);
  if constexpr (VECTORS > 1) tile_of<T, ROWS, VECTORS - 1>(vectors, K, a, b, c, ldc, add, lanes);
}

// Rows of the next block, evenly divided: single rows are slow.
inline int64_t block_height(int64_t rows) {
  const int64_t blocks = (rows + HEIGHT - 1) / HEIGHT;
  return (rows + blocks - 1) / blocks;
}

// Blocks copied at a time if the left operand is transposed: 96 KiB for 512 columns.
constexpr int64_t COPIED = 8;
// Bytes of a cache line; rows of prefetch distance.
constexpr int64_t CACHE_LINE = 64, AHEAD = 16;

// Copy M rows of A (M, K), at most COPIED blocks, into product order. Columns of a transposed
// operand are far apart, and few fit the first-level cache.
template <class T>
const T* copy_blocks(int64_t M, int64_t K, Left<T> a) {
  thread_local std::vector<T> copies;
  copies.resize(std::max(int64_t(copies.size()), M * K));
  if (a.row == 1 && M == COPIED * HEIGHT) {  // usual height, as a constant
    for (int64_t k = 0; k < K; k++) {
      const T* from = a.data + k * a.column;
      T* to = copies.data() + k * HEIGHT;
      // Rows are pages apart, which hardware does not prefetch.
      for (int64_t m = 0; m < M; m += CACHE_LINE / sizeof(T))
        __builtin_prefetch(from + AHEAD * a.column + m);
      for (int64_t q = 0; q < COPIED; q++)
        std::memcpy(to + q * HEIGHT * K, from + q * HEIGHT, HEIGHT * sizeof(T));
    }
    return copies.data();
  }
  int64_t ends[COPIED], count = 0;
  for (int64_t m = 0; m < M; ends[count++] = m) m += block_height(M - m);
  for (int64_t k = 0; k < K; k++) {
    const T* from = a.data + k * a.column;
    for (int64_t q = 0, m = 0; q < count; m = ends[q++]) {
      const int64_t height = ends[q] - m;
      T* to = copies.data() + m * K + k * height;
      for (int64_t i = 0; i < height; i++) to[i] = from[(m + i) * a.row];
    }
  }
  return copies.data();
}

// Bytes of a left operand that stay in the second-level cache while panels stream through.
constexpr int64_t LEFT_CACHED = 1 << 19;

// C (M, N) = A (M, K) B, or C += A B; B packed, K whole lanes. On vectors; see `product`.
template <class T>
void vector_product(int64_t M, int64_t N, int64_t K, Left<T> a, const T* b, float* c, int64_t ldc,
                    bool add) {
  // Rows [m0, m1) of A, in place or copied, by DEPTH rows of one panel.
  const auto part = [&](int64_t m0, int64_t m1, int64_t k, int64_t n, const T* blocks) {
    const int64_t depth = std::min(DEPTH, K - k);
    const int64_t columns = std::min(WIDTH * L, N - n), vectors = (columns + L - 1) / L;
    const int64_t lanes = columns - (vectors - 1) * L;
    const T* const right = b + n * K + k * vectors * L;
    const bool more = add || k > 0;
    for (int64_t m = m0, height; m < m1; m += height) {
      height = block_height(m1 - m);
      Left<T> left{a.data + m * a.row + k * a.column, a.row, a.column};
      if (blocks) left = {blocks + (m - m0) * depth, 1, height};
      float* to = c + m * ldc + n;
      switch (height) {
        case 1: tile_of<T, 1>(vectors, depth, left, right, to, ldc, more, lanes); break;
        case 2: tile_of<T, 2>(vectors, depth, left, right, to, ldc, more, lanes); break;
        case 3: tile_of<T, 3>(vectors, depth, left, right, to, ldc, more, lanes); break;
        case 4: tile_of<T, 4>(vectors, depth, left, right, to, ldc, more, lanes); break;
        case 5: tile_of<T, 5>(vectors, depth, left, right, to, ldc, more, lanes); break;
        case 6: tile_of<T, 6>(vectors, depth, left, right, to, ldc, more, lanes); break;
      }
    }
  };
  const bool copied = a.column != 1 && N > WIDTH * L;
  if (!copied && M * K * int64_t(sizeof(T)) <= LEFT_CACHED) {
    // Few rows: B is read in order, and C stays in the first-level cache.
    for (int64_t n = 0; n < N; n += WIDTH * L) {
      for (int64_t k = 0; k < K; k += DEPTH) part(0, M, k, n, nullptr);
    }
    return;
  }
  for (int64_t m0 = 0, m1; m0 < M; m0 = m1) {
    m1 = copied ? std::min(M, m0 + COPIED * HEIGHT) : M;
    for (int64_t k = 0; k < K; k += DEPTH) {
      const Left<T> rows{a.data + m0 * a.row + k * a.column, a.row, a.column};
      const T* blocks = copied ? copy_blocks(m1 - m0, std::min(DEPTH, K - k), rows) : nullptr;
      for (int64_t n = 0; n < N; n += WIDTH * L) part(m0, m1, k, n, blocks);
    }
  }
}

// Centring while packing: subtract the mean at column f over the rows of each group of w (G, F),
// unless `means` (gates, F) is null. `hidden` is the rows of a gate.
struct Center {
  const float* means;
  int64_t hidden, features;
  bool transposed;  // whether the packed matrix is w transposed
  const float* of(int64_t row) const { return means + row / hidden * features; }
};

// Pack rows [k, k + rows) of columns [n, n + columns), at most L of each. `whole`: L of both, with
// contiguous columns.
inline void pack_columns(const float* from, int64_t row, int64_t column, int64_t rows,
                         int64_t columns, bool whole, const Center& center, int64_t n, int64_t k,
                         float* to, int64_t wide) {
  if (whole) {
    vec block[L];
#pragma GCC unroll 16
    for (int64_t j = 0; j < L; j++) {
      block[j] = load(from + j * column);
      if (center.means) block[j] -= load(center.of(n + j) + k);
    }
    transpose(block);
#pragma GCC unroll 16
    for (int64_t i = 0; i < L; i++) store(to + i * wide, block[i]);
    return;
  }
  for (int64_t j = 0; j < L; j++) {
    const float* means = center.means ? center.of(n + std::min(j, columns - 1)) + k : nullptr;
    for (int64_t i = 0; i < rows; i++) {
      const float a = j < columns ? from[i * row + j * column] : 0.0f;
      to[i * wide + j] = means && j < columns ? a - means[i] : a;
    }
  }
}

// Pack columns [n, n + columns) of a strided matrix, which start at `from`.
template <class T>
void pack_panel(const T* from, int64_t row, int64_t column, int64_t K, int64_t n, int64_t columns,
                T* to, const Center& center) {
  constexpr int64_t per = Factors<T>::PER_LANE;
  const int64_t wide = (columns + L - 1) / L * L;
  // With a single feature both strides are 1, so they do not tell rows from columns.
  const bool by_rows = column == 1 && !(center.means && center.transposed);
  // Contiguous columns: a cache line of every column at a time.
  for (int64_t k0 = 0; k0 < K; k0 += 16) {
    const int64_t k1 = std::min(padded<T>(K), k0 + 16);
    if constexpr (per == 1) {
      for (int64_t k = k0; by_rows && k < k1; k++) {
        const float* means = center.means ? center.of(k) + n : nullptr;
        for_units(columns, [&](int64_t j, auto block) {
          const vec a = block.read(from + k * row + j);
          store(to + k * wide + j, means ? block.keep(a - block.read(means + j)) : a);
        });
      }
      for (int64_t j = 0; !by_rows && j < wide; j += L) {
        for (int64_t k = k0; k < k1; k += L) {
          const bool whole = row == 1 && k + L <= k1 && j + L <= columns;
          pack_columns(from + j * column + k * row, row, column, std::min(L, k1 - k),
                       std::min(L, columns - j), whole, center, n + j, k, to + k * wide + j, wide);
        }
      }
    } else {
      for (int64_t j = 0; j < wide; j++) {
        for (int64_t k = k0; k < k1; k++) {
          const bool inside = j < columns && k < K;
          to[k / per * per * wide + j * per + k % per] = inside ? from[k * row + j * column] : T(0);
        }
      }
    }
  }
}

// Pack a strided (K, N); threads split the panels.
template <class T>
void pack(const T* from, int64_t row, int64_t column, int64_t K, int64_t N, T* to, int64_t threads,
          const Center& center) {
  const int64_t panels = (N + WIDTH * L - 1) / (WIDTH * L);
  threads = threads_for(threads, std::min(panels, K * N / 65536 + 1));
  in_parallel(threads, [&](int64_t i) {
    for (int64_t p = panels * i / threads; p < panels * (i + 1) / threads; p++) {
      const int64_t n = p * WIDTH * L, columns = std::min(WIDTH * L, N - n);
      pack_panel(from + n * column, row, column, K, n, columns, to + n * padded<T>(K), center);
    }
  });
}

}  // namespace
