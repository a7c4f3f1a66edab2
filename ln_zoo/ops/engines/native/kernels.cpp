// Normalised recurrent layers on a CPU: matrix products and the steps of LSTM, GRU and RNN, and the
// glimpses of DRAW.
//
// Plain C++17 with the vector extensions of GCC and Clang; nothing here knows of torch. The caller
// (steps.py) owns every buffer. All matrices are row-major, "packed" ones as `pack` lays them out;
// what matrix products read and write is float32 or bfloat16, all else float32. Letters: N
// examples, H hidden units, G = gates * H; step t has sizes[t] rows, its examples being the first
// sizes[t] of N, and sizes never grow.
//
// Threads share the examples, never a step: a thread takes its examples through all steps of a call
// without meeting the others. Weights of centred normalisations arrive centred, so that the
// products have mean zero and a norm needs their mean square alone. Arithmetic keeps NaN and
// infinity.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

// Vectors

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
constexpr int64_t L = LANES;

inline vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
inline void store(float* p, vec a) { *reinterpret_cast<unaligned_vec*>(p) = a; }
// A broadcast. `vec{} + a` is another sum: compilers keep its addition, since -0 + 0 is not -0.
inline vec all(float a) {
#if defined(__AVX512F__)
  return (vec)_mm512_set1_ps(a);
#elif defined(__AVX__)
  return (vec)_mm256_set1_ps(a);
#else
  return vec{a, a, a, a};
#endif
}

// Asks for the same place of the next row, which a step reads next.
inline void ahead(const float* p, int64_t row) { __builtin_prefetch(p + row); }

inline float total(vec a) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)a);
#else
  // By halves: added one after the other, lanes would wait for each other.
  for (int64_t half = L / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; i++) a[i] += a[i + half];
  }
  return a[0];
#endif
}

// A block of L units, and the last one of a row, where fewer are left: lanes past the end read
// zero.
struct Whole {
  vec read(const float* p) const { return load(p); }
  void write(float* p, vec a) const { store(p, a); }
  vec keep(vec a) const { return a; }
};

#ifdef __AVX512F__
struct Rest {
  __mmask16 mask;
  explicit Rest(int64_t n) : mask(__mmask16((1u << n) - 1)) {}
  vec read(const float* p) const { return (vec)_mm512_maskz_loadu_ps(mask, p); }
  void write(float* p, vec a) const { _mm512_mask_storeu_ps(p, mask, (__m512)a); }
  vec keep(vec a) const { return (vec)_mm512_maskz_mov_ps(mask, (__m512)a); }
};
#else
struct Rest {
  int64_t n;
  explicit Rest(int64_t n) : n(n) {}
  vec read(const float* p) const {
    vec a{};
    for (int64_t i = 0; i < n; i++) a[i] = p[i];
    return a;
  }
  void write(float* p, vec a) const {
    for (int64_t i = 0; i < n; i++) p[i] = a[i];
  }
  vec keep(vec a) const {
    for (int64_t i = n; i < L; i++) a[i] = 0;
    return a;
  }
};
#endif

template <class Body>
inline void for_units(int64_t n, Body body) {
  int64_t j = 0;
  for (; j + L <= n; j += L) body(j, Whole{});
  if (j < n) body(j, Rest(n - j));
}

inline float sum_of_squares(const float* p, int64_t n) {
  vec a{}, b{}, c{}, d{};
  int64_t j = 0;
  for (; j + 4 * L <= n; j += 4 * L) {
    vec x = load(p + j), y = load(p + j + L), z = load(p + j + 2 * L), w = load(p + j + 3 * L);
    a += x * x;
    b += y * y;
    c += z * z;
    d += w * w;
  }
  for_units(n - j, [&](int64_t i, auto block) {
    vec x = block.read(p + j + i);
    a += x * x;
  });
  return total((a + b) + (c + d));
}

// e^x for |x| <= 87, beyond that its value there; NaN stays NaN. Error below 1.5 units in the last
// place: x = n log 2 + f, |f| <= log(2) / 2, Taylor's polynomial of degree 7 in f, then 2^n.
inline vec exponential(vec x) {
  x = x > all(87.0f) ? all(87.0f) : x;
  x = x < all(-87.0f) ? all(-87.0f) : x;
  const vec shift = all(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
  vec n = (x * 1.44269504f + shift) - shift;
  vec f = x - n * 0.693359375f;  // log 2 in two parts; the first is exact in few bits
  f = f - n * -2.12194440e-4f;
  vec p = all(1.0f / 5040);
  p = p * f + 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  return p * (vec)power;
}

inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

// 1 - 2 / (e^2x + 1) loses the small numbers: there, an odd polynomial (fitted for |x| <= 0.625).
inline vec hyperbolic_tangent(vec x) {
  vec square = x * x;
  vec p = all(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  vec near = p * square * x + x;
  vec far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return square < all(0.390625f) ? near : far;
}

// Matrix products of float or bfloat factors, summed in float

// bfloat16: the upper half of a float.
typedef uint16_t bfloat;

inline vec widen(const bfloat* p) {
  ivec bits{};
  for (int64_t i = 0; i < L; i++) bits[i] = int32_t(uint32_t(p[i]) << 16);
  return (vec)bits;
}

// To the nearest, ties to even; NaN stays NaN.
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

// What a lane holds: one factor, or two of one sum, which lie side by side.
template <class T>
struct Factors;

template <>
struct Factors<float> {
  typedef vec Vector;
  static constexpr int64_t PER_LANE = 1;
  static Vector left(const float* p) { return all(*p); }
  static void add(vec& sum, vec a, vec b) { sum += a * b; }
};

template <>
struct Factors<bfloat> {
  typedef ivec Vector;
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

// A packed matrix (K, N) is cut into panels of WIDTH vectors of columns, the last panel as narrow
// as it can be; a panel holds its rows one after the other (rows of bfloat in pairs), so that a
// product reads it in order. Six rows by four vectors of sums, four vectors of the right and one of
// the left operand fill the 32 registers of AVX-512; six by two, two and one the 16 before it.
#if defined(__x86_64__) && !defined(__AVX512F__)
constexpr int64_t WIDTH = 2, HEIGHT = 6;
#else
constexpr int64_t WIDTH = 4, HEIGHT = 6;
#endif
// Rows of a panel that are used while they lie in the second-level cache: 64 KiB at most.
constexpr int64_t DEPTH = WIDTH * L > 32 ? 256 : 512;

// Keeps a value in a register: GCC would rather load it again for every use, and a processor loads
// no more than one or two vectors a cycle.
#if defined(__x86_64__) && defined(__AVX512F__)
#define KEEP(a) asm("" : "+v"(a))
#elif defined(__x86_64__)
#define KEEP(a) asm("" : "+x"(a))
#elif defined(__aarch64__)
#define KEEP(a) asm("" : "+w"(a))
#else
#define KEEP(a)
#endif

template <class T>
struct Left {  // the left operand: element (m, k); the columns of bfloat lie side by side
  const T* data;
  int64_t row, column;
};

template <class T, int ROWS, int VECTORS>
void tile(int64_t K, Left<T> a, const T* b, float* c, int64_t ldc, bool add, int64_t lanes) {
  constexpr int64_t per = Factors<T>::PER_LANE;
  typedef typename Factors<T>::Vector Vector;
  // The result is asked for now, so that it has come when the sums are done.
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < VECTORS; j++) __builtin_prefetch(c + i * ldc + j * L, 1);
  }
  vec sums[ROWS][VECTORS] = {};
  const T* left = a.data;
  for (int64_t k = 0; k < K; k += per, b += per * VECTORS * L, left += per * a.column) {
    Vector right[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      right[j] = *reinterpret_cast<const Vector*>(b + j * per * L);
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

// C (M, N) = A (M, K) B, or C += A B; B packed, K whole lanes.
template <class T>
void product(int64_t M, int64_t N, int64_t K, Left<T> a, const T* b, float* c, int64_t ldc,
             bool add) {
  const int64_t blocks = (M + HEIGHT - 1) / HEIGHT;
  for (int64_t n = 0; n < N; n += WIDTH * L) {
    const int64_t columns = std::min(WIDTH * L, N - n), vectors = (columns + L - 1) / L;
    const int64_t lanes = columns - (vectors - 1) * L;
    for (int64_t k = 0; k < K; k += DEPTH) {
      const int64_t depth = std::min(DEPTH, K - k);
      const bool more = add || k > 0;
      for (int64_t q = 0, m = 0; q < blocks; q++) {
        // As even as can be: a single row is slow.
        const int64_t height = (M - m + blocks - q - 1) / (blocks - q);
        const Left<T> left{a.data + m * a.row + k * a.column, a.row, a.column};
        const T* right = b + n * K + k * vectors * L;
        float* to = c + m * ldc + n;
        switch (height) {
          case 1: tile_of<T, 1>(vectors, depth, left, right, to, ldc, more, lanes); break;
          case 2: tile_of<T, 2>(vectors, depth, left, right, to, ldc, more, lanes); break;
          case 3: tile_of<T, 3>(vectors, depth, left, right, to, ldc, more, lanes); break;
          case 4: tile_of<T, 4>(vectors, depth, left, right, to, ldc, more, lanes); break;
          case 5: tile_of<T, 5>(vectors, depth, left, right, to, ldc, more, lanes); break;
          case 6: tile_of<T, 6>(vectors, depth, left, right, to, ldc, more, lanes); break;
        }
        m += height;
      }
    }
  }
}

// What is taken off a matrix as it is packed: nothing, or the mean that each row of w (G, F) has at
// column f within its group. `means` is (gates, F), `hidden` the rows of a gate.
struct Center {
  const float* means;
  int64_t hidden, features;
  bool transposed;  // whether the packed matrix is w transposed
  const float* of(int64_t row) const { return means + row / hidden * features; }
};

// Packs columns [n, n + columns) of a matrix with strides.
template <class T>
void pack_panel(const T* from, int64_t row, int64_t column, int64_t K, int64_t n, int64_t columns,
                T* to, const Center& center) {
  constexpr int64_t per = Factors<T>::PER_LANE;
  const int64_t wide = (columns + L - 1) / L * L;
  from += n * column;
  // A single feature has both strides 1: means go by what the rows are, not by the strides.
  const bool by_rows = column == 1 && !(center.means && center.transposed);
  // A cache line of every column at a time, where columns run along the memory.
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
      for (int64_t j = 0; !by_rows && j < wide; j++) {
        const float* source = from + j * column;
        const float* means = center.means ? center.of(std::min(n + j, n + columns - 1)) : nullptr;
        if (j >= columns) {
          for (int64_t k = k0; k < k1; k++) to[k * wide + j] = 0.0f;
        } else if (means) {
          for (int64_t k = k0; k < k1; k++) to[k * wide + j] = source[k * row] - means[k];
        } else {
          for (int64_t k = k0; k < k1; k++) to[k * wide + j] = source[k * row];
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

// Threads

int64_t threads_for(int64_t wanted, int64_t pieces) {
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  return std::max<int64_t>(1, std::min(wanted, pieces));
#else
  (void)wanted, (void)pieces;
  return 1;
#endif
}

template <class Body>
void in_parallel(int64_t threads, Body body) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(int(threads))
    {
      // The runtime may give fewer threads than asked for.
      const int64_t got = omp_get_num_threads();
      for (int64_t i = omp_get_thread_num(); i < threads; i += got) body(i);
    }
    return;
  }
#endif
  for (int64_t i = 0; i < threads; i++) body(i);
}

// Recurrent steps

enum Cell : int64_t { LSTM, GRU, RNN_TANH, RNN_RELU };
constexpr int64_t MAX_GATES = 4;

}  // namespace

extern "C" {

// One normalisation of rows; groups[q] is the first gate that shares statistics with gate q.
struct Rows {
  int64_t scale, center;
  double eps;
  int64_t groups[MAX_GATES];
};

// What a call on consecutive steps reads and writes. T* stands for float*, or bfloat* where
// `narrow`. In a simple RNN u is the sum of both terms and the same memory as v, du the same as dv.
struct Steps {
  int64_t cell, narrow, steps, examples, hidden, threads;
  const int64_t* sizes;  // (steps,)
  Rows input, recurrent, out;
  const float *bias, *bias_hn, *gain_input, *gain_recurrent;  // (G,), (H,), (G,), (G,)
  const float *gain_out, *shift_out;                          // (H,)
  const void* weight;    // packed T: forward (H, G), backward (G, H)
  void *v, *u;           // T (rows, G); forward: u null where nothing is saved
  float *cells, *stats;  // (rows, H), (rows, STATS); forward: null where nothing is saved
  // The forward alone.
  void* output;  // T (rows, H)
  float *h, *c;  // (N, H)
  // The backward alone; output_gradient may be null.
  const void *output_gradient, *h_prev;  // T (rows, H)
  const float* c_prev;                   // (rows, H)
  float *dh, *dc;                        // (N, H)
  void *du, *dv;                         // T (rows, G)
  float *dbias, *dbias_hn, *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out;
};

// A window over a text, moved by h and read by the next step (window.py has the equations): K
// Gaussians, U characters of E numbers. Such a layer has rows of float alone.
struct Window {
  int64_t components, characters, letters;
  const float *text, *bias;            // (N, U, E), (3K,)
  const float *input_weight, *weight;  // packed: forward (E, G), (H, 3K), backward (G, E), (3K, H)
  float* terms;                        // (rows, 4K): alpha, beta, exp of kappa^, kappa
  // The forward alone.
  float *windows, *window, *kappa;  // (rows, E), (N, E), (N, K)
  // The backward alone; windows_gradient may be null.
  const float* windows_gradient;  // (rows, E)
  float *dwindow, *dkappa;        // (N, E), (N, K)
  float* dparameters;             // (rows, 3K)
};

}  // extern "C"

namespace {

// Reciprocal deviations of the input's and the recurrent product's gates, then mean and reciprocal
// deviation of the site at the output.
constexpr int64_t STATS = 2 * MAX_GATES + 2;

struct Shape {
  int64_t H, gates, G;
  explicit Shape(const Steps& s)
      : H(s.hidden),
        gates(s.cell == LSTM  ? 4
              : s.cell == GRU ? 3
                              : 1),
        G(gates * H) {}
};

inline float reciprocal_deviation(double sum, int64_t n, double eps) {
  return float(1.0 / std::sqrt(sum / double(n) + eps));
}

// One past the last gate that shares statistics with gate q, the first of its group.
inline int64_t group_end(const Rows& rows, int64_t gates, int64_t q) {
  int64_t end = q + 1;
  while (end < gates && rows.groups[end] == rows.groups[q]) end++;
  return end;
}

// The reciprocal deviation of each gate of a row of products, whose mean is zero or stays.
void deviations(const Rows& rows, const float* a, int64_t gates, int64_t H, float* r) {
  std::fill(r, r + gates, 1.0f);
  if (!rows.scale) return;
  for (int64_t q = 0, end; q < gates; q = end) {
    end = group_end(rows, gates, q);
    const int64_t n = (end - q) * H;
    std::fill(r + q, r + end, reciprocal_deviation(sum_of_squares(a + q * H, n), n, rows.eps));
  }
}

// Mean and reciprocal deviation of a row whose mean is not zero.
void mean_and_deviation(const Rows& rows, const float* a, int64_t n, float* mean, float* r) {
  *mean = 0.0f, *r = 1.0f;
  if (!rows.scale) return;
  if (rows.center) {
    vec sum{};
    for_units(n, [&](int64_t j, auto block) { sum += block.read(a + j); });
    *mean = total(sum) / float(n);
  }
  const vec center = all(*mean);
  vec squares{};
  for_units(n, [&](int64_t j, auto block) {
    vec d = block.keep(block.read(a + j) - center);
    squares += d * d;
  });
  *r = reciprocal_deviation(total(squares), n, rows.eps);
}

// The two means in the adjoint r (d - mean d - a mean(d a)) of a normalisation, gate by gate, from
// sums over the gates; zero where it takes neither.
struct Means {
  vec d[MAX_GATES] = {}, da[MAX_GATES] = {};
  float mean_d[MAX_GATES], mean_da[MAX_GATES];

  void add(int64_t q, vec d_q, vec a) {
    d[q] += d_q;
    da[q] += d_q * a;
  }
  void finish(const Rows& rows, int64_t gates, int64_t H) {
    for (int64_t q = 0, end; q < gates; q = end) {
      end = group_end(rows, gates, q);
      vec sum{}, product{};
      for (int64_t k = q; k < end; k++) sum += d[k], product += da[k];
      const float n = float((end - q) * H);
      std::fill(mean_d + q, mean_d + end, rows.scale && rows.center ? total(sum) / n : 0.0f);
      std::fill(mean_da + q, mean_da + end, rows.scale ? total(product) / n : 0.0f);
    }
  }
};

// Forward, one row of one step: u holds the recurrent product, h and c the states before and after.

void lstm_row(const Steps& s, const Shape& shape, const float* v, const float* u, float* h,
              float* c, float* stats, float* o) {
  const int64_t H = shape.H;
  deviations(s.input, v, 4, H, stats);
  deviations(s.recurrent, u, 4, H, stats + MAX_GATES);
  vec rv[4], ru[4];
  for (int64_t q = 0; q < 4; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  for_units(H, [&](int64_t j, auto block) {
    vec p[4];
    for (int64_t q = 0; q < 4; q++) {
      const int64_t k = q * H + j;
      p[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * (rv[q] * block.read(v + k)) +
             block.read(s.gain_recurrent + k) * (ru[q] * block.read(u + k));
      ahead(v + k, shape.G);
    }
    block.write(c + j,
                sigmoid(p[1]) * block.read(c + j) + sigmoid(p[0]) * hyperbolic_tangent(p[2]));
    block.write(o + j, sigmoid(p[3]));
  });
  float* mean = stats + 2 * MAX_GATES;
  mean_and_deviation(s.out, c, H, mean, mean + 1);
  const vec m = all(mean[0]), r = all(mean[1]);
  for_units(H, [&](int64_t j, auto block) {
    vec a = (block.read(c + j) - m) * r;
    vec z = block.read(s.gain_out + j) * a + block.read(s.shift_out + j);
    block.write(h + j, block.read(o + j) * hyperbolic_tangent(z));
  });
}

void gru_row(const Steps& s, const Shape& shape, const float* v, const float* u, float* h,
             float* stats) {
  const int64_t H = shape.H;
  deviations(s.input, v, 3, H, stats);
  deviations(s.recurrent, u, 3, H, stats + MAX_GATES);
  vec rv[3], ru[3];
  for (int64_t q = 0; q < 3; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  for_units(H, [&](int64_t j, auto block) {
    vec x[3], y[3];
    for (int64_t q = 0; q < 3; q++) {
      const int64_t k = q * H + j;
      x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * (rv[q] * block.read(v + k));
      y[q] = block.read(s.gain_recurrent + k) * (ru[q] * block.read(u + k));
    }
    vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
    vec n = hyperbolic_tangent(x[2] + reset * (y[2] + block.read(s.bias_hn + j)));
    block.write(h + j, n + update * (block.read(h + j) - n));
  });
}

void rnn_row(const Steps& s, const Shape& shape, const float* u, float* h, float* stats) {
  const int64_t H = shape.H;
  float* mean = stats + 2 * MAX_GATES;
  mean_and_deviation(s.out, u, H, mean, mean + 1);
  const vec m = all(mean[0]), r = all(mean[1]), zero{};
  for_units(H, [&](int64_t j, auto block) {
    vec a = (block.read(u + j) - m) * r;
    vec p = block.read(s.gain_out + j) * a + block.read(s.bias + j);
    // Written so that NaN passes.
    vec next = s.cell == RNN_RELU ? (p <= zero ? zero : p) : hyperbolic_tangent(p);
    block.write(h + j, next);
  });
}

void forward_row(const Steps& s, const Shape& shape, const float* v, const float* u, float* h,
                 float* c, float* stats, float* scratch) {
  switch (s.cell) {
    case LSTM: return lstm_row(s, shape, v, u, h, c, stats, scratch);
    case GRU: return gru_row(s, shape, v, u, h, stats);
    default: return rnn_row(s, shape, u, h, stats);
  }
}

// Backward, one row of one step (formulas in the documentation of the aten engine). dh and dc come
// as the gradients that flow back from the next step and leave as those that flow to the step
// before, dh without the part that goes through du.

// Rows are often as long as a page, and then what belongs to one unit in several vectors and rows
// falls into one set of the first-level cache, which holds eight lines. So vectors that are read
// together begin a line apart from each other.
class Spread {
 public:
  explicit Spread(std::initializer_list<int64_t> sizes) {
    int64_t total = PAGE;
    for (int64_t size : sizes) total += (size + PAGE - 1) / PAGE * PAGE + PAGE;
    memory_.resize(total);
    const intptr_t address = reinterpret_cast<intptr_t>(memory_.data()) / 4;
    float* next = memory_.data() + (-address & (PAGE - 1));
    int64_t line = FIRST_LINE;
    for (int64_t size : sizes) {
      vectors_.push_back(next + line++ * 16);
      next += (size + PAGE - 1) / PAGE * PAGE + PAGE;
    }
  }
  float* operator[](int64_t i) const { return vectors_[i]; }

 private:
  static constexpr int64_t PAGE = 1024;     // floats
  static constexpr int64_t FIRST_LINE = 4;  // rows begin at the first ones
  std::vector<float> memory_;
  std::vector<float*> vectors_;
};

struct Sums {  // of one thread
  Spread memory;
  float *bias, *gain_input, *gain_recurrent, *bias_hn, *gain_out, *shift_out;
  explicit Sums(const Shape& shape)
      : memory({shape.G, shape.G, shape.G, shape.H, shape.H, shape.H}),
        bias(memory[0]),
        gain_input(memory[1]),
        gain_recurrent(memory[2]),
        bias_hn(memory[3]),
        gain_out(memory[4]),
        shift_out(memory[5]) {}
};

// A call's arguments with its vectors copied to where they do not meet.
struct Spaced {
  Steps steps;
  Spread memory;
  Spaced(const Steps& s, const Shape& shape)
      : steps(s), memory({0, 0, 0, shape.G, shape.G, shape.G, shape.H, shape.H, shape.H}) {
    const auto move = [&](int64_t i, const float*& vector, int64_t size) {
      std::memcpy(memory[i], vector, 4 * size);
      vector = memory[i];
    };
    move(3, steps.bias, shape.G);
    move(4, steps.gain_input, shape.G);
    move(5, steps.gain_recurrent, shape.G);
    move(6, steps.bias_hn, shape.H);
    move(7, steps.gain_out, shape.H);
    move(8, steps.shift_out, shape.H);
  }
};

template <class Block>
inline void accumulate(Block block, float* to, int64_t j, vec a) {
  block.write(to + j, block.read(to + j) + a);
}

// du and dv from the gradients dp of normalised, scaled sums; pu, pv hold dp for either and may be
// du, dv themselves.
void adjoints(const Steps& s, const Shape& shape, const float* v, const float* u,
              const float* stats, const Means& mv, const Means& mu, const float* pv,
              const float* pu, float* dv, float* du) {
  const int64_t H = shape.H;
  for (int64_t q = 0; q < shape.gates; q++) {
    const vec rv = all(stats[q]), ru = all(stats[MAX_GATES + q]);
    const vec v1 = all(mv.mean_d[q]), v2 = all(mv.mean_da[q]);
    const vec u1 = all(mu.mean_d[q]), u2 = all(mu.mean_da[q]);
    for_units(H, [&](int64_t j, auto block) {
      const int64_t k = q * H + j;
      vec p = block.read(pv + k), w = block.read(pu + k);
      vec a = rv * block.read(v + k), b = ru * block.read(u + k);
      block.write(dv + k, rv * (block.read(s.gain_input + k) * p - v1 - a * v2));
      block.write(du + k, ru * (block.read(s.gain_recurrent + k) * w - u1 - b * u2));
    });
  }
}

void lstm_row_back(const Steps& s, const Shape& shape, const float* v, const float* u,
                   const float* c, const float* c_prev, const float* stats, const float* dout,
                   float* dh, float* dc, float* dv, float* du, Sums& sums, float* scratch) {
  const int64_t H = shape.H;
  float *gates = scratch, *e = scratch + 3 * H;
  vec rv[4], ru[4];
  for (int64_t q = 0; q < 4; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]);
  Means mc;
  for_units(H, [&](int64_t j, auto block) {
    vec p[4];
    for (int64_t q = 0; q < 4; q++) {
      const int64_t k = q * H + j;
      p[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * (rv[q] * block.read(v + k)) +
             block.read(s.gain_recurrent + k) * (ru[q] * block.read(u + k));
      ahead(v + k, shape.G), ahead(u + k, shape.G);
    }
    ahead(c + j, H), ahead(c_prev + j, H), ahead(dout + j, H);
    vec o = sigmoid(p[3]);
    block.write(gates + j, sigmoid(p[0]));
    block.write(gates + H + j, sigmoid(p[1]));
    block.write(gates + 2 * H + j, hyperbolic_tangent(p[2]));
    vec a = block.keep((block.read(c + j) - m) * r);
    vec gain = block.read(s.gain_out + j);
    vec tau = hyperbolic_tangent(gain * a + block.read(s.shift_out + j));
    vec d = block.read(dout + j) + block.read(dh + j);
    vec dm = d * o * (1.0f - tau * tau);
    accumulate(block, sums.shift_out, j, dm);
    accumulate(block, sums.gain_out, j, dm * a);
    block.write(e + j, gain * dm);
    mc.add(0, gain * dm, a);
    block.write(du + 3 * H + j, d * tau * o * (1.0f - o));
  });
  mc.finish(s.out, 1, H);
  const vec m1 = all(mc.mean_d[0]), m2 = all(mc.mean_da[0]);
  Means mu, mv;
  for_units(H, [&](int64_t j, auto block) {
    vec a = (block.read(c + j) - m) * r;
    vec d = block.read(dc + j) + r * (block.read(e + j) - m1 - a * m2);
    vec i = block.read(gates + j), f = block.read(gates + H + j), g = block.read(gates + 2 * H + j);
    block.write(dc + j, d * f);
    vec dp[4] = {d * g * i * (1.0f - i), d * block.read(c_prev + j) * f * (1.0f - f),
                 d * i * (1.0f - g * g), block.read(du + 3 * H + j)};
    for (int64_t q = 0; q < 4; q++) {
      const int64_t k = q * H + j;
      vec x = rv[q] * block.read(v + k), y = ru[q] * block.read(u + k);
      block.write(du + k, dp[q]);
      accumulate(block, sums.bias, k, dp[q]);
      accumulate(block, sums.gain_input, k, dp[q] * x);
      accumulate(block, sums.gain_recurrent, k, dp[q] * y);
      mv.add(q, block.read(s.gain_input + k) * dp[q], x);
      mu.add(q, block.read(s.gain_recurrent + k) * dp[q], y);
    }
  });
  mu.finish(s.recurrent, 4, H);
  mv.finish(s.input, 4, H);
  adjoints(s, shape, v, u, stats, mv, mu, du, du, dv, du);
}

void gru_row_back(const Steps& s, const Shape& shape, const float* v, const float* u,
                  const float* h_prev, const float* stats, const float* dout, float* dh, float* dv,
                  float* du, Sums& sums) {
  const int64_t H = shape.H;
  vec rv[3], ru[3];
  for (int64_t q = 0; q < 3; q++) rv[q] = all(stats[q]), ru[q] = all(stats[MAX_GATES + q]);
  Means mu, mv;
  for_units(H, [&](int64_t j, auto block) {
    vec a[3], b[3], x[3], y[3];
    for (int64_t q = 0; q < 3; q++) {
      const int64_t k = q * H + j;
      a[q] = rv[q] * block.read(v + k), b[q] = ru[q] * block.read(u + k);
      x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a[q];
      y[q] = block.read(s.gain_recurrent + k) * b[q];
    }
    y[2] += block.read(s.bias_hn + j);
    vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
    vec n = hyperbolic_tangent(x[2] + reset * y[2]);
    vec d = block.read(dout + j) + block.read(dh + j);
    block.write(dh + j, d * update);
    vec dn = d * (1.0f - update) * (1.0f - n * n);
    vec dz = d * (block.read(h_prev + j) - n) * update * (1.0f - update);
    vec dr = dn * y[2] * reset * (1.0f - reset);
    const vec dx[3] = {dr, dz, dn}, dy[3] = {dr, dz, dn * reset};
    accumulate(block, sums.bias_hn, j, dy[2]);
    for (int64_t q = 0; q < 3; q++) {
      const int64_t k = q * H + j;
      block.write(dv + k, dx[q]);
      block.write(du + k, dy[q]);
      accumulate(block, sums.bias, k, dx[q]);
      accumulate(block, sums.gain_input, k, dx[q] * a[q]);
      accumulate(block, sums.gain_recurrent, k, dy[q] * b[q]);
      mv.add(q, block.read(s.gain_input + k) * dx[q], a[q]);
      mu.add(q, block.read(s.gain_recurrent + k) * dy[q], b[q]);
    }
  });
  mu.finish(s.recurrent, 3, H);
  mv.finish(s.input, 3, H);
  adjoints(s, shape, v, u, stats, mv, mu, dv, du, dv, du);
}

void rnn_row_back(const Steps& s, const Shape& shape, const float* u, const float* stats,
                  const float* dout, const float* dh, float* du, Sums& sums) {
  const int64_t H = shape.H;
  const vec m = all(stats[2 * MAX_GATES]), r = all(stats[2 * MAX_GATES + 1]), zero{};
  Means mean;
  for_units(H, [&](int64_t j, auto block) {
    vec a = block.keep((block.read(u + j) - m) * r);
    vec p = block.read(s.gain_out + j) * a + block.read(s.bias + j), tau = hyperbolic_tangent(p);
    vec d = block.read(dout + j) + block.read(dh + j);
    vec dp = s.cell == RNN_RELU ? (p > zero ? d : zero) : d * (1.0f - tau * tau);
    accumulate(block, sums.bias, j, dp);
    accumulate(block, sums.gain_out, j, dp * a);
    dp = dp * block.read(s.gain_out + j);
    block.write(du + j, dp);
    mean.add(0, dp, a);
  });
  mean.finish(s.out, 1, H);
  const vec m1 = all(mean.mean_d[0]), m2 = all(mean.mean_da[0]);
  for_units(H, [&](int64_t j, auto block) {
    vec a = (block.read(u + j) - m) * r;
    block.write(du + j, r * (block.read(du + j) - m1 - a * m2));
  });
}

void backward_row(const Steps& s, const Shape& shape, int64_t row, int64_t n, const float* v,
                  const float* u, const float* h_prev, const float* dout, float* dh, float* dv,
                  float* du, Sums& sums, float* scratch) {
  const int64_t H = shape.H;
  const float* stats = s.stats + row * STATS;
  switch (s.cell) {
    case LSTM:
      return lstm_row_back(s, shape, v, u, s.cells + row * H, s.c_prev + row * H, stats, dout, dh,
                           s.dc + n * H, dv, du, sums, scratch);
    case GRU: return gru_row_back(s, shape, v, u, h_prev, stats, dout, dh, dv, du, sums);
    default: return rnn_row_back(s, shape, u, stats, dout, dh, du, sums);
  }
}

// The window of one row: the parameters (3K,) that h asks for, without bias, to the sum w of
// characters. `scratch` takes 2U numbers, the first U being 1, 2, ..., U.
void window_row(const Window& a, const float* parameters, const float* text, float* terms,
                float* kappa, float* w, float* scratch) {
  const int64_t K = a.components, U = a.characters, E = a.letters;
  const float* places = scratch;
  float* phi = scratch + U;
  for_units(3 * K, [&](int64_t j, auto block) {
    block.write(terms + j, exponential(block.read(parameters + j) + block.read(a.bias + j)));
  });
  std::fill(phi, phi + U, 0.0f);
  for (int64_t k = 0; k < K; k++) {
    kappa[k] += terms[2 * K + k];
    terms[3 * K + k] = kappa[k];
    const vec alpha = all(terms[k]), beta = all(terms[K + k]), center = all(kappa[k]);
    for_units(U, [&](int64_t u, auto block) {
      vec d = center - block.read(places + u);
      block.write(phi + u, block.read(phi + u) + alpha * exponential(-(beta * d * d)));
    });
  }
  std::fill(w, w + E, 0.0f);
  for (int64_t u = 0; u < U; u++) {
    const vec share = all(phi[u]);
    for_units(E, [&](int64_t j, auto block) {
      block.write(w + j, block.read(w + j) + share * block.read(text + u * E + j));
    });
  }
}

// Its adjoint: dkappa comes as the gradient of kappa from the next step and leaves as that for the
// step before.
void window_row_back(const Window& a, const float* dw, const float* text, const float* terms,
                     float* dkappa, float* dparameters, float* scratch) {
  const int64_t K = a.components, U = a.characters, E = a.letters;
  const float* places = scratch;
  float* dphi = scratch + U;
  for (int64_t u = 0; u < U; u++) {
    vec sum{};
    for_units(E, [&](int64_t j, auto block) {
      sum += block.read(dw + j) * block.read(text + u * E + j);
    });
    dphi[u] = total(sum);
  }
  for (int64_t k = 0; k < K; k++) {
    const float alpha = terms[k], beta = terms[K + k];
    const vec b = all(beta), center = all(terms[3 * K + k]);
    vec sum{}, first{}, second{};
    for_units(U, [&](int64_t u, auto block) {
      vec d = center - block.read(places + u);
      vec p = exponential(-(b * d * d)) * block.read(dphi + u);
      sum += p, first += p * d, second += p * d * d;
    });
    dkappa[k] -= 2.0f * alpha * beta * total(first);
    dparameters[k] = alpha * total(sum);
    dparameters[K + k] = -alpha * beta * total(second);
    dparameters[2 * K + k] = dkappa[k] * terms[2 * K + k];
  }
}

// Shares the examples among threads, so that each has about the same number of rows.
std::vector<int64_t> shares(const Steps& s, int64_t threads) {
  int64_t rows = 0;
  for (int64_t t = 0; t < s.steps; t++) rows += s.sizes[t];
  std::vector<int64_t> bounds(threads + 1, s.examples);
  bounds[0] = 0;
  int64_t length = s.steps, before = 0, share = 1;
  for (int64_t n = 0; n < s.examples && share < threads; n++) {
    while (length > 0 && s.sizes[length - 1] <= n) length--;
    before += length;
    if (before * threads >= rows * share) bounds[share++] = n + 1;
  }
  return bounds;
}

// Rows of T as floats: where they are, or widened into scratch memory.
inline const float* floats(const float* p, int64_t, float*) { return p; }
inline const float* floats(const bfloat* p, int64_t n, float* scratch) {
  widen(p, n, scratch);
  return scratch;
}

inline void copy(const float* from, int64_t n, float* to) { std::memcpy(to, from, 4 * n); }
inline void copy(const float* from, int64_t n, bfloat* to) { narrow(from, n, to); }

// Left operands of one step's product: the rows themselves, or copies in bfloat with whole lanes.
inline Left<float> operand(const float* rows, int64_t, int64_t K, std::vector<float>&) {
  return {rows, K, 1};
}
inline Left<bfloat> operand(const float* rows, int64_t n, int64_t K, std::vector<bfloat>& to) {
  const int64_t wide = padded<bfloat>(K);
  to.resize(n * wide);
  for (int64_t i = 0; i < n; i++) {
    narrow(rows + i * K, K, to.data() + i * wide);
    if (wide > K) to[i * wide + K] = 0;
  }
  return {to.data(), wide, 1};
}

// A thread's memory for windows.
class WindowRoom {
 public:
  WindowRoom(const Window* a, int64_t examples)
      : places_(a ? 2 * a->characters : 0),
        terms_(a ? 4 * a->components : 0),
        parameters_(a ? 3 * a->components * examples : 0) {
    for (int64_t u = 0; a && u < a->characters; u++) places_[u] = float(u + 1);
  }
  float* places() { return places_.data(); }          // 1 to U, and U numbers more
  float* terms() { return terms_.data(); }            // (4K,)
  float* parameters() { return parameters_.data(); }  // (examples, 3K)

 private:
  std::vector<float> places_, terms_, parameters_;
};

template <class T>
void forward(const Steps& call, const Window* window = nullptr) {
  constexpr bool narrow_rows = sizeof(T) == 2;
  const Shape shape(call);
  const Spaced spaced(call, shape);
  const Steps& s = spaced.steps;
  const int64_t H = shape.H, G = shape.G;
  const bool merged = shape.gates == 1;
  T *const v = static_cast<T*>(s.v), *const kept = static_cast<T*>(merged ? s.v : s.u);
  const int64_t threads = threads_for(s.threads, s.examples);
  const std::vector<int64_t> bounds = shares(s, threads);
  in_parallel(threads, [&](int64_t thread) {
    const int64_t first = bounds[thread], last = bounds[thread + 1];
    if (first == last) return;
    // Products go where they are kept, unless they have to be narrowed first.
    std::vector<float> products(kept && !narrow_rows ? 0 : (last - first) * G);
    std::vector<float> scratch(H), wide(narrow_rows ? G : 0);
    std::vector<T> left;
    float unused[STATS];
    WindowRoom room(window, last - first);
    int64_t offset = 0;
    for (int64_t t = 0; t < s.steps; offset += s.sizes[t++]) {
      const int64_t end = std::min(last, s.sizes[t]);
      if (end <= first) break;
      float* u = products.data();
      if constexpr (!narrow_rows) {
        if (kept) u = kept + (offset + first) * G;
      }
      if constexpr (!narrow_rows) {
        if (window) {
          const int64_t E = window->letters;
          const Left<float> w_rows{window->window + first * E, E, 1};
          product(end - first, G, E, w_rows, window->input_weight, v + (offset + first) * G, G,
                  true);
        }
      }
      const Left<T> h_rows = operand(s.h + first * H, end - first, H, left);
      product(end - first, G, padded<T>(H), h_rows, static_cast<const T*>(s.weight), u, G,
              merged && !narrow_rows);
      for (int64_t n = first; n < end; n++, u += G) {
        const int64_t row = offset + n;
        const float* input = floats(v + row * G, G, wide.data());
        if constexpr (narrow_rows) {
          if (merged)
            for_units(G, [&](int64_t j, auto block) {
              block.write(u + j, block.read(u + j) + block.read(input + j));
            });
          if (kept) narrow(u, G, kept + row * G);
        }
        float *h = s.h + n * H, *c = s.c ? s.c + n * H : nullptr;
        float* stats = s.stats ? s.stats + row * STATS : unused;
        forward_row(s, shape, input, u, h, c, stats, scratch.data());
        copy(h, H, static_cast<T*>(s.output) + row * H);
        if (s.cells) copy(c, H, s.cells + row * H);
      }
      if (!window) continue;
      const int64_t K = window->components, U = window->characters, E = window->letters;
      const Left<float> h_after{s.h + first * H, H, 1};
      product(end - first, 3 * K, H, h_after, window->weight, room.parameters(), 3 * K, false);
      for (int64_t n = first; n < end; n++) {
        const int64_t row = offset + n;
        float *w = window->window + n * E, *terms = room.terms();
        if (window->terms) terms = window->terms + row * 4 * K;
        window_row(*window, room.parameters() + (n - first) * 3 * K, window->text + n * U * E,
                   terms, window->kappa + n * K, w, room.places());
        copy(w, E, window->windows + row * E);
      }
    }
  });
}

template <class T>
void backward(const Steps& call, const Window* window = nullptr) {
  constexpr bool narrow_rows = sizeof(T) == 2;
  const Shape shape(call);
  const Spaced spaced(call, shape);
  const Steps& s = spaced.steps;
  const int64_t H = shape.H, G = shape.G;
  const bool merged = shape.gates == 1;
  const T *const v = static_cast<const T*>(s.v), *const u = static_cast<const T*>(s.u);
  const T* const dout = static_cast<const T*>(s.output_gradient);
  const T* const h_prev = static_cast<const T*>(s.h_prev);
  const int64_t threads = threads_for(s.threads, s.examples);
  const std::vector<int64_t> bounds = shares(s, threads);
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  std::vector<Sums> sums;
  sums.reserve(threads);
  for (int64_t i = 0; i < threads; i++) sums.emplace_back(shape);
  in_parallel(threads, [&](int64_t thread) {
    const int64_t first = bounds[thread], last = bounds[thread + 1];
    if (first == last) return;
    std::vector<float> scratch(4 * H), zeros(H), wide(narrow_rows ? 2 * (G + H) : 0);
    std::vector<float> gradients(narrow_rows ? (last - first) * G + G : 0);
    std::vector<T> left;
    float* const room = wide.data();
    WindowRoom window_room(window, 0);
    for (int64_t t = s.steps - 1; t >= 0; t--) {
      const int64_t end = std::min(last, s.sizes[t]);
      if (end <= first) continue;
      if (window) {
        const int64_t K = window->components, U = window->characters, E = window->letters;
        for (int64_t n = first; n < end; n++) {
          const int64_t row = offsets[t] + n;
          float* dw = window->dwindow + n * E;
          for (int64_t j = 0; window->windows_gradient && j < E; j++) {
            dw[j] += window->windows_gradient[row * E + j];
          }
          window_row_back(*window, dw, window->text + n * U * E, window->terms + row * 4 * K,
                          window->dkappa + n * K, window->dparameters + row * 3 * K,
                          window_room.places());
        }
        const Left<float> parameters{window->dparameters + (offsets[t] + first) * 3 * K, 3 * K, 1};
        product(end - first, H, 3 * K, parameters, window->weight, s.dh + first * H, H, true);
      }
      for (int64_t n = first; n < end; n++) {
        const int64_t row = offsets[t] + n;
        const float* u_row = floats(u + row * G, G, room);
        const float* v_row = merged ? nullptr : floats(v + row * G, G, room + G);
        const float* d_row = dout ? floats(dout + row * H, H, room + 2 * G) : zeros.data();
        float *dh = s.dh + n * H, *du, *dv;
        if constexpr (narrow_rows) {
          du = gradients.data() + (n - first) * G;
          dv = gradients.data() + (last - first) * G;
        } else {
          du = static_cast<T*>(s.du) + row * G;
          dv = static_cast<T*>(s.dv) + row * G;
        }
        const float* h = s.cell == GRU ? floats(h_prev + row * H, H, room + 2 * G + H) : nullptr;
        backward_row(s, shape, row, n, v_row, u_row, h, d_row, dh, dv, du, sums[thread],
                     scratch.data());
        if constexpr (narrow_rows) {
          narrow(du, G, static_cast<T*>(s.du) + row * G);
          if (!merged) narrow(dv, G, static_cast<T*>(s.dv) + row * G);
        }
      }
      const float* du = gradients.data();
      if constexpr (!narrow_rows) du = static_cast<const T*>(s.du) + (offsets[t] + first) * G;
      product(end - first, H, padded<T>(G), operand(du, end - first, G, left),
              static_cast<const T*>(s.weight), s.dh + first * H, H, s.cell == GRU);
      if constexpr (!narrow_rows) {
        if (window) {
          const int64_t E = window->letters;
          const Left<float> dv{static_cast<const T*>(s.dv) + (offsets[t] + first) * G, G, 1};
          product(end - first, E, G, dv, window->input_weight, window->dwindow + first * E, E,
                  false);
        }
      }
    }
  });
  // In the order of the threads, so that the same call gives the same numbers again.
  for (const Sums& part : sums) {
    for (int64_t k = 0; k < G; k++) {
      s.dbias[k] += part.bias[k];
      s.dgain_input[k] += part.gain_input[k];
      s.dgain_recurrent[k] += part.gain_recurrent[k];
    }
    for (int64_t j = 0; j < H; j++) {
      s.dbias_hn[j] += part.bias_hn[j];
      s.dgain_out[j] += part.gain_out[j];
      s.dshift_out[j] += part.shift_out[j];
    }
  }
}

template <class T>
void pack(const T* from, int64_t row, int64_t column, int64_t K, int64_t N, T* to, int64_t threads,
          const Center& center) {
  const int64_t panels = (N + WIDTH * L - 1) / (WIDTH * L);
  threads = threads_for(threads, std::min(panels, K * N / 65536 + 1));
  in_parallel(threads, [&](int64_t i) {
    for (int64_t p = panels * i / threads; p < panels * (i + 1) / threads; p++) {
      const int64_t n = p * WIDTH * L, columns = std::min(WIDTH * L, N - n);
      pack_panel(from, row, column, K, n, columns, to + n * padded<T>(K), center);
    }
  });
}

}  // namespace

extern "C" {

// Changes with every change of the structures and functions below.
int64_t ln_zoo_abi() { return 4; }

// Numbers that a packed (K, N) takes.
int64_t ln_zoo_packed_size(int64_t K, int64_t N, int64_t narrow) {
  return (narrow ? padded<bfloat>(K) : K) * ((N + L - 1) / L * L);
}

// Packs a (K, N) matrix with strides; `to` begins at a cache line. `means` may be null (see
// Center).
void ln_zoo_pack(const void* from, int64_t row, int64_t column, int64_t K, int64_t N, void* to,
                 int64_t narrow, const float* means, int64_t hidden, int64_t transposed,
                 int64_t threads) {
  const Center center{means, hidden, transposed ? K : N, transposed != 0};
  if (narrow) {
    pack(static_cast<const bfloat*>(from), row, column, K, N, static_cast<bfloat*>(to), threads,
         Center{});
  } else {
    pack(static_cast<const float*>(from), row, column, K, N, static_cast<float*>(to), threads,
         center);
  }
}

// Means of the rows of a weight (gates * hidden, F) over each group, for every gate: (gates, F).
// groups[q] is the first gate that shares statistics with gate q.
void ln_zoo_means(const float* w, int64_t gates, int64_t hidden, int64_t F, const int64_t* groups,
                  float* means) {
  for (int64_t q = 0, end; q < gates; q = end) {
    for (end = q + 1; end < gates && groups[end] == q; end++) {
    }
    float* mean = means + q * F;
    std::fill(mean, mean + F, 0.0f);
    for (int64_t k = q * hidden; k < end * hidden; k++) {
      for (int64_t j = 0; j < F; j++) mean[j] += w[k * F + j];
    }
    for (int64_t j = 0; j < F; j++) mean[j] /= float((end - q) * hidden);
    for (int64_t k = q + 1; k < end; k++) std::memcpy(means + k * F, mean, 4 * F);
  }
}

// C (M, N) = A (M, K) B, or C += A B, with A by its strides, B packed, C's rows `ldc` apart.
void ln_zoo_product(int64_t M, int64_t N, int64_t K, const float* a, int64_t row, int64_t column,
                    const float* packed, float* c, int64_t ldc, int64_t add, int64_t threads) {
  const int64_t blocks = (M + HEIGHT - 1) / HEIGHT;
  threads = threads_for(threads, std::min(blocks, M * N * K / 65536 + 1));
  in_parallel(threads, [&](int64_t i) {
    const int64_t m0 = blocks * i / threads * HEIGHT;
    const int64_t m1 = std::min(M, blocks * (i + 1) / threads * HEIGHT);
    const Left<float> left{a + m0 * row, row, column};
    product(m1 - m0, N, K, left, packed, c + m0 * ldc, ldc, add);
  });
}

void ln_zoo_forward(const Steps* s) { s->narrow ? forward<bfloat>(*s) : forward<float>(*s); }

void ln_zoo_backward(const Steps* s) { s->narrow ? backward<bfloat>(*s) : backward<float>(*s); }

// The same for a layer whose steps read the window of the step before; v comes without its part.
void ln_zoo_window_forward(const Steps* s, const Window* window) { forward<float>(*s, window); }

void ln_zoo_window_backward(const Steps* s, const Window* window) { backward<float>(*s, window); }

}  // extern "C"

// Calls of one chunk or a single step, in float32: all of one direction of one layer at once, from
// tensors as layers have them. What a small layer costs is what its caller does in between.

extern "C" {

// What does not change from call to call.
struct Call {
  int64_t cell, steps, examples, inputs, hidden, threads;
  Rows input, recurrent, out;
};

// Null where there is none: biases and gains of 0 and 1, states of 0, nothing kept, a gradient of 0
// or one that nobody wants.
struct Tensors {
  const float *x, *h0, *c0;                                      // (rows, I), (N, H), (N, H)
  const float *w_ih, *w_hh;                                      // (G, I), (G, H)
  const float *bias_ih, *bias_hh, *gain_input, *gain_recurrent;  // (G,)
  const float *gain_out, *shift_out;                             // (H,)
  // (rows, H), not wanted of a single step; (N, H), (N, H), (ln_zoo_call_keeps(),)
  float *output, *h, *c, *kept;
  const float *d_output, *d_h, *d_c;  // the backward alone, as are all below
  float *dx, *dh0, *dc0, *dw_ih, *dw_hh, *dbias_ih, *dbias_hh;
  float *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out;
};

}  // extern "C"

namespace {

// Rows up to which reading the weights is what costs, and packing them does not pay.
constexpr int64_t FEW_ROWS = 4;

// y[n][i] = w[i] . x[n], for ROWS rows of a matrix (., K) and N vectors x.
template <int ROWS>
inline void dot_products(const float* w, const float* x, int64_t N, int64_t K, float* y,
                         int64_t stride) {
  for (int64_t n = 0; n < N; n++, x += K, y += stride) {
    vec even[ROWS] = {}, odd[ROWS] = {};
    int64_t k = 0;
    for (; k + 2 * L <= K; k += 2 * L) {
      const vec a = load(x + k), b = load(x + k + L);
      for (int i = 0; i < ROWS; i++) {
        even[i] += load(w + i * K + k) * a;
        odd[i] += load(w + i * K + k + L) * b;
      }
    }
    for_units(K - k, [&](int64_t j, auto block) {
      const vec a = block.read(x + k + j);
      for (int i = 0; i < ROWS; i++) even[i] += block.read(w + i * K + k + j) * a;
    });
    for (int i = 0; i < ROWS; i++) y[i] = total(even[i] + odd[i]);
  }
}

// Threads for a matrix of so many numbers, and the rows or columns of each.
template <class Body>
void by_parts(int64_t wanted, int64_t numbers, int64_t n, Body body) {
  const int64_t threads = threads_for(wanted, numbers / 131072 + 1);
  in_parallel(threads, [&](int64_t i) { body(n * i / threads, n * (i + 1) / threads); });
}

// y (N, G) = x (N, K) w^T, for a few rows and w (G, K) as it is.
void few_by_transposed(int64_t N, int64_t G, int64_t K, const float* x, const float* w, float* y,
                       int64_t threads) {
  constexpr int ROWS = 4;
  by_parts(threads, G * K, G, [&](int64_t from, int64_t to) {
    int64_t i = from;
    for (; i + ROWS <= to; i += ROWS) dot_products<ROWS>(w + i * K, x, N, K, y + i, G);
    for (; i < to; i++) dot_products<1>(w + i * K, x, N, K, y + i, G);
  });
}

// y (N, K) = d (N, G) w, or y += d w, for a few rows and w (G, K) as it is.
void few_by_matrix(int64_t N, int64_t G, int64_t K, const float* d, const float* w, float* y,
                   bool add, int64_t threads) {
  constexpr int64_t AT_ONCE = 4;
  by_parts(threads, G * K, K, [&](int64_t from, int64_t to) {
    for (int64_t n = 0; n < N && !add; n++) std::fill(y + n * K + from, y + n * K + to, 0.0f);
    for (int64_t g = 0; g < G; g += AT_ONCE) {
      const int64_t count = std::min(AT_ONCE, G - g);
      for (int64_t n = 0; n < N; n++) {
        float* to_row = y + n * K + from;
        vec factors[AT_ONCE] = {};
        for (int64_t i = 0; i < count; i++) factors[i] = all(d[n * G + g + i]);
        for_units(to - from, [&](int64_t j, auto block) {
          vec sum = block.read(to_row + j);
          for (int64_t i = 0; i < count; i++) {
            sum += factors[i] * block.read(w + (g + i) * K + from + j);
          }
          block.write(to_row + j, sum);
        });
      }
    }
  });
}

// w (G, K) = d^T a, for a few rows d (N, G) and a (N, K).
void few_outer(int64_t N, int64_t G, int64_t K, const float* d, const float* a, float* w,
               int64_t threads) {
  by_parts(threads, G * K, G, [&](int64_t from, int64_t to) {
    for (int64_t g = from; g < to; g++) {
      vec factors[FEW_ROWS];
      for (int64_t n = 0; n < N; n++) factors[n] = all(d[n * G + g]);
      for_units(K, [&](int64_t j, auto block) {
        vec sum = factors[0] * block.read(a + j);
        for (int64_t n = 1; n < N; n++) sum += factors[n] * block.read(a + n * K + j);
        block.write(w + g * K + j, sum);
      });
    }
  });
}

// Takes the mean off each group, where rows are centred.
void center(const Rows& rows, float* a, int64_t gates, int64_t H) {
  if (!rows.scale || !rows.center) return;
  for (int64_t q = 0, end; q < gates; q = end) {
    end = group_end(rows, gates, q);
    const int64_t n = (end - q) * H;
    vec sum{};
    for_units(n, [&](int64_t j, auto block) { sum += block.read(a + q * H + j); });
    const vec mean = all(total(sum) / float(n));
    for_units(n, [&](int64_t j, auto block) {
      block.write(a + q * H + j, block.read(a + q * H + j) - mean);
    });
  }
}

// Memory for the time of one call, of which a thread keeps as much for the next one unless it is
// large. Pieces begin at cache lines.
class Arena {
 public:
  ~Arena() {
    if (used_ > int64_t(kept().size()) && used_ <= KEPT) kept().resize(used_);
  }
  float* take(int64_t n) {
    n = (n + LINE - 1) / LINE * LINE + LINE;
    float* found;
    if (used_ + n <= int64_t(kept().size())) {
      found = kept().data() + used_;
    } else {
      more_.emplace_back(n);
      found = more_.back().data();
    }
    used_ += n;
    return found + (-(reinterpret_cast<intptr_t>(found) / 4) & (LINE - 1));
  }

 private:
  static constexpr int64_t LINE = 16, KEPT = 1 << 24;
  static std::vector<float>& kept() {
    thread_local std::vector<float> memory;
    return memory;
  }
  std::vector<std::vector<float>> more_;
  int64_t used_ = 0;
};

// One call, there or back: its arguments as `forward` and `backward` take them.
class Direction {
 public:
  Direction(const Call& call, const Tensors& tensors)
      : a(call),
        t(tensors),
        sizes_(call.steps, call.examples),
        s(steps()),
        shape(s),
        rows(a.steps * a.examples),
        few(rows <= FEW_ROWS),
        merged(shape.gates == 1) {
    const int64_t G = shape.G, H = shape.H;
    float *ones = arena.take(G), *zeros = arena.take(G);
    float *bias = arena.take(G), *bias_hn = arena.take(H);
    std::fill(ones, ones + G, 1.0f), std::fill(zeros, zeros + G, 0.0f);
    const int64_t both = a.cell == GRU ? 2 * H : G;
    for (int64_t k = 0; k < G; k++) {
      bias[k] = (t.bias_ih ? t.bias_ih[k] : 0) + (t.bias_hh && k < both ? t.bias_hh[k] : 0);
    }
    for (int64_t j = 0; j < H; j++) {
      bias_hn[j] = a.cell == GRU && t.bias_hh ? t.bias_hh[2 * H + j] : 0;
    }
    s.bias = bias, s.bias_hn = bias_hn;
    s.gain_input = t.gain_input ? t.gain_input : ones;
    s.gain_recurrent = t.gain_recurrent ? t.gain_recurrent : ones;
    s.gain_out = t.gain_out ? t.gain_out : ones;
    s.shift_out = t.shift_out ? t.shift_out : zeros;
    float* kept = t.kept ? t.kept : arena.take(rows * (merged ? G : 2 * G));
    s.u = kept;
    s.v = merged ? kept : kept + rows * G;
    kept += rows * (merged ? G : 2 * G);
    if (!t.kept) {
      if (!few) s.u = nullptr;  // products stay in the cache
      return;
    }
    if (a.cell == LSTM) s.cells = kept, kept += rows * H;
    s.stats = kept;
  }

  static int64_t keeps(const Call& a) {
    const int64_t gates = a.cell == LSTM ? 4 : a.cell == GRU ? 3 : 1;
    const int64_t products = gates == 1 ? 1 : 2 * gates;
    return a.steps * a.examples * ((products + (a.cell == LSTM)) * a.hidden + STATS);
  }

  void forward() {
    const int64_t N = a.examples, H = shape.H, G = shape.G, I = a.inputs;
    float* const output = t.output ? t.output : arena.take(rows * H);
    s.output = output, s.h = t.h, s.c = t.c;
    start(t.h, t.h0), start(t.c, t.c0);
    if (!few) {
      const float* packed = pack(t.w_ih, I, first(), true);
      ln_zoo_product(rows, G, I, t.x, I, 1, packed, static_cast<float*>(s.v), G, false, a.threads);
      s.weight = pack(t.w_hh, H, second(), true);
      ::forward<float>(s);
      return;
    }
    float* v = merged ? arena.take(rows * G) : static_cast<float*>(s.v);
    float *u = static_cast<float*>(s.u), *scratch = arena.take(H), unused[STATS];
    few_by_transposed(rows, G, I, t.x, t.w_ih, v, a.threads);
    for (int64_t step = 0; step < a.steps; step++) {
      few_by_transposed(N, G, H, t.h, t.w_hh, u, a.threads);
      for (int64_t n = 0; n < N; n++, u += G, v += G) {
        const int64_t row = step * N + n;
        if (merged) {
          for (int64_t k = 0; k < G; k++) u[k] += v[k];
        } else {
          center(s.input, v, shape.gates, H), center(s.recurrent, u, shape.gates, H);
        }
        float *h = t.h + n * H, *c = t.c ? t.c + n * H : nullptr;
        forward_row(s, shape, v, u, h, c, s.stats ? s.stats + row * STATS : unused, scratch);
        copy(h, H, output + row * H);
        if (s.cells) copy(c, H, s.cells + row * H);
      }
    }
  }

  void backward() {
    const int64_t N = a.examples, H = shape.H, G = shape.G, I = a.inputs;
    float *h_prev = before(t.h0, t.output), *du = arena.take(rows * G);
    float* dv = merged ? du : arena.take(rows * G);
    s.output_gradient = t.d_output, s.h_prev = h_prev, s.du = du, s.dv = dv;
    s.dh = t.dh0 ? t.dh0 : arena.take(N * H);
    start(s.dh, t.d_h);
    if (a.cell == LSTM) {
      s.c_prev = before(t.c0, s.cells);
      s.dc = t.dc0 ? t.dc0 : arena.take(N * H);
      start(s.dc, t.d_c);
    }
    float** const sums[] = {&s.dbias,    &s.dgain_input, &s.dgain_recurrent,
                            &s.dbias_hn, &s.dgain_out,   &s.dshift_out};
    for (float** sum : sums) {
      *sum = arena.take(G);
      std::fill(*sum, *sum + G, 0.0f);
    }
    // The adjoint of a centred row has mean zero: products with weights as they are do as well.
    if (few) {
      few_steps_back();
    } else {
      s.weight = pack(t.w_hh, H, Rows{}, false);
      ::backward<float>(s);
    }
    const auto copy_to = [](float* to, const float* from, int64_t n) {
      if (to) copy(from, n, to);
    };
    copy_to(t.dbias_ih, s.dbias, G);
    copy_to(t.dbias_hh, s.dbias, a.cell == GRU ? 2 * H : G);
    if (a.cell == GRU && t.dbias_hh) copy(s.dbias_hn, H, t.dbias_hh + 2 * H);
    copy_to(t.dgain_input, s.dgain_input, G), copy_to(t.dgain_recurrent, s.dgain_recurrent, G);
    copy_to(t.dgain_out, s.dgain_out, H), copy_to(t.dshift_out, s.dshift_out, H);
    weight_gradient(du, h_prev, H, t.dw_hh);
    weight_gradient(dv, t.x, I, t.dw_ih);
    if (t.dx && few) few_by_matrix(rows, G, I, dv, t.w_ih, t.dx, false, a.threads);
    if (t.dx && !few) {
      const float* packed = pack(t.w_ih, I, Rows{}, false);
      ln_zoo_product(rows, I, G, dv, G, 1, packed, t.dx, I, false, a.threads);
    }
  }

 private:
  const Call& a;
  const Tensors& t;
  std::vector<int64_t> sizes_;
  Steps s;
  const Shape shape;
  const int64_t rows;
  const bool few, merged;
  Arena arena;

  Steps steps() const {
    Steps s{};
    s.cell = a.cell, s.steps = a.steps, s.examples = a.examples, s.hidden = a.hidden;
    s.threads = a.threads, s.sizes = sizes_.data();
    s.input = a.input, s.recurrent = a.recurrent, s.out = a.out;
    return s;
  }

  Rows first() const { return merged ? a.out : a.input; }
  Rows second() const { return merged ? a.out : a.recurrent; }

  void start(float* to, const float* from) const {
    const int64_t n = a.examples * shape.H;
    if (!to) return;
    if (from)
      copy(from, n, to);
    else
      std::fill(to, to + n, 0.0f);
  }

  // What each row had in the step before.
  float* before(const float* at_first, const float* after) {
    const int64_t n = a.examples * shape.H;
    float* found = arena.take(rows * shape.H);
    start(found, at_first);
    if (a.steps > 1) copy(after, rows * shape.H - n, found + n);
    return found;
  }

  // A weight (G, K), or its transpose, centred by rows.
  const float* pack(const float* w, int64_t K, const Rows& rows, bool transposed) {
    const int64_t G = shape.G;
    float* means = nullptr;
    if (rows.scale && rows.center) {
      means = arena.take(shape.gates * K);
      ln_zoo_means(w, shape.gates, shape.H, K, rows.groups, means);
    }
    const int64_t k = transposed ? K : G, n = transposed ? G : K;
    float* to = arena.take(ln_zoo_packed_size(k, n, 0));
    ln_zoo_pack(w, transposed ? 1 : K, transposed ? K : 1, k, n, to, 0, means, shape.H, transposed,
                a.threads);
    return to;
  }

  void weight_gradient(const float* d, const float* of, int64_t K, float* w) {
    const int64_t G = shape.G;
    if (!w) return;
    if (few) return few_outer(rows, G, K, d, of, w, a.threads);
    float* to = arena.take(ln_zoo_packed_size(rows, K, 0));
    ln_zoo_pack(of, K, 1, rows, K, to, 0, nullptr, 1, 0, a.threads);
    ln_zoo_product(G, K, rows, d, 1, G, to, w, K, false, a.threads);
  }

  void few_steps_back() {
    const int64_t N = a.examples, H = shape.H, G = shape.G;
    float *scratch = arena.take(4 * H), *zeros = arena.take(H);
    std::fill(zeros, zeros + H, 0.0f);
    Sums sums(shape);
    const float *v = static_cast<const float*>(s.v), *u = static_cast<const float*>(s.u);
    const float* h_prev = static_cast<const float*>(s.h_prev);
    float *du = static_cast<float*>(s.du), *dv = static_cast<float*>(s.dv);
    for (int64_t step = a.steps - 1; step >= 0; step--) {
      for (int64_t n = 0; n < N; n++) {
        const int64_t row = step * N + n, g = row * G, j = row * H;
        backward_row(s, shape, row, n, v + g, u + g, h_prev + j,
                     t.d_output ? t.d_output + j : zeros, s.dh + n * H, dv + g, du + g, sums,
                     scratch);
      }
      few_by_matrix(N, G, H, du + step * N * G, t.w_hh, s.dh, a.cell == GRU, a.threads);
    }
    const float* const found[] = {sums.bias,    sums.gain_input, sums.gain_recurrent,
                                  sums.bias_hn, sums.gain_out,   sums.shift_out};
    float* const to[] = {s.dbias,    s.dgain_input, s.dgain_recurrent,
                         s.dbias_hn, s.dgain_out,   s.dshift_out};
    for (int64_t i = 0; i < 6; i++) copy(found[i], i < 3 ? G : H, to[i]);
  }
};

}  // namespace

extern "C" {

// Numbers that the forward of a call keeps for its backward.
int64_t ln_zoo_call_keeps(const Call* call) { return Direction::keeps(*call); }

void ln_zoo_call_forward(const Call* call, const Tensors* t) { Direction(*call, *t).forward(); }

void ln_zoo_call_backward(const Call* call, const Tensors* t) { Direction(*call, *t).backward(); }

}  // extern "C"

// Batch normalisation at each time step. Statistics are over examples, so that here threads share
// the units: each takes its units of all cases, and all meet once a step, since the next product
// needs every h, or every du. No number depends on how many threads there are.

// The statistics of one place, a row for each step; null where the place is not normalised.
struct Statistics {
  int64_t batch;      // whether they are the examples' own, which the forward fills in, or given
  float *mean, *var;  // (steps, F); mean null: it is zero; var: the forward's, where `batch`
  float* factor;      // (steps, F): reciprocal deviation
};

// What a call on consecutive steps reads and writes, in float32.
struct BatchSteps {
  int64_t cell, steps, examples, hidden, shares, correction;
  const int64_t* sizes;  // (steps,)
  double eps_recurrent, eps_out;
  Statistics input, recurrent, out;                           // of G, G and H features
  const float *bias, *bias_hn, *gain_input, *gain_recurrent;  // (G,), (H,), (G,), (G,)
  const float *gain_out, *shift_out;                          // (H,)
  const float* weight;                                        // packed by ln_zoo_batch_pack
  // In a simple RNN u is the sum, where v was, and du is dv. What is kept of u is without its mean
  // where that is the examples' own.
  const float* v;    // (rows, G)
  float *u, *cells;  // (rows, G), (rows, H); forward: null where nothing is kept
  // The forward; h and c become the last states.
  float *output, *h, *c;  // (rows, H), (N, H), (N, H)
  // The backward; output_gradient may be null.
  const float *output_gradient, *h_prev, *c_prev;  // (rows, H)
  float *dh, *dc, *du, *dv;                        // (N, H), (N, H), (rows, G), (rows, G)
  float *dbias, *dbias_hn, *dgain_input, *dgain_recurrent, *dgain_out, *dshift_out;
};

namespace {

// The units of one share, and where their numbers lie in rows of G.
struct Team {
  int64_t first, count, gates, H;
  int64_t width() const { return gates * count; }
  int64_t wide(int64_t q) const { return q * H + first; }
};

Team team_of(int64_t share, int64_t shares, int64_t gates, int64_t H) {
  constexpr int64_t grain = 4;  // units, a quarter of a cache line
  const int64_t pieces = (H + grain - 1) / grain;
  const int64_t from = std::min(H, pieces * share / shares * grain);
  return {from, std::min(H, pieces * (share + 1) / shares * grain) - from, gates, H};
}

int64_t gates_of(int64_t cell) { return cell == LSTM ? 4 : cell == GRU ? 3 : 1; }

// Floats that the packed columns of one share take.
int64_t packed_columns(int64_t K, int64_t N) { return K * ((N + L - 1) / L * L); }

// Runs first(share, t) for all shares, then second(share, t), step by step. The threads may be
// fewer than the shares.
template <class First, class Second>
void by_steps(int64_t shares, int64_t steps, bool backwards, First first, Second second) {
  const auto run = [&](int64_t thread, int64_t threads, auto meet) {
    for (int64_t k = 0; k < steps; k++) {
      const int64_t t = backwards ? steps - 1 - k : k;
      for (int64_t i = thread; i < shares; i += threads) first(i, t);
      meet();
      for (int64_t i = thread; i < shares; i += threads) second(i, t);
    }
  };
#ifdef _OPENMP
  if (threads_for(shares, shares) > 1) {
#pragma omp parallel num_threads(int(shares))
    run(omp_get_thread_num(), omp_get_num_threads(), [] {
#pragma omp barrier
    });
    return;
  }
#endif
  run(0, 1, [] {});
}

// Mean, biased variance and reciprocal deviation of each column of a (n, width) block, rows
// `stride` apart; a mean of null stands for zeros, which then are not looked for.
void column_statistics(const float* a, int64_t n, int64_t stride, int64_t width, double eps,
                       int64_t correction, float* mean, float* var, float* factor) {
  const float share = 1.0f / float(n), spread = float(n) / float(n - correction);
  if (mean) {
    std::fill(mean, mean + width, 0.0f);
    for (int64_t i = 0; i < n; i++) {
      for_units(width, [&](int64_t j, auto block) {
        block.write(mean + j, block.read(mean + j) + block.read(a + i * stride + j));
      });
    }
    for (int64_t j = 0; j < width; j++) mean[j] *= share;
  }
  std::fill(var, var + width, 0.0f);
  for (int64_t i = 0; i < n; i++) {
    for_units(width, [&](int64_t j, auto block) {
      vec d = block.read(a + i * stride + j);
      if (mean) d -= block.read(mean + j);
      block.write(var + j, block.read(var + j) + d * d);
    });
  }
  const float small = float(eps);
  for (int64_t j = 0; j < width; j++) {
    var[j] *= share;
    factor[j] = 1.0f / std::sqrt(var[j] * spread + small);
  }
}

// Means and reciprocal deviations at a place and step, of all its features.
struct Place {
  const float *mean, *factor;
};

Place place(const Statistics& s, int64_t t, int64_t features, const float* zeros,
            const float* ones) {
  return {s.mean ? s.mean + t * features : zeros, s.factor ? s.factor + t * features : ones};
}

// Fills in the statistics of step t, for a share's units of each gate of (n, ...) rows.
void gather(const BatchSteps& s, const Statistics& to, int64_t t, double eps, const Team& team,
            int64_t gates, const float* a, int64_t n, int64_t stride) {
  if (!to.batch) return;
  for (int64_t q = 0; q < gates; q++) {
    const int64_t k = t * gates * team.H + team.wide(q);
    column_statistics(a + q * team.count, n, stride, team.count, eps, s.correction, to.mean + k,
                      to.var + k, to.factor + k);
  }
}

// What the forward does to n examples once the products are there. `u` is the thread's (n, width).
void batch_lstm(const BatchSteps& s, const Team& team, const Place& pv, const Place& pu, int64_t n,
                const float* v, const float* u, float* c, float* o) {
  const int64_t G = 4 * team.H, w = team.count;
  for (int64_t i = 0; i < n; i++) {
    for_units(w, [&](int64_t j, auto block) {
      vec p[4];
      for (int64_t q = 0; q < 4; q++) {
        const int64_t k = team.wide(q) + j;
        vec a = (block.read(v + i * G + k) - block.read(pv.mean + k)) * block.read(pv.factor + k);
        vec b = (block.read(u + i * 4 * w + q * w + j) - block.read(pu.mean + k)) *
                block.read(pu.factor + k);
        p[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a +
               block.read(s.gain_recurrent + k) * b;
      }
      float* state = c + i * team.H + team.first + j;
      block.write(state,
                  sigmoid(p[1]) * block.read(state) + sigmoid(p[0]) * hyperbolic_tangent(p[2]));
      block.write(o + i * w + j, sigmoid(p[3]));
    });
  }
}

void batch_lstm_out(const BatchSteps& s, const Team& team, const Place& pc, int64_t n,
                    const float* c, const float* o, float* h) {
  for (int64_t i = 0; i < n; i++) {
    for_units(team.count, [&](int64_t j, auto block) {
      const int64_t k = team.first + j;
      vec a =
          (block.read(c + i * team.H + k) - block.read(pc.mean + k)) * block.read(pc.factor + k);
      vec z = block.read(s.gain_out + k) * a + block.read(s.shift_out + k);
      block.write(h + i * team.H + k, block.read(o + i * team.count + j) * hyperbolic_tangent(z));
    });
  }
}

void batch_gru(const BatchSteps& s, const Team& team, const Place& pv, const Place& pu, int64_t n,
               const float* v, const float* u, float* h) {
  const int64_t G = 3 * team.H, w = team.count;
  for (int64_t i = 0; i < n; i++) {
    for_units(w, [&](int64_t j, auto block) {
      vec x[3], y[3];
      for (int64_t q = 0; q < 3; q++) {
        const int64_t k = team.wide(q) + j;
        vec a = (block.read(v + i * G + k) - block.read(pv.mean + k)) * block.read(pv.factor + k);
        vec b = (block.read(u + i * 3 * w + q * w + j) - block.read(pu.mean + k)) *
                block.read(pu.factor + k);
        x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a;
        y[q] = block.read(s.gain_recurrent + k) * b;
      }
      float* state = h + i * team.H + team.first + j;
      vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
      vec c = hyperbolic_tangent(x[2] + reset * (y[2] + block.read(s.bias_hn + team.first + j)));
      block.write(state, c + update * (block.read(state) - c));
    });
  }
}

void batch_rnn(const BatchSteps& s, const Team& team, const Place& p, int64_t n, const float* u,
               float* h) {
  const vec zero{};
  for (int64_t i = 0; i < n; i++) {
    for_units(team.count, [&](int64_t j, auto block) {
      const int64_t k = team.first + j;
      vec a =
          (block.read(u + i * team.count + j) - block.read(p.mean + k)) * block.read(p.factor + k);
      vec z = block.read(s.gain_out + k) * a + block.read(s.bias + k);
      vec next = s.cell == RNN_RELU ? (z <= zero ? zero : z) : hyperbolic_tangent(z);
      block.write(h + i * team.H + k, next);
    });
  }
}

// Adds the columns of (n, count) blocks d and d a to sums over this step, and those to `bias` and
// `gain`; afterwards the sums hold the two means of the adjoint, with the gain in them.
struct ColumnSums {
  std::vector<float> d, da;
  explicit ColumnSums(int64_t width) : d(width), da(width) {}
  void clear() {
    std::fill(d.begin(), d.end(), 0.0f);
    std::fill(da.begin(), da.end(), 0.0f);
  }
  template <class Block>
  void add(Block block, int64_t j, vec d_j, vec a) {
    block.write(d.data() + j, block.read(d.data() + j) + d_j);
    block.write(da.data() + j, block.read(da.data() + j) + d_j * a);
  }
  void finish(int64_t from, int64_t count, bool computed, int64_t n, int64_t correction,
              const float* gain, float* bias_sum, float* gain_sum) {
    for (int64_t j = 0; j < count; j++) {
      float &x = d[from + j], &y = da[from + j];
      if (bias_sum) bias_sum[j] += x;
      gain_sum[j] += y;
      x = computed ? gain[j] * x / float(n) : 0.0f;
      y = computed ? gain[j] * y / float(n - correction) : 0.0f;
    }
  }
};

// du (or dv) = factor (gain p - mean - a mean_a) for one thread's units of one gate.
void batch_adjoint(int64_t n, int64_t count, const float* gain, const Place& at, int64_t k,
                   const float* mean, const float* mean_a, const float* a, int64_t a_stride,
                   const float* p, int64_t p_stride, float* to, int64_t stride) {
  for (int64_t i = 0; i < n; i++) {
    for_units(count, [&](int64_t j, auto block) {
      vec r = block.read(at.factor + k + j);
      vec x = (block.read(a + i * a_stride + j) - block.read(at.mean + k + j)) * r;
      vec d = block.read(gain + k + j) * block.read(p + i * p_stride + j);
      block.write(to + i * stride + j, r * (d - block.read(mean + j) - x * block.read(mean_a + j)));
    });
  }
}

void batch_forward(const BatchSteps& s) {
  const int64_t gates = gates_of(s.cell), H = s.hidden, G = gates * H;
  const std::vector<float> zeros(G), ones(G, 1.0f);
  struct Own {
    Team team;
    const float* weight;
    std::vector<float> u, o;
  };
  std::vector<Own> owns;
  const float* weight = s.weight;
  for (int64_t i = 0; i < s.shares; i++) {
    const Team team = team_of(i, s.shares, gates, H);
    owns.push_back({team, weight, std::vector<float>(s.examples * team.width()),
                    std::vector<float>(s.examples * team.count)});
    weight += packed_columns(H, team.width());
  }
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  const auto step = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const Team& team = own.team;
    const int64_t n = s.sizes[t], w = team.count, W = team.width();
    const float* before = t ? s.output + offsets[t - 1] * H : s.h;
    const float* v = s.v + offsets[t] * G;
    float *u = own.u.data(), *out = s.output + offsets[t] * H;
    product(n, W, H, Left<float>{before, H, 1}, own.weight, u, W, false);
    if (gates == 1) {
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          block.write(u + i * w + j,
                      block.read(u + i * w + j) + block.read(v + i * G + team.first + j));
        });
      }
    }
    const Place pv = place(s.input, t, G, zeros.data(), ones.data());
    const Place pu = place(s.recurrent, t, G, zeros.data(), ones.data());
    const Place pc = place(s.out, t, H, zeros.data(), ones.data());
    if (s.cell == LSTM) {
      gather(s, s.recurrent, t, s.eps_recurrent, team, 4, u, n, W);
      batch_lstm(s, team, pv, pu, n, v, u, s.c, own.o.data());
      gather(s, s.out, t, s.eps_out, team, 1, s.c + team.first, n, H);
      batch_lstm_out(s, team, pc, n, s.c, own.o.data(), out);
    } else if (s.cell == GRU) {
      gather(s, s.recurrent, t, s.eps_recurrent, team, 3, u, n, W);
      for (int64_t i = 0; i < n; i++) {
        std::memcpy(out + i * H + team.first, before + i * H + team.first, 4 * w);
      }
      batch_gru(s, team, pv, pu, n, v, u, out);
    } else {
      gather(s, s.out, t, s.eps_out, team, 1, u, n, W);
      batch_rnn(s, team, pc, n, u, out);
    }
    if (!s.u) return;
    const bool centered = gates == 1 ? s.out.batch : s.recurrent.batch;
    const float* mean = !centered ? zeros.data() : gates == 1 ? pc.mean : pu.mean;
    for (int64_t i = 0; i < n; i++) {
      for (int64_t q = 0; q < gates; q++) {
        const int64_t k = team.wide(q);
        for_units(w, [&](int64_t j, auto block) {
          block.write(s.u + (offsets[t] + i) * G + k + j,
                      block.read(u + i * W + q * w + j) - block.read(mean + k + j));
        });
      }
      if (s.cells) {
        std::memcpy(s.cells + (offsets[t] + i) * H + team.first, s.c + i * H + team.first, 4 * w);
      }
    }
  };
  by_steps(s.shares, s.steps, false, step, [](int64_t, int64_t) {});
  // Each example's last output is its last state.
  for (int64_t t = 0; t < s.steps; t++) {
    const int64_t from = t + 1 < s.steps ? s.sizes[t + 1] : 0;
    std::memcpy(s.h + from * H, s.output + (offsets[t] + from) * H, 4 * H * (s.sizes[t] - from));
  }
}

void batch_backward(const BatchSteps& s) {
  const int64_t gates = gates_of(s.cell), H = s.hidden, G = gates * H, N = s.examples;
  const std::vector<float> zeros(G), ones(G, 1.0f);
  struct Own {
    Team team;
    const float* weight;
    // Of every example: gates, the gradient after the output's norm, and what goes into the sums.
    std::vector<float> act, e, dp, dq;
    ColumnSums sv, su, sc;
  };
  std::vector<Own> owns;
  const float* weight = s.weight;
  for (int64_t i = 0; i < s.shares; i++) {
    const Team team = team_of(i, s.shares, gates, H);
    const int64_t w = team.count, W = team.width();
    const auto rows = [&](int64_t width) { return std::vector<float>(N * width); };
    owns.push_back({team, weight, rows(3 * w), rows(w), rows(W), rows(W), ColumnSums(W),
                    ColumnSums(W), ColumnSums(w)});
    weight += packed_columns(G, w);
  }
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  const auto step = [&](int64_t share, int64_t t) {
    Own& own = owns[share];
    const Team& team = own.team;
    const int64_t w = team.count, W = team.width(), first = team.first;
    std::vector<float>&act = own.act, &e = own.e, &dp = own.dp, &dq = own.dq;
    ColumnSums &sv = own.sv, &su = own.su, &sc = own.sc;
    const int64_t n = s.sizes[t], row = offsets[t];
    const float *v = s.v + row * G, *u = s.u + row * G;
    const float* dout = s.output_gradient ? s.output_gradient + row * H : nullptr;
    const Place pv = place(s.input, t, G, zeros.data(), ones.data());
    const Place pu = place(s.recurrent, t, G, zeros.data(), ones.data());
    const Place pc = place(s.out, t, H, zeros.data(), ones.data());
    const bool of_v = s.input.batch, of_u = s.recurrent.batch, of_c = s.out.batch;
    sv.clear(), su.clear(), sc.clear();
    const auto normal = [&](auto block, const Place& at, const float* a, int64_t k) {
      return (block.read(a + k) - block.read(at.mean + k)) * block.read(at.factor + k);
    };
    const auto gradient = [&](auto block, int64_t i, int64_t k) {
      vec d = block.read(s.dh + i * H + k);
      return dout ? d + block.read(dout + i * H + k) : d;
    };
    if (s.cell == LSTM) {
      const float *c = s.cells + row * H, *c_prev = s.c_prev + row * H;
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec p[4];
          for (int64_t q = 0; q < 4; q++) {
            const int64_t k = team.wide(q) + j;
            p[q] = block.read(s.bias + k) +
                   block.read(s.gain_input + k) * normal(block, pv, v + i * G, k) +
                   block.read(s.gain_recurrent + k) * normal(block, pu, u + i * G, k);
          }
          vec o = sigmoid(p[3]), a = normal(block, pc, c + i * H, unit);
          vec tau = hyperbolic_tangent(block.read(s.gain_out + unit) * a +
                                       block.read(s.shift_out + unit));
          float* at = act.data() + i * 3 * w + j;
          block.write(at, sigmoid(p[0]));
          block.write(at + w, sigmoid(p[1]));
          block.write(at + 2 * w, hyperbolic_tangent(p[2]));
          vec d = gradient(block, i, unit), dm = d * o * (1.0f - tau * tau);
          sc.add(block, j, dm, a);
          block.write(e.data() + i * w + j, dm);
          block.write(dp.data() + i * W + 3 * w + j, d * tau * o * (1.0f - o));
        });
      }
      sc.finish(0, w, of_c, n, s.correction, s.gain_out + first, s.dshift_out + first,
                s.dgain_out + first);
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec a = normal(block, pc, c + i * H, unit), r = block.read(pc.factor + unit);
          vec dm = block.read(s.gain_out + unit) * block.read(e.data() + i * w + j);
          float* dc = s.dc + i * H + unit;
          vec d = block.read(dc) +
                  r * (dm - block.read(sc.d.data() + j) - a * block.read(sc.da.data() + j));
          const float* at = act.data() + i * 3 * w + j;
          vec in = block.read(at), f = block.read(at + w), g = block.read(at + 2 * w);
          block.write(dc, d * f);
          float* to = dp.data() + i * W + j;
          const vec p[4] = {d * g * in * (1.0f - in),
                            d * block.read(c_prev + i * H + unit) * f * (1.0f - f),
                            d * in * (1.0f - g * g), block.read(to + 3 * w)};
          for (int64_t q = 0; q < 4; q++) {
            const int64_t k = team.wide(q) + j;
            block.write(to + q * w, p[q]);
            sv.add(block, q * w + j, p[q], normal(block, pv, v + i * G, k));
            su.add(block, q * w + j, p[q], normal(block, pu, u + i * G, k));
          }
        });
      }
    } else if (s.cell == GRU) {
      const float* h_prev = s.h_prev + row * H;
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec a[3], b[3], x[3], y[3];
          for (int64_t q = 0; q < 3; q++) {
            const int64_t k = team.wide(q) + j;
            a[q] = normal(block, pv, v + i * G, k), b[q] = normal(block, pu, u + i * G, k);
            x[q] = block.read(s.bias + k) + block.read(s.gain_input + k) * a[q];
            y[q] = block.read(s.gain_recurrent + k) * b[q];
          }
          y[2] += block.read(s.bias_hn + unit);
          vec reset = sigmoid(x[0] + y[0]), update = sigmoid(x[1] + y[1]);
          vec c = hyperbolic_tangent(x[2] + reset * y[2]), d = gradient(block, i, unit);
          block.write(s.dh + i * H + unit, d * update);
          vec dc = d * (1.0f - update) * (1.0f - c * c);
          vec dz = d * (block.read(h_prev + i * H + unit) - c) * update * (1.0f - update);
          vec dr = dc * y[2] * reset * (1.0f - reset);
          const vec dx[3] = {dr, dz, dc}, dy[3] = {dr, dz, dc * reset};
          for (int64_t q = 0; q < 3; q++) {
            block.write(dp.data() + i * W + q * w + j, dx[q]);
            block.write(dq.data() + i * W + q * w + j, dy[q]);
            sv.add(block, q * w + j, dx[q], a[q]);
            su.add(block, q * w + j, dy[q], b[q]);
          }
        });
      }
      for (int64_t j = 0; j < w; j++) s.dbias_hn[first + j] += su.d[2 * w + j];
    } else {
      const vec zero{};
      for (int64_t i = 0; i < n; i++) {
        for_units(w, [&](int64_t j, auto block) {
          const int64_t unit = first + j;
          vec a = normal(block, pc, u + i * H, unit);
          vec z = block.read(s.gain_out + unit) * a + block.read(s.bias + unit);
          vec tau = hyperbolic_tangent(z), d = gradient(block, i, unit);
          vec p = s.cell == RNN_RELU ? (z > zero ? d : zero) : d * (1.0f - tau * tau);
          block.write(dp.data() + i * w + j, p);
          sc.add(block, j, p, a);
        });
      }
      sc.finish(0, w, of_c, n, s.correction, s.gain_out + first, s.dbias + first,
                s.dgain_out + first);
      batch_adjoint(n, w, s.gain_out, pc, first, sc.d.data(), sc.da.data(), u + first, H, dp.data(),
                    w, s.du + row * G + first, G);
    }
    if (gates > 1) {
      const float* second = s.cell == GRU ? dq.data() : dp.data();
      for (int64_t q = 0; q < gates; q++) {
        const int64_t k = team.wide(q);
        sv.finish(q * w, w, of_v, n, s.correction, s.gain_input + k, s.dbias + k,
                  s.dgain_input + k);
        su.finish(q * w, w, of_u, n, s.correction, s.gain_recurrent + k, nullptr,
                  s.dgain_recurrent + k);
        batch_adjoint(n, w, s.gain_input, pv, k, sv.d.data() + q * w, sv.da.data() + q * w, v + k,
                      G, dp.data() + q * w, W, s.dv + row * G + k, G);
        batch_adjoint(n, w, s.gain_recurrent, pu, k, su.d.data() + q * w, su.da.data() + q * w,
                      u + k, G, second + q * w, W, s.du + row * G + k, G);
      }
    }
  };
  by_steps(s.shares, s.steps, true, step, [&](int64_t share, int64_t t) {
    const Own& own = owns[share];
    const Left<float> du{s.du + offsets[t] * G, G, 1};
    product(s.sizes[t], own.team.count, G, du, own.weight, s.dh + own.team.first, H, s.cell == GRU);
  });
}

}  // namespace

extern "C" {

// Floats that ln_zoo_batch_pack fills.
int64_t ln_zoo_batch_packed_size(int64_t cell, int64_t H, int64_t shares, int64_t backward) {
  int64_t size = 0;
  for (int64_t i = 0; i < shares; i++) {
    const Team team = team_of(i, shares, gates_of(cell), H);
    size += backward ? packed_columns(team.gates * H, team.count) : packed_columns(H, team.width());
  }
  return size;
}

// Packs the recurrent weight (G, H) for the forward or the backward, share by share.
void ln_zoo_batch_pack(int64_t cell, int64_t H, int64_t shares, int64_t backward, const float* w_hh,
                       float* to) {
  for (int64_t i = 0; i < shares; i++) {
    const Team team = team_of(i, shares, gates_of(cell), H);
    if (backward) {
      pack(w_hh + team.first, H, int64_t(1), team.gates * H, team.count, to, shares, Center{});
      to += packed_columns(team.gates * H, team.count);
      continue;
    }
    std::vector<float> rows(team.width() * H);
    for (int64_t q = 0; q < team.gates; q++) {
      std::memcpy(rows.data() + q * team.count * H, w_hh + team.wide(q) * H, 4 * team.count * H);
    }
    pack(rows.data(), int64_t(1), H, H, team.width(), to, shares, Center{});
    to += packed_columns(H, team.width());
  }
}

// Variances and reciprocal deviations of v (rows, G), whose means are zero, over the examples of
// each step.
void ln_zoo_batch_inputs(const BatchSteps* call, const float* v, double eps) {
  const BatchSteps& s = *call;
  const int64_t G = gates_of(s.cell) * s.hidden;
  std::vector<int64_t> offsets(s.steps + 1);
  for (int64_t t = 0; t < s.steps; t++) offsets[t + 1] = offsets[t] + s.sizes[t];
  const int64_t threads = threads_for(s.shares, s.steps);
  in_parallel(threads, [&](int64_t i) {
    for (int64_t t = s.steps * i / threads; t < s.steps * (i + 1) / threads; t++) {
      column_statistics(v + offsets[t] * G, s.sizes[t], G, G, eps, s.correction, nullptr,
                        s.input.var + t * G, s.input.factor + t * G);
    }
  });
}

void ln_zoo_batch_forward(const BatchSteps* s) { batch_forward(*s); }

void ln_zoo_batch_backward(const BatchSteps* s) { batch_backward(*s); }

}  // extern "C"

// DRAW: all that stands between the matrix products of a glimpse (draw.py has the equations). Each
// example is for itself, so that no number depends on how many threads there are, but for the sums
// over examples, which are added in the order of the threads. T stands for what products read and
// write.

extern "C" {

// What is read and written. LSTM 0 is the encoder, whose rows of inputs are [r; decoder's h; own
// h], 1 the decoder, with [z; own h]. Where `kept`, tensors of "slots" hold what belongs to each
// glimpse, (steps + 1,) of them; otherwise two take turns. Slot 0 holds initial states.
struct Draw {
  int64_t narrow, kept, steps, examples, height, width, hidden, latents, read, write;
  int64_t adds_eps;  // whether filters are divided by their sum and eps, or sum to 1
  int64_t chunk, threads;
  double eps, bound;
  Rows norms[2];                              // of the cell states on their way out
  const float *images, *noise;                // (N, B, A), (steps, N, Z)
  const float *bias[2], *gain[2], *shift[2];  // (4H,), (H,), (H,)
  const float* posterior_bias;                // (2Z,)
  void* inputs[2];                            // T (slots, N, I + H)
  float* states;                          // (slots, N, H): the decoder's h; null where T is float
  float* heads;                           // (slots, N, 10 + W^2): read, write, patch
  float *gates[2], *cells[2], *stats[2];  // (slots, N, 4H), (slots, N, H), (slots, N, 2)
  float *canvases, *logits;               // (slots, N, B, A); the last one, (N, B, A)
  float *means, *log_stds;                // (steps, N, Z)
  // The forward alone.
  const void *sums, *posterior;  // T (N, 4H), T (N, 2Z): products; where T is float, the former
                                 // are in `gates`
  int64_t* clamped;              // (threads, 3): numbers beyond the bound
  // The backward alone. Glimpse t has row t % chunk of what is multiplied after a chunk of
  // glimpses; the gradients of means and log_stds may be null.
  const float *means_gradient, *log_stds_gradient;  // (steps, N, Z)
  float *dcanvas, *dheads;                          // (N, B, A), (steps + 1, N, 10 + W^2)
  const float* dstates;                             // (N, H): what dheads makes of h
  float* dcells[2];                                 // (N, H)
  const void *dinputs[2], *dencoded;  // T (N, I + H); (N, H): what dposterior makes of h
  void *dgates[2], *dposterior;       // T (chunk, N, 4H), T (chunk, N, 2Z)
  float* totals;                      // (threads, 12H + 2Z): bias, gain, shift of each, posterior
};

}  // extern "C"

namespace {

enum Which : int64_t { ENCODER, DECODER };
constexpr int64_t NUMBERS = 5;  // that place a patch

struct DrawShape {
  int64_t N, P, H, Z, heads, patches, row[2];
  const Draw& s;
  explicit DrawShape(const Draw& s)
      : N(s.examples),
        P(s.height * s.width),
        H(s.hidden),
        Z(s.latents),
        heads(2 * NUMBERS + s.write * s.write),
        patches(2 * s.read * s.read),
        row{patches + 2 * H, Z + H},
        s(s) {}
  // The row of example n in a tensor of slots.
  int64_t at(int64_t t, int64_t n) const { return (s.kept ? t : t % 2) * N + n; }
  float* canvas(int64_t t, int64_t n) const {
    return t == s.steps ? s.logits + n * P : s.canvases + at(t, n) * P;
  }
  float* totals(int64_t thread) const { return s.totals + thread * (12 * H + 2 * Z); }
};

// Calls body(thread, first, last) for ranges of examples, one for each thread.
template <class Body>
void for_cases(const Draw& s, Body body) {
  const int64_t threads = threads_for(s.threads, s.examples);
  in_parallel(threads, [&](int64_t i) {
    const int64_t first = s.examples * i / threads, last = s.examples * (i + 1) / threads;
    if (first < last) body(i, first, last);
  });
}

template <class T>
void draw_lstm(const Draw& s, int64_t which, int64_t t) {
  const DrawShape shape(s);
  const int64_t H = shape.H, G = 4 * H;
  const float *bias = s.bias[which], *gain = s.gain[which], *shift = s.shift[which];
  for_cases(s, [&](int64_t, int64_t first, int64_t last) {
    std::vector<float> next(H);
    float* const h = next.data();
    for (int64_t n = first; n < last; n++) {
      const int64_t before = shape.at(t, n), after = shape.at(t + 1, n);
      float* gates = s.gates[which] + before * G;
      if constexpr (sizeof(T) == 2) widen(static_cast<const T*>(s.sums) + n * G, G, gates);
      const float* c_prev = s.cells[which] + before * H;
      float* c = s.cells[which] + after * H;
      for_units(H, [&](int64_t j, auto block) {
        vec p[4];
        for (int64_t q = 0; q < 4; q++) {
          p[q] = block.read(gates + q * H + j) + block.read(bias + q * H + j);
        }
        vec i = sigmoid(p[0]), f = sigmoid(p[1]), g = hyperbolic_tangent(p[2]);
        block.write(gates + j, i);
        block.write(gates + H + j, f);
        block.write(gates + 2 * H + j, g);
        block.write(gates + 3 * H + j, sigmoid(p[3]));
        block.write(c + j, f * block.read(c_prev + j) + i * g);
      });
      float* stats = s.stats[which] + before * 2;
      mean_and_deviation(s.norms[which], c, H, stats, stats + 1);
      const vec m = all(stats[0]), r = all(stats[1]);
      for_units(H, [&](int64_t j, auto block) {
        vec a = (block.read(c + j) - m) * r;
        vec z = block.read(gain + j) * a + block.read(shift + j);
        block.write(h + j, block.read(gates + 3 * H + j) * hyperbolic_tangent(z));
      });
      T* encoder = static_cast<T*>(s.inputs[ENCODER]) + after * shape.row[ENCODER] + shape.patches;
      if (which == ENCODER) {
        copy(h, H, encoder + H);
      } else {
        copy(h, H, encoder);
        copy(h, H, static_cast<T*>(s.inputs[DECODER]) + after * shape.row[DECODER] + shape.Z);
        if (s.states) copy(h, H, s.states + after * H);
      }
    }
  });
}

// What flows back into the states of an LSTM comes from all that read them.
template <class T>
void draw_lstm_back(const Draw& s, int64_t which, int64_t t) {
  const DrawShape shape(s);
  const int64_t H = shape.H, G = 4 * H;
  const float *gain = s.gain[which], *shift = s.shift[which];
  for_cases(s, [&](int64_t thread, int64_t first, int64_t last) {
    std::vector<float> memory(3 * H + (sizeof(T) == 2 ? G : 0));
    float *const dh = memory.data(), *const e = dh + H, *const room = e + H;
    float* bias_sum = shape.totals(thread) + which * 6 * H;
    float *gain_sum = bias_sum + G, *shift_sum = gain_sum + H;
    const auto add = [&](const void* from, int64_t offset) {
      const float* a = floats(static_cast<const T*>(from) + offset, H, room);
      for_units(H, [&](int64_t j, auto block) { accumulate(block, dh, j, block.read(a + j)); });
    };
    for (int64_t n = first; n < last; n++) {
      const int64_t encoder = n * shape.row[ENCODER] + shape.patches;
      if (which == ENCODER) {
        std::fill(dh, dh + H, 0.0f);
        add(s.dencoded, n * H);
        add(s.dinputs[ENCODER], encoder + H);
      } else {
        copy(s.dstates + n * H, H, dh);
        add(s.dinputs[ENCODER], encoder);
        add(s.dinputs[DECODER], n * shape.row[DECODER] + shape.Z);
      }
      const int64_t before = shape.at(t, n);
      const float* gates = s.gates[which] + before * G;
      const float* c_prev = s.cells[which] + before * H;
      const float* c = s.cells[which] + shape.at(t + 1, n) * H;
      const float* stats = s.stats[which] + before * 2;
      float* dc = s.dcells[which] + n * H;
      T* to = static_cast<T*>(s.dgates[which]) + (t % s.chunk * shape.N + n) * G;
      float* dp;
      if constexpr (sizeof(T) == 2) {
        dp = room + H;
      } else {
        dp = to;
      }
      const vec m = all(stats[0]), r = all(stats[1]);
      Means means;
      for_units(H, [&](int64_t j, auto block) {
        vec o = block.read(gates + 3 * H + j), d = block.read(dh + j);
        vec a = block.keep((block.read(c + j) - m) * r), factor = block.read(gain + j);
        vec tau = hyperbolic_tangent(factor * a + block.read(shift + j));
        vec dm = d * o * (1.0f - tau * tau);
        accumulate(block, shift_sum, j, dm);
        accumulate(block, gain_sum, j, dm * a);
        block.write(e + j, factor * dm);
        means.add(0, factor * dm, a);
        block.write(dp + 3 * H + j, d * tau * o * (1.0f - o));
      });
      means.finish(s.norms[which], 1, H);
      const vec m1 = all(means.mean_d[0]), m2 = all(means.mean_da[0]);
      for_units(H, [&](int64_t j, auto block) {
        vec a = (block.read(c + j) - m) * r;
        vec d = block.read(dc + j) + r * (block.read(e + j) - m1 - a * m2);
        vec i = block.read(gates + j), f = block.read(gates + H + j);
        vec g = block.read(gates + 2 * H + j);
        block.write(dc + j, d * f);
        const vec p[3] = {d * g * i * (1.0f - i), d * block.read(c_prev + j) * f * (1.0f - f),
                          d * i * (1.0f - g * g)};
        for (int64_t q = 0; q < 3; q++) {
          block.write(dp + q * H + j, p[q]);
          accumulate(block, bias_sum, q * H + j, p[q]);
        }
        accumulate(block, bias_sum, 3 * H + j, block.read(dp + 3 * H + j));
      });
      if constexpr (sizeof(T) == 2) narrow(dp, G, to);
    }
  });
}

template <class T>
void draw_latent(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t Z = shape.Z;
  const vec bound = all(float(s.bound));
  for_cases(s, [&](int64_t thread, int64_t first, int64_t last) {
    std::vector<float> memory(3 * Z);
    float *const wide = memory.data(), *const z = wide + 2 * Z;
    ivec beyond{};
    for (int64_t n = first; n < last; n++) {
      const float* p = floats(static_cast<const T*>(s.posterior) + n * 2 * Z, 2 * Z, wide);
      const int64_t row = (t * shape.N + n) * Z;
      for_units(Z, [&](int64_t j, auto block) {
        vec mean = block.read(p + j) + block.read(s.posterior_bias + j);
        vec spread = block.read(p + Z + j) + block.read(s.posterior_bias + Z + j);
        // A comparison that holds is -1.
        beyond -= (spread > bound) + (spread < -bound);
        spread = spread > bound ? bound : spread;
        spread = spread < -bound ? -bound : spread;
        block.write(s.means + row + j, mean);
        block.write(s.log_stds + row + j, spread);
        block.write(z + j, mean + exponential(spread) * block.read(s.noise + row + j));
      });
      copy(z, Z, static_cast<T*>(s.inputs[DECODER]) + shape.at(t, n) * shape.row[DECODER]);
    }
    for (int64_t i = 0; i < L; i++) s.clamped[3 * thread] += beyond[i];
  });
}

template <class T>
void draw_latent_back(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t Z = shape.Z;
  const vec bound = all(float(s.bound)), zero{};
  for_cases(s, [&](int64_t thread, int64_t first, int64_t last) {
    std::vector<float> memory(4 * Z);
    float *const wide = memory.data(), *const d = wide + Z, *const none = d + 2 * Z;
    float* bias_sum = shape.totals(thread) + 12 * shape.H;
    for (int64_t n = first; n < last; n++) {
      const T* from = static_cast<const T*>(s.dinputs[DECODER]) + n * shape.row[DECODER];
      const float* dz = floats(from, Z, wide);
      const int64_t row = (t * shape.N + n) * Z;
      const float* dmean = s.means_gradient ? s.means_gradient + row : none;
      const float* dspread = s.log_stds_gradient ? s.log_stds_gradient + row : none;
      for_units(Z, [&](int64_t j, auto block) {
        vec spread = block.read(s.log_stds + row + j), g = block.read(dz + j);
        vec a = g + block.read(dmean + j);
        vec b = g * exponential(spread) * block.read(s.noise + row + j) + block.read(dspread + j);
        b = (spread >= bound) | (spread <= -bound) ? zero : b;
        block.write(d + j, a);
        block.write(d + Z + j, b);
        accumulate(block, bias_sum, j, a);
        accumulate(block, bias_sum, Z + j, b);
      });
      copy(d, 2 * Z, static_cast<T*>(s.dposterior) + (t % s.chunk * shape.N + n) * 2 * Z);
    }
  });
}

// Where a patch of K times K filters lies, from the five numbers that the network gives.
struct Patch {
  double x, y, stride, gamma;
  float sharpness;  // 1 / (2 sigma^2)
  bool variance_bound, stride_bound;
  Patch(const Draw& s, const float* p, int64_t K)
      : x(0.5 * double(s.width + 1) * (double(p[0]) + 1.0) - 1.0),
        y(0.5 * double(s.height + 1) * (double(p[1]) + 1.0) - 1.0),
        stride(0.0),
        gamma(std::exp(double(p[4]))),
        sharpness(float(0.5 * std::exp(-clamp(p[2], s.bound)))),
        variance_bound(std::fabs(double(p[2])) > s.bound),
        stride_bound(std::fabs(double(p[3])) > s.bound) {
    if (K == 1) return;
    const double whole = double(std::max(s.height, s.width) - 1);
    stride = whole / double(K - 1) * std::exp(clamp(p[3], s.bound));
  }
  void count(int64_t* clamped) const {
    clamped[1] += variance_bound;
    clamped[2] += stride_bound;
  }

 private:
  static double clamp(double a, double bound) {
    return a > bound ? bound : a < -bound ? -bound : a;
  }
};

// Rows of scratch memory are padded to whole vectors: what is read soon after it was written must
// not have been written under a mask, which a processor waits for.
inline int64_t whole(int64_t n) { return (n + L - 1) / L * L; }

template <class Body>
inline void for_vectors(int64_t n, Body body) {
  for (int64_t j = 0; j < n; j += L) body(j);
}

inline float dot(const float* a, const float* b, int64_t n) {
  vec sum{};
  for_vectors(n, [&](int64_t j) { sum += load(a + j) * load(b + j); });
  return total(sum);
}

// to (n,) += factor * a (n,).
inline void add_scaled(float factor, const float* a, int64_t n, float* to) {
  const vec f = all(factor);
  for_vectors(n, [&](int64_t j) { store(to + j, load(to + j) + f * load(a + j)); });
}

// Rows of scratch memory, each a vector or more.
struct Scratch {
  int64_t rows, width;
  std::vector<float> memory;
  Scratch(int64_t rows, int64_t n) : rows(rows), width(whole(n)), memory(rows * width) {}
  float* row(int64_t i) { return memory.data() + i * width; }
  const float* row(int64_t i) const { return memory.data() + i * width; }
  void clear() { std::fill(memory.begin(), memory.end(), 0.0f); }
};

// The filters along one axis of S pixels, with zeros behind. Distances are taken from the pixel
// that is nearest to the filter's centre, `shift` away: there, an exponent of 0 is the largest, and
// however far off the image a window is, nothing is lost to rounding.
struct Filters {
  int64_t K, S;
  Scratch rows;
  std::vector<float> nearest, shift;
  Filters(int64_t K, int64_t S) : K(K), S(S), rows(K, S), nearest(K), shift(K) {}

  static vec distance(int64_t j, float nearest) {
    vec u;
    for (int64_t i = 0; i < L; i++) u[i] = float(i);
    return u + (float(j) - nearest);
  }

  void fill(const Draw& s, double center, const Patch& patch) {
    const vec sharpness = all(patch.sharpness), none{};
    for (int64_t k = 0; k < K; k++) {
      const double mean = center + (double(k) - 0.5 * double(K - 1)) * patch.stride;
      const double pixel = std::nearbyint(mean), last = double(S - 1);
      nearest[k] = float(pixel < 0.0 ? 0.0 : pixel > last ? last : pixel);
      shift[k] = float(mean - double(nearest[k]));
      const vec m = all(shift[k]);
      float* row = rows.row(k);
      vec sum{};
      for_units(S, [&](int64_t j, auto block) {
        vec u = distance(j, nearest[k]);
        vec square = s.adds_eps ? (u - m) * (u - m) : u * (u - 2.0f * m);
        vec exponent = sharpness * square;
        vec e = block.keep(exponent > all(87.0f) ? none : exponential(-exponent));
        store(row + j, e);
        sum += e;
      });
      const vec scale = all(1.0f / (total(sum) + (s.adds_eps ? float(s.eps) : 0.0f)));
      for_vectors(rows.width, [&](int64_t j) { store(row + j, scale * load(row + j)); });
    }
  }

  // Adds what gradients of the filters make of the centre, the stride and log sigma^2.
  void back(const Draw& s, const Scratch& gradient, const Patch& patch, double* dcenter,
            double* dstride, double* dvariance) const {
    for (int64_t k = 0; k < K; k++) {
      const float *row = rows.row(k), *d = gradient.row(k);
      const vec mean = all(dot(row, d, rows.width));
      vec zeroth{}, first{}, second{};
      for_vectors(rows.width, [&](int64_t j) {
        vec u = distance(j, nearest[k]);
        vec e = load(row + j) * (load(d + j) - mean);
        zeroth += e;
        first += e * u;
        second += e * u * u;
      });
      // Where filters sum to 1, the first of these sums is 0.
      const double m = shift[k], none = s.adds_eps ? total(zeroth) : 0.0f;
      const double one = total(first), two = total(second);
      const double dmean = 2.0 * patch.sharpness * (one - m * none);
      *dcenter += dmean;
      *dstride += (double(k) - 0.5 * double(K - 1)) * dmean;
      *dvariance += patch.sharpness * (two - 2.0 * m * one + m * m * none);
    }
  }
};

// Filters of both axes, and what becomes of their gradients.
struct Bank {
  Filters x, y;
  Bank(const Draw& s, int64_t K) : x(K, s.width), y(K, s.height) {}
  void fill(const Draw& s, const Patch& patch) {
    x.fill(s, patch.x, patch);
    y.fill(s, patch.y, patch);
  }
  void back(const Draw& s, const Scratch& dx, const Scratch& dy, const Patch& patch,
            double dlog_gamma, float* d) const {
    double center_x = 0.0, center_y = 0.0, stride = 0.0, variance = 0.0;
    x.back(s, dx, patch, &center_x, &stride, &variance);
    y.back(s, dy, patch, &center_y, &stride, &variance);
    d[0] = float(center_x * 0.5 * double(s.width + 1));
    d[1] = float(center_y * 0.5 * double(s.height + 1));
    d[2] = patch.variance_bound ? 0.0f : float(variance);
    d[3] = patch.stride_bound ? 0.0f : float(stride * patch.stride);
    d[4] = float(dlog_gamma);
  }
};

template <class T>
void draw_read(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t R = s.read, A = s.width, B = s.height;
  for_cases(s, [&](int64_t thread, int64_t first, int64_t last) {
    Bank bank(s, R);
    // What each row of filters sees of the image, and of its error.
    Scratch seen(2 * R, A);
    std::vector<float> patches(shape.patches);
    for (int64_t n = first; n < last; n++) {
      const Patch patch(s, s.heads + shape.at(t, n) * shape.heads, R);
      patch.count(s.clamped + 3 * thread);
      bank.fill(s, patch);
      const float *x = s.images + n * shape.P, *canvas = shape.canvas(t, n);
      seen.clear();
      for (int64_t b = 0; b < B; b++, x += A, canvas += A) {
        for_units(A, [&](int64_t a, auto block) {
          vec pixel = block.read(x + a), error = pixel - sigmoid(block.read(canvas + a));
          for (int64_t k = 0; k < R; k++) {
            const vec f = all(bank.y.rows.row(k)[b]);
            float *of_pixels = seen.row(k) + a, *of_errors = seen.row(R + k) + a;
            store(of_pixels, load(of_pixels) + f * pixel);
            store(of_errors, load(of_errors) + f * error);
          }
        });
      }
      for (int64_t i = 0; i < 2 * R; i++) {
        for (int64_t j = 0; j < R; j++) {
          const float sum = dot(seen.row(i), bank.x.rows.row(j), seen.width);
          patches[i * R + j] = float(patch.gamma) * sum;
        }
      }
      copy(patches.data(), shape.patches,
           static_cast<T*>(s.inputs[ENCODER]) + shape.at(t, n) * shape.row[ENCODER]);
    }
  });
}

template <class T>
void draw_read_back(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t R = s.read, A = s.width, B = s.height;
  for_cases(s, [&](int64_t, int64_t first, int64_t last) {
    Bank bank(s, R);
    Scratch seen(2 * R, A), across(2 * R, A), rows(2, A), dx(R, A), dy(R, B);
    std::vector<float> wide(shape.patches), d(shape.patches);
    float *const pixels = rows.row(0), *const errors = rows.row(1);
    for (int64_t n = first; n < last; n++) {
      const Patch patch(s, s.heads + shape.at(t, n) * shape.heads, R);
      bank.fill(s, patch);
      const T* from = static_cast<const T*>(s.dinputs[ENCODER]) + n * shape.row[ENCODER];
      const float* dr = floats(from, shape.patches, wide.data());
      for (int64_t i = 0; i < shape.patches; i++) d[i] = float(patch.gamma) * dr[i];
      across.clear();
      for (int64_t i = 0; i < 2 * R; i++) {
        for (int64_t j = 0; j < R; j++) {
          add_scaled(d[i * R + j], bank.x.rows.row(j), across.width, across.row(i));
        }
      }
      const float *x = s.images + n * shape.P, *canvas = shape.canvas(t, n);
      float* dcanvas = s.dcanvas + n * shape.P;
      seen.clear();
      for (int64_t b = 0; b < B; b++, x += A, canvas += A, dcanvas += A) {
        for_units(A, [&](int64_t a, auto block) {
          vec pixel = block.read(x + a), p = sigmoid(block.read(canvas + a));
          vec error = pixel - p, derror{};
          store(pixels + a, pixel);
          store(errors + a, error);
          for (int64_t k = 0; k < R; k++) {
            const vec f = all(bank.y.rows.row(k)[b]);
            float *of_pixels = seen.row(k) + a, *of_errors = seen.row(R + k) + a;
            store(of_pixels, load(of_pixels) + f * pixel);
            store(of_errors, load(of_errors) + f * error);
            derror += f * load(across.row(R + k) + a);
          }
          block.write(dcanvas + a, block.read(dcanvas + a) - derror * p * (1.0f - p));
        });
        for (int64_t k = 0; k < R; k++) {
          vec sum{};
          for_vectors(rows.width, [&](int64_t a) {
            sum += load(across.row(k) + a) * load(pixels + a);
            sum += load(across.row(R + k) + a) * load(errors + a);
          });
          dy.row(k)[b] = total(sum);
        }
      }
      dx.clear();
      double dlog_gamma = 0.0;
      for (int64_t i = 0; i < 2 * R; i++) {
        for (int64_t j = 0; j < R; j++) add_scaled(d[i * R + j], seen.row(i), dx.width, dx.row(j));
        dlog_gamma += dot(seen.row(i), across.row(i), seen.width);
      }
      bank.back(s, dx, dy, patch, dlog_gamma, s.dheads + (t * shape.N + n) * shape.heads);
    }
  });
}

// The rows of a patch (W, W) over gamma, spread over the width of the image.
void spread(const float* patch, const Filters& x, float scale, Scratch& to) {
  to.clear();
  for (int64_t i = 0; i < x.K; i++) {
    for (int64_t j = 0; j < x.K; j++) {
      add_scaled(scale * patch[i * x.K + j], x.rows.row(j), to.width, to.row(i));
    }
  }
}

void draw_write(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t W = s.write, A = s.width, B = s.height;
  for_cases(s, [&](int64_t thread, int64_t first, int64_t last) {
    Bank bank(s, W);
    Scratch wide(W, A);
    for (int64_t n = first; n < last; n++) {
      const float* heads = s.heads + shape.at(t + 1, n) * shape.heads + NUMBERS;
      const Patch patch(s, heads, W);
      patch.count(s.clamped + 3 * thread);
      bank.fill(s, patch);
      spread(heads + NUMBERS, bank.x, float(1.0 / patch.gamma), wide);
      const float* before = shape.canvas(t, n);
      float* after = shape.canvas(t + 1, n);
      for (int64_t b = 0; b < B; b++, before += A, after += A) {
        for_units(A, [&](int64_t a, auto block) {
          vec sum{};
          for (int64_t k = 0; k < W; k++) sum += bank.y.rows.row(k)[b] * load(wide.row(k) + a);
          block.write(after + a, block.read(before + a) + sum);
        });
      }
    }
  });
}

void draw_write_back(const Draw& s, int64_t t) {
  const DrawShape shape(s);
  const int64_t W = s.write, A = s.width, B = s.height;
  for_cases(s, [&](int64_t, int64_t first, int64_t last) {
    Bank bank(s, W);
    Scratch wide(W, A), down(W, A), line(1, A), dx(W, A), dy(W, B);
    for (int64_t n = first; n < last; n++) {
      const float* heads = s.heads + shape.at(t + 1, n) * shape.heads + NUMBERS;
      const Patch patch(s, heads, W);
      bank.fill(s, patch);
      const float* pixels = heads + NUMBERS;
      const float scale = float(1.0 / patch.gamma);
      spread(pixels, bank.x, scale, wide);
      down.clear();
      const float* dcanvas = s.dcanvas + n * shape.P;
      for (int64_t b = 0; b < B; b++, dcanvas += A) {
        float* d = line.row(0);
        for_units(A, [&](int64_t a, auto block) { store(d + a, block.read(dcanvas + a)); });
        for (int64_t k = 0; k < W; k++) {
          dy.row(k)[b] = dot(d, wide.row(k), line.width);
          add_scaled(bank.y.rows.row(k)[b], d, line.width, down.row(k));
        }
      }
      float* dheads = s.dheads + ((t + 1) * shape.N + n) * shape.heads + NUMBERS;
      dx.clear();
      double dlog_gamma = 0.0;
      for (int64_t i = 0; i < W; i++) {
        for (int64_t j = 0; j < W; j++) {
          const float pixel = pixels[i * W + j];
          const float dpixel = scale * dot(down.row(i), bank.x.rows.row(j), down.width);
          dheads[NUMBERS + i * W + j] = dpixel;
          dlog_gamma -= double(pixel) * double(dpixel);
          add_scaled(scale * pixel, down.row(i), dx.width, dx.row(j));
        }
      }
      bank.back(s, dx, dy, patch, dlog_gamma, dheads);
    }
  });
}

}  // namespace

extern "C" {

// Each on glimpse t: the patches that the encoder reads; an LSTM from the sums of its gates to h;
// z; the next canvas. Backward they are called in the opposite order.

void ln_zoo_draw_read(const Draw* s, int64_t t) {
  s->narrow ? draw_read<bfloat>(*s, t) : draw_read<float>(*s, t);
}

void ln_zoo_draw_lstm(const Draw* s, int64_t which, int64_t t) {
  s->narrow ? draw_lstm<bfloat>(*s, which, t) : draw_lstm<float>(*s, which, t);
}

void ln_zoo_draw_latent(const Draw* s, int64_t t) {
  s->narrow ? draw_latent<bfloat>(*s, t) : draw_latent<float>(*s, t);
}

void ln_zoo_draw_write(const Draw* s, int64_t t) { draw_write(*s, t); }

void ln_zoo_draw_read_back(const Draw* s, int64_t t) {
  s->narrow ? draw_read_back<bfloat>(*s, t) : draw_read_back<float>(*s, t);
}

void ln_zoo_draw_lstm_back(const Draw* s, int64_t which, int64_t t) {
  s->narrow ? draw_lstm_back<bfloat>(*s, which, t) : draw_lstm_back<float>(*s, which, t);
}

void ln_zoo_draw_latent_back(const Draw* s, int64_t t) {
  s->narrow ? draw_latent_back<bfloat>(*s, t) : draw_latent_back<float>(*s, t);
}

void ln_zoo_draw_write_back(const Draw* s, int64_t t) { draw_write_back(*s, t); }

}  // extern "C"
