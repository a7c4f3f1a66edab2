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

inline bool finite(vec a) {
#ifdef __AVX512F__
  return !_mm512_cmp_ps_mask((__m512)(a - a), _mm512_setzero_ps(), _CMP_NEQ_UQ);
#else
  return total(a - a) == 0.0f;
#endif
}

// PAIRS factors rounded to bfloat16, from two vectors.
#ifdef __AVX512BF16__
struct Halves {
  __m512i both;
  Halves() = default;
  Halves(vec a, vec b) : both((__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)) {}
  static __m512i lanes(__m256i half) { return _mm512_cvtepu16_epi32(half); }
  __m512i even() const { return lanes(_mm512_castsi512_si256(both)); }
  __m512i odd() const { return lanes(_mm512_extracti64x4_epi64(both, 1)); }
  vec first() const { return (vec)_mm512_slli_epi32(even(), 16); }
  vec second() const { return (vec)_mm512_slli_epi32(odd(), 16); }
  void write(bfloat* to) const { _mm512_store_si512(to, both); }
  // One of the first vector and one of the second in turn.
  void write_pairs(bfloat* to) const {
    _mm512_store_si512(to, _mm512_or_si512(even(), _mm512_slli_epi32(odd(), 16)));
  }
};
#else
struct Halves {
  bfloat both[PAIRS];
  Halves() = default;
  Halves(vec a, vec b) {
    for (int64_t i = 0; i < TILE; i++) both[i] = narrow(a[i]), both[TILE + i] = narrow(b[i]);
  }
  vec first() const { return widen(both); }
  vec second() const { return widen(both + TILE); }
  void write(bfloat* to) const { std::memcpy(to, both, sizeof both); }
  void write_pairs(bfloat* to) const {
    for (int64_t i = 0; i < PAIRS; i++) to[i] = both[i / 2 + i % 2 * TILE];
  }
};
#endif

// Split PAIRS factors into parts; invalid (not finite) for infinity.
inline void split(vec a, vec b, Halves* parts) {
  for (int64_t p = 0; p < PARTS; p++) {
    parts[p] = Halves(a, b);
    a -= parts[p].first(), b -= parts[p].second();
  }
}

// The same, but infinity and NaN are kept as a part. `parts` has room for one more.
inline void split_all(vec a, vec b, Halves* parts) {
  split(a, b, parts);
  if (finite(parts[2].first() + parts[2].second())) return;
  const auto whole = [](vec c) {  // towards zero, so that it does not overflow
    const ivec bits = c == c ? (ivec)c : int32_t(0x7fc00000) + ivec{};
    return (vec)(bits & int32_t(0xffff0000));
  };
  const auto rest = [](vec c) {
    const vec zero{};
    return c - c == zero ? c : zero;
  };
  const vec whole_a = whole(a), whole_b = whole(b);
  parts[0] = Halves(whole_a, whole_b);
  split(rest(a - whole_a), rest(b - whole_b), parts + 1);
}

// Split rows of the left operand (M, K), by blocks of one or two tiles of `height` rows.
void split_left(int64_t M, int64_t K, Left<float> a, int64_t block_rows, int64_t height,
                bfloat* to) {
  const auto write = [](vec first, vec second, bfloat* to) {
    Halves parts[PARTS];
    split(first, second, parts);
    for (int64_t p = 0; p < PARTS; p++) parts[p].write(to + 2 * p * TILE_SIZE);
  };
  for (int64_t m = 0; m < M; m += block_rows) {
    for (int64_t k = 0; k < K; k += PAIRS, to += STEP) {
      for (int64_t row = m; row < std::min(M, m + block_rows); row += height) {
        const int64_t rows = std::min(height, M - row), columns = std::min(PAIRS, K - k);
        const float* const from = a.data + row * a.row + k * a.column;
        bfloat* const tile = to + (row - m) / height * TILE_SIZE;
        if (a.column == 1 && columns == PAIRS) {
          for (int64_t j = 0; j < rows; j++) {
            const float* at = from + j * a.row;
            write(load(at), load(at + TILE), tile + j * PAIRS);
          }
          continue;
        }
        vec block[2][TILE];
        for (int64_t half = 0; half < 2; half++) {
          const int64_t width = std::min(TILE, columns - half * TILE);
          const auto read = [&](int64_t j, int64_t count, int64_t apart, int64_t wide) {
            const float* at = from + half * TILE * a.column + j * apart;
            if (j >= count || wide <= 0) return vec{};
            return wide == TILE ? load(at) : Rest(wide).read(at);
          };
          for (int64_t j = 0; j < TILE; j++) {
            block[half][j] =
                a.column == 1 ? read(j, rows, a.row, width) : read(j, width, a.column, rows);
          }
          if (a.column != 1) transpose(block[half]);
        }
        for (int64_t j = 0; j < rows; j++) write(block[0][j], block[1][j], tile + j * PAIRS);
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
          Halves parts[PARTS + 1];
          split_all(rows[j], rows[j + 1], parts);
          bfloat* const tile = to + t * TILE_SIZE + j / 2 * PAIRS;
          for (int64_t p = 0; p < PARTS; p++) parts[p].write_pairs(tile + 2 * p * TILE_SIZE);
        }
      }
    }
  });
}

// One row of a block of sums, from unsplit factors.
void exact_row(int64_t K, const float* a, int64_t column, const bfloat* right, float* sums) {
  std::fill(sums, sums + BLOCK, 0.0f);
  for (int64_t k = 0; k < K; k++) {
    const float factor = a[k * column];
    if (std::isnan(factor)) {  // all rows of a diverged run
      std::fill(sums, sums + BLOCK, factor);
      return;
    }
    const bfloat* step = right + k / PAIRS * STEP;
    for (int64_t j = 0; j < BLOCK; j++) {
      float b = 0.0f;
      for (int64_t p = PARTS; p-- > 0;) {  // the first two alone may overflow
        float part;
        const int64_t row = k % PAIRS / 2 * PAIRS + j % TILE * 2 + k % 2;
        widen(step + (2 * p + j / TILE) * TILE_SIZE + row, 1, &part);
        b += part;
      }
      sums[j] += factor * b;
    }
  }
}

// A block of sums of ROWS tiles of `height` rows by two. `meanwhile` is called at each step of 32
// factors, to overlap with the tiles.
template <int ROWS, class Body>
void block_of_sums(int64_t steps, const bfloat* left, const bfloat* right, int64_t height,
                   float* sums, Body meanwhile) {
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
    rows(1), multiply();
    columns(1), multiply();
    rows(0), multiply();
    columns(2), multiply();
    columns(0), multiply();
    meanwhile(k);
  }
  U::store<0>(sums, SUM_BYTES), U::store<1>(sums + TILE, SUM_BYTES);
  if constexpr (ROWS == 2) {
    sums += height * BLOCK;
    U::store<2>(sums, SUM_BYTES), U::store<3>(sums + TILE, SUM_BYTES);
  }
}

// A right operand (K, N) packed by `pack_parts`, and its product (M, N) with row stride `ldc`.
struct PartsRight {
  const float* packed;
  int64_t N;
  float* c;
  int64_t ldc;
};

// C (M, N) = A (M, K) B, or C += A B, for each right operand B.
void parts_product(int64_t M, int64_t K, Left<float> a, std::initializer_list<PartsRight> rights,
                   bool add) {
  constexpr int64_t ALIGNED = CACHE_LINE / sizeof(bfloat);
  thread_local std::vector<bfloat> memory(SPLIT_ROWS * SPLIT_COLUMNS * PARTS + ALIGNED);
  bfloat* const split_rows =
      memory.data() + (-(reinterpret_cast<intptr_t>(memory.data()) / 2) & (ALIGNED - 1));
  const int64_t steps = (K + PAIRS - 1) / PAIRS;
  // Double buffer: one block is written to C while tiles compute the other.
  alignas(64) float sums[2][BLOCK * BLOCK];
  struct Block {
    int64_t rows = 0, columns, depth;
    Left<float> left;
    const bfloat* right;
    float *sums, *to;
    int64_t ldc;
    bool add;
  } before;
  const auto write = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      float *sum = before.sums + i * BLOCK, *at = before.to + i * before.ldc;
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
    // Blocks of equal height: all tiles have one form. Rows past the end are computed, not written.
    const int64_t m1 = std::min(M, m0 + SPLIT_ROWS), blocks = (m1 - m0 + BLOCK - 1) / BLOCK;
    const int64_t rows = (m1 - m0 + blocks - 1) / blocks, tall = rows > TILE ? 2 : 1;
    const int64_t height = (rows + tall - 1) / tall, block_rows = tall * height;
    if (formed != height) {
      TileForms forms;
      std::fill(forms.bytes, forms.bytes + 8, 64);
      std::fill(forms.rows, forms.rows + 6, height);
      forms.rows[6] = forms.rows[7] = TILE;
      TileUnit::form(forms);
      formed = height;
    }
    for (int64_t k = 0; k < K; k += SPLIT_COLUMNS) {
      const int64_t depth = std::min(SPLIT_COLUMNS, K - k), here = (depth + PAIRS - 1) / PAIRS;
      const Left<float> rest{a.data + m0 * a.row + k * a.column, a.row, a.column};
      split_left(m1 - m0, depth, rest, block_rows, height, split_rows);
      written();
      for (const PartsRight& right : rights) {
        const bfloat* const b = reinterpret_cast<const bfloat*>(right.packed);
        for (int64_t n = 0; n < right.N; n += BLOCK) {
          const bfloat* left = split_rows;
          for (int64_t m = m0; m < m1; m += block_rows, left += here * STEP) {
            Block now{std::min(block_rows, m1 - m), std::min(BLOCK, right.N - n), depth};
            now.left = {a.data + m * a.row + k * a.column, a.row, a.column};
            now.right = b + (n / BLOCK * steps + k / PAIRS) * STEP;
            now.sums = sums[count++ % 2];
            now.to = right.c + m * right.ldc + n, now.ldc = right.ldc;
            now.add = add || k > 0;
            const auto make = [&](auto tiles) {
              block_of_sums<tiles>(here, left, now.right, height, now.sums, [&](int64_t i) {
                write(before.rows * i / here, before.rows * (i + 1) / here);
              });
            };
            tall == 2 ? make(std::integral_constant<int, 2>())
                      : make(std::integral_constant<int, 1>());
            before = now;
          }
        }
      }
    }
  }
  write(0, before.rows);
  if (formed) TileUnit::release();
}

// Whether parts are faster than vectors for the product of (rows, K) and (K, N). Splitting rows
// that lie in columns takes longer.
bool suits_parts(int64_t rows, int64_t K, int64_t N, bool in_columns) {
  return rows >= 32 && K >= 64 && N >= (in_columns ? 128 : 64) && tiles() == USED;
}

#else

int64_t parts_size(int64_t, int64_t) { return 0; }
void pack_parts(const float*, int64_t, int64_t, int64_t, int64_t, float*, const Center&, int64_t) {}
struct PartsRight {
  const float* packed;
  int64_t N;
  float* c;
  int64_t ldc;
};
void parts_product(int64_t, int64_t, Left<float>, std::initializer_list<PartsRight>, bool) {}
bool suits_parts(int64_t, int64_t, int64_t, bool) { return false; }

#endif

}  // namespace
