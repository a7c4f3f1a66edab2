// float32 products on bfloat16 tiles: a factor is the sum of three bfloat16 with all its 24 bits.
// Of the nine products of parts, three are below 2^-24 of the largest and omitted; the others are
// summed in float32. Errors are as in float32, since tiles round less often than vectors.
//
// Values below 1e-33 lose their last bits, since tiles flush subnormal parts. Sums that are not
// finite are recomputed on vectors, since infinity cannot be split.

#pragma once

#include "amx_products.h"

namespace {

#if TILES

// Elements of a tile; rows and columns of a block of sums; parts of a factor.
constexpr int64_t PAIRS = 2 * TILE, TILE_SIZE = TILE * PAIRS, BLOCK = 2 * TILE, PARTS = 3;
// Elements of PAIRS rows of a block of one operand: two tiles per part.
constexpr int64_t STEP = 2 * PARTS * TILE_SIZE;
// Rows and columns of the left operand that are split at a time: 384 KiB.
constexpr int64_t SPLIT_ROWS = 128, SPLIT_COLUMNS = 512;

// Round to bfloat16, as floats.
inline vec rounded(vec a) {
#ifdef __AVX512BF16__
  const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)a);
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
  vec found{};
  for (int64_t i = 0; i < L; i++) {
    const bfloat half = narrow(a[i]);
    widen(&half, 1, &found[i]);
  }
  return found;
#endif
}

// Split L factors into parts, floats with zero lower halves; invalid (not finite) for infinity.
inline void split(vec a, vec* parts) {
  for (int64_t p = 0; p < PARTS; p++) a -= parts[p] = rounded(a);
}

inline bool finite(vec a) {
#ifdef __AVX512F__
  return !_mm512_cmp_ps_mask((__m512)(a - a), _mm512_setzero_ps(), _CMP_NEQ_UQ);
#else
  return total(a - a) == 0.0f;
#endif
}

// The same, but infinity and NaN are kept as a part.
inline void split_all(vec a, vec* parts) {
  split(a, parts);
  if (finite(parts[2])) return;
  const vec zero{};
  const ivec whole = a == a ? (ivec)a : int32_t(0x7fc00000) + ivec{};
  parts[0] = (vec)(whole & int32_t(0xffff0000));  // towards zero, so that it does not overflow
  const vec rest = a - parts[0];
  split(rest - rest == zero ? rest : zero, parts + 1);
}

// Split rows of the left operand (M, K), by blocks of rows.
void split_left(int64_t M, int64_t K, Left<float> a, bfloat* to) {
  typedef int16_t halves __attribute__((vector_size(2 * LANES)));
  for (int64_t m = 0; m < M; m += BLOCK) {
    for (int64_t k = 0; k < K; k += PAIRS, to += STEP) {
      for (int64_t i = 0; i < 4; i++) {
        const int64_t row = m + i / 2 * TILE, column = k + i % 2 * TILE;
        const int64_t rows = std::min(TILE, M - row), columns = std::min(TILE, K - column);
        if (rows <= 0) continue;
        const float* from = a.data + row * a.row + column * a.column;
        const auto read = [&](int64_t at, int64_t count, int64_t apart, int64_t width) {
          if (at >= count || width <= 0) return vec{};
          return width >= TILE ? load(from + at * apart) : Rest(width).read(from + at * apart);
        };
        vec block[TILE];
        for (int64_t j = 0; j < TILE; j++) {
          block[j] = a.column == 1 ? read(j, rows, a.row, columns) : read(j, columns, a.column, rows);
        }
        if (a.column != 1) transpose(block);
        for (int64_t j = 0; j < rows; j++) {
          vec parts[PARTS];
          split(block[j], parts);
          for (int64_t p = 0; p < PARTS; p++) {
            const halves part = __builtin_convertvector((ivec)parts[p] >> 16, halves);
            bfloat* tile = to + (2 * p + i / 2) * TILE_SIZE;
            std::memcpy(tile + j * PAIRS + i % 2 * TILE, &part, sizeof part);
          }
        }
      }
    }
  }
}

// Size of the parts of a (K, N), in floats.
int64_t parts_size(int64_t K, int64_t N) {
  return (N + BLOCK - 1) / BLOCK * ((K + PAIRS - 1) / PAIRS) * STEP / 2;
}

// Pack the parts of a (K, N) with contiguous rows or columns; columns may be centred.
void pack_parts(const float* b, int64_t row, int64_t column, int64_t K, int64_t N, float* packed,
                const Center& center, int64_t threads) {
  const int64_t steps = (K + PAIRS - 1) / PAIRS, blocks = (N + BLOCK - 1) / BLOCK;
  const bool by_rows = column == 1 && !center.means;
  threads = threads_for(threads, std::min(blocks, K * N / 65536 + 1));
  in_parallel(threads, [&](int64_t thread) {
    const int64_t first = blocks * thread / threads, last = blocks * (thread + 1) / threads;
    bfloat* to = reinterpret_cast<bfloat*>(packed) + first * steps * STEP;
    for (int64_t i = first * steps; i < last * steps; i++, to += STEP) {
      for (int64_t t = 0; t < 2; t++) {
        const int64_t n = i / steps * BLOCK + t * TILE, k = i % steps * PAIRS;
        const int64_t columns = std::min(TILE, N - n), depth = std::min(PAIRS, K - k);
        vec rows[PAIRS] = {};  // of the tile's columns
        if (columns <= 0) {
        } else if (by_rows) {
          for (int64_t j = 0; j < depth; j++) rows[j] = Rest(columns).read(b + (k + j) * row + n);
        } else {
          for (int64_t half = 0; half < depth; half += TILE) {
            const Rest block(std::min(TILE, depth - half));
            for (int64_t j = 0; j < columns; j++) {
              const int64_t from = k + half;
              rows[half + j] = block.read(b + from * row + (n + j) * column);
              if (center.means) rows[half + j] -= block.read(center.of(n + j) + from);
            }
            transpose(rows + half);
          }
        }
        for (int64_t j = 0; j < PAIRS; j += 2) {
          vec even[PARTS + 1], odd[PARTS + 1];  // one more for `split_all`
          split_all(rows[j], even), split_all(rows[j + 1], odd);
          for (int64_t p = 0; p < PARTS; p++) {
            const ivec pair = (ivec)odd[p] | ((ivec)even[p] >> 16 & 0xffff);
            std::memcpy(to + (2 * p + t) * TILE_SIZE + j / 2 * PAIRS, &pair, sizeof pair);
          }
        }
      }
    }
  });
}

// One row of a block of sums on vectors, from unsplit factors.
void exact_row(int64_t K, const float* a, int64_t column, const bfloat* right, float* sums) {
  std::fill(sums, sums + BLOCK, 0.0f);
  for (int64_t k = 0; k < K; k++) {
    const bfloat* step = right + k / PAIRS * STEP;
    for (int64_t j = 0; j < BLOCK; j++) {
      float b = 0.0f;
      for (int64_t p = PARTS; p-- > 0;) {  // the first two alone may overflow
        float part;
        const int64_t row = k % PAIRS / 2 * PAIRS + j % TILE * 2 + k % 2;
        widen(step + (2 * p + j / TILE) * TILE_SIZE + row, 1, &part);
        b += part;
      }
      sums[j] += a[k * column] * b;
    }
  }
}

// A block of sums of ROWS tiles by two. `meanwhile` is called at each step of 32 factors, to
// overlap with the tiles.
template <int ROWS, class Body>
void block_of_sums(int64_t steps, const bfloat* left, const bfloat* right, float* sums,
                   Body meanwhile) {
  using U = TileUnit;
  constexpr int64_t APART = 2 * TILE_SIZE, BYTES = 2 * PAIRS, SUM_BYTES = 4 * BLOCK;
  U::zero<0>(), U::zero<1>(), U::zero<2>(), U::zero<3>();
  const auto rows = [&](int64_t part) {
    U::load<4>(left + part * APART, BYTES);
    if constexpr (ROWS == 2) U::load<5>(left + part * APART + TILE_SIZE, BYTES);
  };
  const auto columns = [&](int64_t part) {
    U::load<6>(right + part * APART, BYTES);
    U::load<7>(right + part * APART + TILE_SIZE, BYTES);
  };
  const auto multiply = [] {
    U::multiply<0, 4, 6>(), U::multiply<1, 4, 7>();
    if constexpr (ROWS == 2) U::multiply<2, 5, 6>(), U::multiply<3, 5, 7>();
  };
  for (int64_t k = 0; k < steps; k++, left += STEP, right += STEP) {
    rows(2), columns(0), multiply();
    rows(0), columns(2), multiply();
    columns(1), multiply();
    rows(1), multiply();
    columns(0), multiply();
    rows(0), multiply();
    meanwhile(k);
  }
  U::store<0>(sums, SUM_BYTES), U::store<1>(sums + TILE, SUM_BYTES);
  if constexpr (ROWS == 2) {
    U::store<2>(sums + TILE * BLOCK, SUM_BYTES), U::store<3>(sums + TILE * BLOCK + TILE, SUM_BYTES);
  }
}

// C (M, N) = A (M, K) B, or C += A B, for B packed by `pack_parts`.
void parts_product(int64_t M, int64_t N, int64_t K, Left<float> a, const float* packed, float* c,
                   int64_t ldc, bool add) {
  constexpr int64_t ALIGNED = CACHE_LINE / sizeof(bfloat);
  thread_local std::vector<bfloat> memory(SPLIT_ROWS * SPLIT_COLUMNS * PARTS + ALIGNED);
  bfloat* const split_rows =
      memory.data() + (-(reinterpret_cast<intptr_t>(memory.data()) / 2) & (ALIGNED - 1));
  const bfloat* const b = reinterpret_cast<const bfloat*>(packed);
  const int64_t steps = (K + PAIRS - 1) / PAIRS;
  // Double buffer: one block is written to C while tiles compute the other.
  alignas(64) float sums[2][BLOCK * BLOCK];
  struct Block {
    int64_t rows = 0, columns, depth;
    Left<float> left;
    const bfloat* right;
    float *sums, *to;
    bool add;
  } before;
  const auto write = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      float *sum = before.sums + i * BLOCK, *at = before.to + i * ldc;
      if (!finite(load(sum) + load(sum + TILE))) {
        exact_row(before.depth, before.left.data + i * before.left.row, before.left.column,
                  before.right, sum);
      }
      for_units(before.columns, [&](int64_t j, auto block) {
        const vec found = block.read(sum + j);
        block.write(at + j, before.add ? block.read(at + j) + found : found);
      });
    }
  };
  int64_t formed = 0, count = 0;
  for (int64_t m0 = 0; m0 < M; m0 += SPLIT_ROWS) {
    const int64_t m1 = std::min(M, m0 + SPLIT_ROWS);
    for (int64_t k = 0; k < K; k += SPLIT_COLUMNS) {
      const int64_t depth = std::min(SPLIT_COLUMNS, K - k), here = (depth + PAIRS - 1) / PAIRS;
      const Left<float> rest{a.data + m0 * a.row + k * a.column, a.row, a.column};
      split_left(m1 - m0, depth, rest, split_rows);
      written();
      for (int64_t n = 0; n < N; n += BLOCK) {
        for (int64_t m = m0; m < m1; m += BLOCK) {
          Block now{std::min(BLOCK, m1 - m), std::min(BLOCK, N - n), depth};
          if (formed != now.rows) {
            TileForms forms;
            std::fill(forms.bytes, forms.bytes + 8, 64);
            std::fill(forms.rows, forms.rows + 8, TILE);
            forms.rows[0] = forms.rows[1] = forms.rows[4] = std::min(now.rows, TILE);
            // Unused tiles need a valid form as well.
            forms.rows[2] = forms.rows[3] = forms.rows[5] = std::max(now.rows - TILE, int64_t(1));
            TileUnit::form(forms);
            formed = now.rows;
          }
          now.left = {a.data + m * a.row + k * a.column, a.row, a.column};
          now.right = b + (n / BLOCK * steps + k / PAIRS) * STEP;
          now.sums = sums[count++ % 2], now.to = c + m * ldc + n, now.add = add || k > 0;
          const auto make = [&](auto rows) {
            block_of_sums<rows>(here, split_rows + (m - m0) / BLOCK * here * STEP, now.right,
                                now.sums, [&](int64_t i) {
                                  write(before.rows * i / here, before.rows * (i + 1) / here);
                                });
          };
          now.rows > TILE ? make(std::integral_constant<int, 2>())
                          : make(std::integral_constant<int, 1>());
          before = now;
        }
      }
    }
  }
  write(0, before.rows);
  if (formed) TileUnit::release();
}

// Whether parts are faster than vectors for the product of (rows, K) and (K, N).
bool suits_parts(int64_t rows, int64_t K, int64_t N) {
  return rows >= 32 && K >= 128 && N >= 128 && tiles() == USED;
}

#else

int64_t parts_size(int64_t, int64_t) { return 0; }
void pack_parts(const float*, int64_t, int64_t, int64_t, int64_t, float*, const Center&, int64_t) {}
void parts_product(int64_t, int64_t, int64_t, Left<float>, const float*, float*, int64_t, bool) {}
bool suits_parts(int64_t, int64_t, int64_t) { return false; }

#endif

}  // namespace
