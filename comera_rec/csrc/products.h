// The two kinds of products in a lookup and its gradients, on slices in the first-level cache.
//
// A slice is stored rank by rank, [r, n]: its row k belongs to rank k. So both operands of a product are read along rows, their
// gradients are written along rows, and the rank is a loop of any length: only the columns n1 and n2 determine register use.
#pragma once

#include "simd.h"

namespace comera {
namespace {

// c[i, j] = sum over k of a[k, i] d[k] b[k, j] for R rows and V vectors of W columns, with sums in registers.
template <int R, int V, int W>
COMERA_INLINE void multiply_tile(
    const float* a, int64_t a_step, const float* b, int64_t b_step, const float* d, int64_t depth, float* c, int64_t c_step) {
  Vector<W> sums[R][V];
#pragma GCC unroll 32
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[i][v] = Vector<W>{};
  for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
    Vector<W> scaled[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) scaled[v] = load<W>(b + v * W) * d[k];
#pragma GCC unroll 32
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[i][v] += a[i] * scaled[v];
  }
#pragma GCC unroll 32
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store<W>(c + i * c_step + v * W, sums[i][v]);
}

// out[k, j] += sum over s of coefficients[k, s] x[s, j], for S rows of x and V vectors of W columns, x in registers.
template <int S, int V, int W>
COMERA_INLINE void update_tile(
    const float* coefficients, int64_t coefficient_step, const float* x, int64_t x_step, int64_t depth, float* out,
    int64_t out_step) {
  Vector<W> rows[S][V];
#pragma GCC unroll 32
  for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) rows[s][v] = load<W>(x + s * x_step + v * W);
  for (int64_t k = 0; k < depth; ++k, coefficients += coefficient_step, out += out_step) {
    Vector<W> sums[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[v] = load<W>(out + v * W);
#pragma GCC unroll 32
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[v] += coefficients[s] * rows[s][v];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store<W>(out + v * W, sums[v]);
  }
}

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int parts(int size, int most) { return (size + most - 1) / most; }

// Sizes of tiles for N rows of operands with V vectors in a row: as many rows as fit registers, evenly cut.
constexpr int tile_rows(int rows, int vectors) {
  const int most = (kRegisters - vectors - 2) / vectors;
  return parts(rows, parts(rows, most));
}

#if defined(__AVX512F__)
// Rows of eight columns fill half a vector, so two of them share one: rows 2i and 2i + 1 of a product, or ranks k and k + 1 of a slice.
// Their factors are permuted from one load, because loading each would take longer than multiplying.
COMERA_INLINE Vector<16> twice(const float* from) { return (Vector<16>)_mm512_broadcast_f32x8(_mm256_loadu_ps(from)); }

COMERA_INLINE Vector<16> join(const float* low, const float* high) {
  return (Vector<16>)_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(high), 1);
}

COMERA_INLINE __m512i halves(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
}

template <int N1>
COMERA_INLINE void multiply_by_eight(const float* a, const float* b, const float* d, int64_t depth, float* c) {
  Vector<16> sums[N1 / 2];
  __m512i rows[N1 / 2];
#pragma GCC unroll 8
  for (int i = 0; i < N1 / 2; ++i) {
    sums[i] = Vector<16>{};
    rows[i] = halves(2 * i, 2 * i + 1);
  }
  for (int64_t k = 0; k < depth; ++k, a += N1, b += 8) {
    const Vector<16> scaled = twice(b) * d[k];
    const __m512 factors = N1 == 16  ? _mm512_loadu_ps(a)
                           : N1 == 8 ? _mm512_castps256_ps512(_mm256_loadu_ps(a))
                                     : _mm512_castps128_ps512(_mm_loadu_ps(a));
#pragma GCC unroll 8
    for (int i = 0; i < N1 / 2; ++i) sums[i] += (Vector<16>)_mm512_permutexvar_ps(rows[i], factors) * scaled;
  }
#pragma GCC unroll 8
  for (int i = 0; i < N1 / 2; ++i) store<16>(c + 16 * i, sums[i]);
}

template <int S>
COMERA_INLINE void update_by_eight(const float* coefficients, const float* x, int64_t depth, float* out) {
  constexpr int kRows = smaller(S, 8);
  for (int first = 0; first < S; first += kRows) {
    Vector<16> rows[kRows];
    __m512i ranks[kRows];
#pragma GCC unroll 8
    for (int s = 0; s < kRows; ++s) {
      rows[s] = twice(x + (first + s) * 8);
      ranks[s] = halves(s, kRows + s);
    }
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
      const float* at = coefficients + k * S + first;
      const __m512 factors = S == 4 ? _mm512_castps256_ps512(_mm256_loadu_ps(at)) : (__m512)join(at, at + S);
      Vector<16> sums = load<16>(out + k * 8);
#pragma GCC unroll 8
      for (int s = 0; s < kRows; ++s) sums += (Vector<16>)_mm512_permutexvar_ps(ranks[s], factors) * rows[s];
      store<16>(out + k * 8, sums);
    }
    if (k < depth) update_tile<kRows, 1, 8>(coefficients + k * S + first, S, x + first * 8, 8, 1, out + k * 8, 8);
  }
}
#endif

// multiply_tile over all of c [N1, N2], sizes known to the compiler; J is the first column.
template <int N1, int N2, int J = 0>
COMERA_INLINE void multiply_fixed(const float* a, const float* b, const float* d, int64_t depth, float* c) {
  if constexpr (J < N2) {
    constexpr int W = widest(N2 - J), V = smaller((N2 - J) / W, 2), R = tile_rows(N1, V), Whole = N1 / R * R;
    for (int i = 0; i < Whole; i += R) multiply_tile<R, V, W>(a + i, N1, b + J, N2, d, depth, c + i * N2 + J, N2);
    if constexpr (Whole < N1)
      multiply_tile<N1 - Whole, V, W>(a + Whole, N1, b + J, N2, d, depth, c + Whole * N2 + J, N2);
    multiply_fixed<N1, N2, J + V * W>(a, b, d, depth, c);
  }
}

// update_tile over all of out [depth, N], sizes known to the compiler; J is the first column.
template <int S, int N, int J = 0>
COMERA_INLINE void update_fixed(const float* coefficients, const float* x, int64_t depth, float* out) {
  if constexpr (J < N) {
    constexpr int W = widest(N - J), V = smaller((N - J) / W, 2), R = tile_rows(S, V), Whole = S / R * R;
    for (int s = 0; s < Whole; s += R) update_tile<R, V, W>(coefficients + s, S, x + s * N + J, N, depth, out + J, N);
    if constexpr (Whole < S)
      update_tile<S - Whole, V, W>(coefficients + Whole, S, x + Whole * N + J, N, depth, out + J, N);
    update_fixed<S, N, J + V * W>(coefficients, x, depth, out);
  }
}

// The same for sizes known only at run time: columns in the widest vectors that they fill, rows in fours.
template <int W>
COMERA_INLINE int64_t multiply_columns(
    int n1, int64_t n2, int64_t j, const float* a, const float* b, const float* d, int64_t depth, float* c) {
  for (; j + W <= n2; j += W) {
    int i = 0;
    for (; i + 4 <= n1; i += 4) multiply_tile<4, 1, W>(a + i, n1, b + j, n2, d, depth, c + i * n2 + j, n2);
    for (; i < n1; ++i) multiply_tile<1, 1, W>(a + i, n1, b + j, n2, d, depth, c + i * n2 + j, n2);
  }
  if constexpr (W > 1) return multiply_columns<W / 2>(n1, n2, j, a, b, d, depth, c);
  return j;
}

template <int W>
COMERA_INLINE int64_t update_columns(
    int rows, int64_t n, int64_t j, const float* coefficients, const float* x, int64_t depth, float* out) {
  for (; j + W <= n; j += W) {
    int s = 0;
    for (; s + 4 <= rows; s += 4) update_tile<4, 1, W>(coefficients + s, rows, x + s * n + j, n, depth, out + j, n);
    for (; s < rows; ++s) update_tile<1, 1, W>(coefficients + s, rows, x + s * n + j, n, depth, out + j, n);
  }
  if constexpr (W > 1) return update_columns<W / 2>(rows, n, j, coefficients, x, depth, out);
  return j;
}

// c[n1, n2] = a^T diag(d) b: a [depth, n1], b [depth, n2]. N1 = N2 = 0 stand for sizes known only at run time.
template <int N1 = 0, int N2 = 0>
COMERA_INLINE void multiply(int n1, int64_t n2, const float* a, const float* b, const float* d, int64_t depth, float* c) {
  if constexpr (N1 > 0) {
#if defined(__AVX512F__)
    if constexpr (N2 == 8) return multiply_by_eight<N1>(a, b, d, depth, c);
#endif
    multiply_fixed<N1, N2>(a, b, d, depth, c);
  } else {
    multiply_columns<kWidth>(n1, n2, 0, a, b, d, depth, c);
  }
}

// Calls run<N1, N2>() with the first of the listed pairs that equals (n1, n2), so that its loops have sizes known to the compiler;
// else run<0, 0>().
template <int N1, int N2, int... Others, class Run>
COMERA_INLINE void with_sizes(int64_t n1, int64_t n2, const Run& run) {
  if (n1 == N1 && n2 == N2) return run.template operator()<N1, N2>();
  if constexpr (sizeof...(Others) > 0) {
    with_sizes<Others...>(n1, n2, run);
  } else {
    run.template operator()<0, 0>();
  }
}

// The same with the columns of common tables, whose rows are kept in registers.
template <class Run>
COMERA_INLINE void with_common_sizes(int64_t n1, int64_t n2, const Run& run) {
  with_sizes<4, 4, 4, 8, 8, 4, 8, 8, 8, 16, 16, 4, 16, 8, 16, 16>(n1, n2, run);
}

// out[depth, n] += coefficients [depth, rows] times x [rows, n].
template <int S = 0, int N = 0>
COMERA_INLINE void add_product(int rows, int64_t n, const float* coefficients, const float* x, int64_t depth, float* out) {
  if constexpr (S > 0) {
#if defined(__AVX512F__)
    if constexpr (N == 8) return update_by_eight<S>(coefficients, x, depth, out);
#endif
    update_fixed<S, N>(coefficients, x, depth, out);
  } else {
    update_columns<kWidth>(rows, n, 0, coefficients, x, depth, out);
  }
}

// lanes[k, i, :] += the products of a[k, :] and x[i, :], of any length, folded into lanes, whose sum is the inner product.
COMERA_INLINE void add_lanes(int64_t depth, int rows, int64_t length, const float* a, const float* x, float* lanes) {
  for (int64_t k = 0; k < depth; ++k, a += length) {
    for (int i = 0; i < rows; ++i, lanes += kWidth) {
      const float* row = x + i * length;
      Vector<kWidth> sum = load<kWidth>(lanes);
      int64_t j = 0;
      for (; j + kWidth <= length; j += kWidth) sum += load<kWidth>(a + j) * load<kWidth>(row + j);
      for (; j < length; ++j) sum[0] += a[j] * row[j];
      store<kWidth>(lanes, sum);
    }
  }
}

COMERA_INLINE float sum_lanes(const float* lanes) { return sum_of<kWidth>(load<kWidth>(lanes)); }

// The inner product; what doesn't fill a vector is added by narrower ones.
template <int W = kWidth>
COMERA_INLINE float dot(const float* a, const float* b, int64_t count) {
  if constexpr (W > 1)
    if (count < W) return dot<W / 2>(a, b, count);
  Vector<W> sums{};
  int64_t n = 0;
  for (; n + W <= count; n += W) sums += load<W>(a + n) * load<W>(b + n);
  const float sum = sum_of<W>(sums);
  if constexpr (W > 1) return n == count ? sum : sum + dot<W / 2>(a + n, b + n, count - n);
  return sum;
}

// out[:] += factor * x[:].
template <int W = kWidth>
COMERA_INLINE void add_scaled(float* out, const float* x, float factor, int64_t count) {
  int64_t n = 0;
  for (; n + W <= count; n += W) store<W>(out + n, load<W>(out + n) + factor * load<W>(x + n));
  if constexpr (W > 1)
    if (n < count) add_scaled<W / 2>(out + n, x + n, factor, count - n);
}

// A row of a hot block: row[j] += sum over k of a[k] b[k, j], V vectors of W columns in registers.
template <int V, int W>
COMERA_INLINE void add_row_tile(const float* a, const float* b, int64_t b_step, int64_t depth, float* row) {
  Vector<W> sums[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) sums[v] = load<W>(row + v * W);
  for (int64_t k = 0; k < depth; ++k, b += b_step)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[v] += a[k] * load<W>(b + v * W);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) store<W>(row + v * W, sums[v]);
}

// Its gradients: a_gradient[k] += sum over j of b[k, j] g[j], and b_gradient[k, j] += a[k] g[j], with g in registers.
template <int V, int W>
COMERA_INLINE void row_gradients_tile(
    const float* a, const float* b, const float* g, int64_t step, int64_t depth, float* a_gradient, float* b_gradient) {
  Vector<W> gradient[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) gradient[v] = load<W>(g + v * W);
  for (int64_t k = 0; k < depth; ++k, b += step, b_gradient += step) {
    Vector<W> products = load<W>(b) * gradient[0];
#pragma GCC unroll 4
    for (int v = 1; v < V; ++v) products += load<W>(b + v * W) * gradient[v];
    a_gradient[k] += sum_of<W>(products);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store<W>(b_gradient + v * W, load<W>(b_gradient + v * W) + a[k] * gradient[v]);
  }
}

template <int W = kWidth>
COMERA_INLINE void add_row(int64_t n, const float* a, const float* b, int64_t depth, float* row, int64_t j = 0) {
  if constexpr (W == kWidth)
    for (; j + 4 * W <= n; j += 4 * W) add_row_tile<4, W>(a, b + j, n, depth, row + j);
  for (; j + W <= n; j += W) add_row_tile<1, W>(a, b + j, n, depth, row + j);
  if constexpr (W > 1) add_row<W / 2>(n, a, b, depth, row, j);
}

template <int W = kWidth>
COMERA_INLINE void row_gradients(
    int64_t n, const float* a, const float* b, const float* g, int64_t depth, float* a_gradient, float* b_gradient, int64_t j = 0) {
  if constexpr (W == kWidth)
    for (; j + 4 * W <= n; j += 4 * W) row_gradients_tile<4, W>(a, b + j, g + j, n, depth, a_gradient, b_gradient + j);
  for (; j + W <= n; j += W) row_gradients_tile<1, W>(a, b + j, g + j, n, depth, a_gradient, b_gradient + j);
  if constexpr (W > 1) row_gradients<W / 2>(n, a, b, g, depth, a_gradient, b_gradient, j);
}

}  // namespace
}  // namespace comera
