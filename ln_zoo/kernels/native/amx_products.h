// bfloat16 products on AMX tiles: eight registers of 16 rows of 64 bytes, and an instruction that
// accumulates the product of two tiles of bfloat16 pairs in a float tile. Used if the compiler and
// the processor support tiles, Linux grants them, and a test product agrees with vectors.

#pragma once

#include "products.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(LN_ZOO_EMULATED_TILES)
#define TILES 1
#else
#define TILES 0
#endif

namespace {

// Whether tiles are used, or why not.
enum Tiles : int64_t { USED, NOT_COMPILED, NOT_THERE, REFUSED, WRONG };

#if TILES

// Size of a tile: rows, bfloat16 pairs per row of a factor, floats per row of sums.
constexpr int64_t TILE = 16;

// Operand of LDTILECFG (Intel 64 and IA-32 Architectures Software Developer's Manual).
struct alignas(64) TileForms {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

#ifdef LN_ZOO_EMULATED_TILES

// Emulation of the instructions (same manual, TDPBF16PS), for tests on any processor.
struct TileUnit {
  struct State {
    TileForms forms;
    alignas(64) uint8_t tiles[8][TILE][64];
  };
  static State& state() {
    thread_local State found;
    return found;
  }
  static void form(const TileForms& forms) {
    state() = State{};
    state().forms = forms;
  }
  static void release() { form(TileForms{}); }

  template <int I>
  static void zero() {
    std::memset(state().tiles[I], 0, sizeof state().tiles[I]);
  }
  template <int I>
  static void load(const void* from, int64_t stride) {
    zero<I>();
    for (int64_t i = 0; i < state().forms.rows[I]; i++) {
      std::memcpy(state().tiles[I][i], static_cast<const char*>(from) + i * stride,
                  state().forms.bytes[I]);
    }
  }
  template <int I>
  static void store(void* to, int64_t stride) {
    for (int64_t i = 0; i < state().forms.rows[I]; i++) {
      std::memcpy(static_cast<char*>(to) + i * stride, state().tiles[I][i], state().forms.bytes[I]);
    }
  }
  // Subnormal factors and results are flushed to zero.
  static float flushed(float a) {
    return std::fabs(a) < 1.17549435e-38f ? std::copysign(0.0f, a) : a;
  }
  static float widened(const uint8_t* row, int64_t i) {
    bfloat half;
    std::memcpy(&half, row + 2 * i, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float a;
    std::memcpy(&a, &bits, 4);
    return flushed(a);
  }
  template <int SUM, int LEFT, int RIGHT>
  static void multiply() {
    State& s = state();
    for (int64_t m = 0; m < s.forms.rows[SUM]; m++) {
      for (int64_t n = 0; n < s.forms.bytes[SUM] / 4; n++) {
        float even = 0.0f, odd = 0.0f, sum;
        for (int64_t k = 0; k < s.forms.bytes[LEFT] / 4; k++) {
          const uint8_t *left = s.tiles[LEFT][m], *right = s.tiles[RIGHT][k];
          even = flushed(std::fma(widened(left, 2 * k), widened(right, 2 * n), even));
          odd = flushed(std::fma(widened(left, 2 * k + 1), widened(right, 2 * n + 1), odd));
        }
        std::memcpy(&sum, s.tiles[SUM][m] + 4 * n, 4);
        sum = flushed(flushed(sum) + flushed(even + odd));
        std::memcpy(s.tiles[SUM][m] + 4 * n, &sum, 4);
      }
    }
  }
  static Tiles trouble() { return USED; }
};

#else

// The instructions; tile numbers are immediate operands, which GCC requires as literals.
struct TileUnit {
  // Compiler barrier: GCC does not know that these instructions read memory.
  static void written() { asm volatile("" ::: "memory"); }
  static void form(const TileForms& forms) {
    asm volatile("" : : "r"(&forms) : "memory");
    _tile_loadconfig(&forms);
  }
  static void release() { _tile_release(); }

#define LN_ZOO_TILES(CASE) CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
  template <int I>
  static void zero() {
#define LN_ZOO_CASE(i) \
  if constexpr (I == i) _tile_zero(i);
    LN_ZOO_TILES(LN_ZOO_CASE)
#undef LN_ZOO_CASE
  }
  template <int I>
  static void load(const void* from, int64_t stride) {
#define LN_ZOO_CASE(i) \
  if constexpr (I == i) _tile_loadd(i, from, stride);
    LN_ZOO_TILES(LN_ZOO_CASE)
#undef LN_ZOO_CASE
  }
  template <int I>
  static void store(void* to, int64_t stride) {
#define LN_ZOO_CASE(i) \
  if constexpr (I == i) _tile_stored(i, to, stride);
    LN_ZOO_TILES(LN_ZOO_CASE)
#undef LN_ZOO_CASE
  }
#undef LN_ZOO_TILES
  template <int SUM, int LEFT, int RIGHT>
  static void multiply() {
    static_assert(SUM == 2 * (LEFT - 4) + RIGHT - 6);
    if constexpr (SUM == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (SUM == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (SUM == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (SUM == 3) _tile_dpbf16ps(3, 5, 7);
  }

  // Request permission from Linux.
  static Tiles trouble() {
    constexpr unsigned BF16 = 1u << 22, TILE_UNIT = 1u << 24, SAVED = 1u << 27;
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & SAVED)) return NOT_THERE;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return NOT_THERE;
    if (!(d & BF16) || !(d & TILE_UNIT)) return NOT_THERE;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) ? REFUSED : USED;
  }
};

#endif

#ifdef LN_ZOO_EMULATED_TILES
inline void written() {}
#else
inline void written() { TileUnit::written(); }
#endif

// The remainder of K after whole tiles, zero-padded.
struct alignas(64) TileRests {
  bfloat left[2 * TILE][2 * TILE];
  bfloat right[TILE][2 * TILE * 2];
};

// ROWS by COLUMNS tiles of sums. Tiles 0 to 3 are sums, 4 and 5 the left operand, 6 and 7 the right
// one; strides of rows are in bytes.
template <int ROWS, int COLUMNS>
void tiles_of_sums(int64_t steps, bool rest, const bfloat* left, int64_t stride_left,
                   const bfloat* right, int64_t stride, const TileRests& rests, float* c,
                   int64_t ldc, bool add) {
  using U = TileUnit;
  const int64_t bytes = 4 * ldc;
  float* const c1 = c + TILE * ldc;
  if (add) {
    U::load<0>(c, bytes);
    if constexpr (COLUMNS == 2) U::load<1>(c + TILE, bytes);
    if constexpr (ROWS == 2) U::load<2>(c1, bytes);
    if constexpr (ROWS == 2 && COLUMNS == 2) U::load<3>(c1 + TILE, bytes);
  } else {
    U::zero<0>(), U::zero<1>(), U::zero<2>(), U::zero<3>();
  }
  const auto multiply = [](const bfloat* a, int64_t a_stride, const bfloat* b, int64_t b_stride) {
    U::load<6>(b, b_stride);
    U::load<4>(a, a_stride);
    U::multiply<0, 4, 6>();
    if constexpr (COLUMNS == 2) {
      U::load<7>(b + 2 * TILE, b_stride);
      U::multiply<1, 4, 7>();
    }
    if constexpr (ROWS == 2) {
      U::load<5>(a + TILE * a_stride / 2, a_stride);
      U::multiply<2, 5, 6>();
    }
    if constexpr (ROWS == 2 && COLUMNS == 2) U::multiply<3, 5, 7>();
  };
  for (int64_t k = 0; k < steps; k++, left += 2 * TILE, right += TILE * stride / 2) {
    multiply(left, stride_left, right, stride);
  }
  if (rest) {
    multiply(rests.left[0], sizeof rests.left[0], rests.right[0], sizeof rests.right[0]);
  }
  U::store<0>(c, bytes);
  if constexpr (COLUMNS == 2) U::store<1>(c + TILE, bytes);
  if constexpr (ROWS == 2) U::store<2>(c1, bytes);
  if constexpr (ROWS == 2 && COLUMNS == 2) U::store<3>(c1 + TILE, bytes);
}

// Tiles of sums for some rows and `columns` columns of the result.
template <int ROWS>
void tiles_of_rows(int64_t rows, int64_t columns, int64_t steps, bool rest, const bfloat* left,
                   int64_t stride_left, const bfloat* right, int64_t stride, const TileRests& rests,
                   float* c, int64_t ldc, bool add) {
  if (columns == 2 * TILE) {
    tiles_of_sums<ROWS, 2>(steps, rest, left, stride_left, right, stride, rests, c, ldc, add);
  } else if (columns == TILE) {
    tiles_of_sums<ROWS, 1>(steps, rest, left, stride_left, right, stride, rests, c, ldc, add);
  } else {
    alignas(64) float sums[2 * TILE][2 * TILE];
    const auto make = columns > TILE ? tiles_of_sums<ROWS, 2> : tiles_of_sums<ROWS, 1>;
    make(steps, rest, left, stride_left, right, stride, rests, sums[0], 2 * TILE, false);
    for (int64_t i = 0; i < rows; i++) {
      for (int64_t j = 0; j < columns; j++) {
        c[i * ldc + j] = add ? c[i * ldc + j] + sums[i][j] : sums[i][j];
      }
    }
  }
}

// As `vector_product`.
void tile_product(int64_t M, int64_t N, int64_t K, Left<bfloat> a, const bfloat* b, float* c,
                  int64_t ldc, bool add) {
  constexpr int64_t PANEL = WIDTH * L, AT_ONCE = 2 * TILE;
  static_assert(L == TILE, "columns of packed matrices must be whole tiles");
  TileRests rests;
  int64_t formed = 0;
  for (int64_t n = 0; n < N; n += PANEL) {
    const int64_t columns = std::min(PANEL, N - n), wide = (columns + L - 1) / L * L;
    for (int64_t k = 0; k < K; k += DEPTH) {
      const int64_t depth = std::min(DEPTH, K - k), steps = depth / AT_ONCE;
      const int64_t rest = depth - steps * AT_ONCE;
      const bfloat* right = b + n * K + k * wide;
      for (int64_t m = 0; m < M; m += 2 * TILE) {
        const int64_t rows = std::min(2 * TILE, M - m), first = std::min(TILE, rows);
        const bfloat* left = a.data + m * a.row + k;
        if (formed != rows) {
          TileForms forms;
          std::fill(forms.bytes, forms.bytes + 8, 64);
          std::fill(forms.rows, forms.rows + 8, TILE);
          forms.rows[0] = forms.rows[1] = forms.rows[4] = first;
          // Unused tiles need a valid form as well.
          forms.rows[2] = forms.rows[3] = forms.rows[5] = std::max(rows - TILE, int64_t(1));
          TileUnit::form(forms);
          formed = rows;
        }
        for (int64_t i = 0; rest && i < rows; i++) {
          std::memset(rests.left[i], 0, sizeof rests.left[i]);
          std::memcpy(rests.left[i], left + i * a.row + steps * AT_ONCE, 2 * rest);
        }
        for (int64_t j = 0; j < columns; j += AT_ONCE) {
          const bfloat* at = right + 2 * j;
          const int64_t there = std::min(AT_ONCE, wide - j);
          if (rest) {
            std::memset(rests.right, 0, sizeof rests.right);
            for (int64_t i = 0; i < rest / 2; i++) {
              std::memcpy(rests.right[i], at + (steps * AT_ONCE / 2 + i) * 2 * wide, 4 * there);
            }
          }
          written();
          const auto make = rows > TILE ? tiles_of_rows<2> : tiles_of_rows<1>;
          make(rows, std::min(AT_ONCE, columns - j), steps, rest > 0, left, 2 * a.row, at, 4 * wide,
               rests, c + m * ldc + n + j, ldc, add || k > 0);
        }
      }
    }
  }
  if (formed) TileUnit::release();
}

// Whether a product of odd sizes agrees on tiles and on vectors up to rounding.
bool tiles_agree() {
  constexpr int64_t M = 37, N = 75, K = 78;
  std::vector<bfloat> left(M * K), right(K * N), packed(K * (N + L));
  uint32_t seed = 1;
  const auto next = [&] {
    seed = seed * 1664525u + 1013904223u;
    return narrow(float(int32_t(seed)) / 2147483648.0f);
  };
  std::generate(left.begin(), left.end(), next), std::generate(right.begin(), right.end(), next);
  for (int64_t n = 0; n < N; n += WIDTH * L) {
    pack_panel(right.data() + n, N, int64_t(1), K, n, std::min(WIDTH * L, N - n),
               packed.data() + n * K, Center{});
  }
  std::vector<float> tiles(M * N, 1.0f), vectors(M * N, 1.0f);
  const Left<bfloat> a{left.data(), K, 1};
  tile_product(M, N, K, a, packed.data(), tiles.data(), N, true);
  vector_product(M, N, K, a, packed.data(), vectors.data(), N, true);
  for (int64_t i = 0; i < M * N; i++) {
    // Also false for NaN.
    if (!(std::fabs(tiles[i] - vectors[i]) < 1e-4f)) return false;
  }
  return true;
}

Tiles tiles() {
  static const Tiles found = [] {
    const Tiles trouble = TileUnit::trouble();
    return trouble == USED && !tiles_agree() ? WRONG : trouble;
  }();
  return found;
}

#else

Tiles tiles() { return NOT_COMPILED; }

#endif

// C (M, N) = A (M, K) B, or C += A B; B packed, K whole lanes.
template <class T>
void product(int64_t M, int64_t N, int64_t K, Left<T> a, const T* b, float* c, int64_t ldc,
             bool add) {
#if TILES
  if constexpr (sizeof(T) == 2) {
    if (tiles() == USED) return tile_product(M, N, K, a, b, c, ldc, add);
  }
#endif
  vector_product(M, N, K, a, b, c, ldc, add);
}

}  // namespace

extern "C" {

// Whether products of bfloat16 use tiles, or why not (see Tiles).
int64_t ln_zoo_tiles() { return tiles(); }

}  // extern "C"
