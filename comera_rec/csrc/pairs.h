// Products of pairs of cores, and their gradients. Included by kernels.cpp: compiled once for each instruction set.
#pragma once

#include "slices.h"

namespace comera {
namespace {

int64_t pair_floats(const Pair& pair) {
  return rounded(pair.outer.size) + rounded(pair.inner.size) + rounded(pair.size()) +
         rounded(int64_t(pair.bond) * pair.outer_n * kWidth);
}

// Columns of a pair's products: converts [outer, rank, inner], as a product of slices gives them, to or from the stored layout,
// [rank, outer, inner] or [rank, inner, outer]. O = I = 0 stand for sizes known only at run time.
template <bool kToProduct, int O, int I>
COMERA_INLINE void rearrange_columns(const Pair& pair, float* mixed, float* product) {
  const int outer_n = O > 0 ? O : pair.outer_n, inner_n = I > 0 ? I : pair.inner_n;
  for (int k = 0; k < pair.rank; ++k, product += outer_n * inner_n)
#pragma GCC unroll 8
    for (int i = 0; i < outer_n; ++i) {
      float* row = mixed + (int64_t(i) * pair.rank + k) * inner_n;
      if (pair.outer_is_slow) {
        float* stored = product + i * inner_n;
        std::memcpy(kToProduct ? stored : row, kToProduct ? row : stored, 4 * inner_n);
      } else {
#pragma GCC unroll 8
        for (int j = 0; j < inner_n; ++j)
          *(kToProduct ? product + j * outer_n + i : row + j) = *(kToProduct ? row + j : product + j * outer_n + i);
      }
    }
}

template <bool kToProduct>
void rearrange(const Pair& pair, float* mixed, float* product) {
  with_sizes<2, 2, 2, 4, 4, 2, 4, 4, 8, 4>(pair.outer_n, pair.inner_n, [&]<int O, int I>() {
    rearrange_columns<kToProduct, O, I>(pair, mixed, product);
  });
}

void make_products(const Pair& pair, int64_t first, int64_t beyond, float* out, float* memory) {
  Scratch scratch(memory);
  float *outer = scratch.take(pair.outer.size), *inner = scratch.take(pair.inner.size), *mixed = scratch.take(pair.size());
  for (int64_t number = first; number < beyond; ++number, out += pair.size()) {
    multiply(
        pair.outer_n, int64_t(pair.rank) * pair.inner_n, slice_of(pair.outer, pair.outer_of[number], outer),
        slice_of(pair.inner, pair.inner_of[number], inner), pair.diagonal, pair.bond, mixed);
    rearrange<true>(pair, mixed, out);
  }
}

void gradients_of_products(
    const Pair& pair, const float* diagonal, float* gradients, int64_t first, int64_t beyond, const Sums& outer_sums,
    const Sums& inner_sums, float* memory) {
  Scratch scratch(memory);
  const int64_t columns = int64_t(pair.rank) * pair.inner_n, lanes_size = pair.bond * pair.outer_n * int64_t(kWidth);
  float *outer = scratch.take(pair.outer.size), *inner = scratch.take(pair.inner.size), *mixed = scratch.take(pair.size()),
        *lanes = scratch.take(lanes_size);
  for (int64_t number = first; number < beyond; ++number, gradients += pair.size()) {
    const int64_t outer_slice = pair.outer_of[number], inner_slice = pair.inner_of[number];
    scale_rows(gradients, diagonal, pair.rank, pair.size());
    rearrange<false>(pair, mixed, gradients);
    if (number == first || outer_slice != pair.outer_of[number - 1]) std::memset(lanes, 0, 4 * lanes_size);
    add_lanes(pair.bond, pair.outer_n, columns, slice_of(pair.inner, inner_slice, inner), mixed, lanes);
    add_product(
        pair.outer_n, columns, slice_of(pair.outer, outer_slice, outer), mixed, pair.bond,
        touch(inner_sums, inner_slice - pair.inner.first));
    if (number + 1 < beyond && outer_slice == pair.outer_of[number + 1]) continue;
    float* sums = touch(outer_sums, outer_slice - pair.outer.first);
    for (int64_t i = 0; i < pair.outer.size; ++i) sums[i] += sum_lanes(lanes + i * kWidth);
  }
}

}  // namespace
}  // namespace comera
