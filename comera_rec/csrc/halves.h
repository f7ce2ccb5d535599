// Products within a row's left and right half, before the halves are multiplied by each other. Included by kernels.cpp: compiled
// once for each instruction set.
#pragma once

#include "slices.h"

namespace comera {
namespace {

// The most scratch floats that forming a half's products and propagating their gradients needs.
int64_t half_floats(const Half& half, int rank) {
  const int64_t product = rounded(int64_t(rank) * half.outer_n * half.inner_n);
  const int64_t lanes = rounded(int64_t(half.bond) * half.outer_n * kWidth);
  return 2 * (rounded(half.outer.size) + rounded(half.inner.size)) + 4 * product + lanes;
}

int64_t scratch_floats(const Table& table) {
  return half_floats(table.left, table.rank) + half_floats(table.right, table.rank) + 3 * rounded(int64_t(table.n1) * table.n2) +
         2 * rounded(table.hot_width);
}

// Columns of a pair's products: converts [outer, rank, inner], as a product of slices gives them, to or from the stored layout,
// [rank, outer, inner] or [rank, inner, outer]. O = I = 0 stand for sizes known only at run time.
template <bool kToProduct, int O, int I>
COMERA_INLINE void rearrange_columns(const Half& half, int rank, float* mixed, float* product) {
  const int outer_n = O > 0 ? O : half.outer_n, inner_n = I > 0 ? I : half.inner_n;
  for (int k = 0; k < rank; ++k, product += outer_n * inner_n)
#pragma GCC unroll 8
    for (int i = 0; i < outer_n; ++i) {
      float* row = mixed + (int64_t(i) * rank + k) * inner_n;
      if (half.outer_is_slow) {
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
void rearrange(const Half& half, int rank, float* mixed, float* product) {
  with_sizes<2, 2, 2, 4, 4, 2, 4, 4, 8, 4>(half.outer_n, half.inner_n, [&]<int O, int I>() {
    rearrange_columns<kToProduct, O, I>(half, rank, mixed, product);
  });
}

// Forms the products of a half one by one; consecutive ones with the same outer slice are cheaper.
class Products {
 public:
  Products(const Half& half, int rank, Scratch& scratch)
      : half_(half), rank_(rank), outer_(scratch.take(half.outer.size)) {
    if (!half.is_pair) return;
    inner_ = scratch.take(half.inner.size);
    mixed_ = scratch.take(int64_t(rank) * half.outer_n * half.inner_n);
    product_ = scratch.take(int64_t(rank) * half.outer_n * half.inner_n);
  }

  const float* operator()(int64_t number) { return half_.is_pair ? pair(number, product_) : slice_of(half_.outer, number, outer_); }

  void prefetch_later(int64_t number) const {
    if (!half_.is_pair) prefetch_slice(half_.outer, number);
  }

  const float* pair(int64_t number, float* out) {
    const float* outer = slice_of(half_.outer, half_.outer_of[number], outer_);
    const float* inner = slice_of(half_.inner, half_.inner_of[number], inner_);
    multiply(half_.outer_n, int64_t(rank_) * half_.inner_n, outer, inner, half_.diagonal, half_.bond, mixed_);
    rearrange<true>(half_, rank_, mixed_, out);
    return out;
  }

 private:
  const Half& half_;
  const int rank_;
  float *outer_, *inner_ = nullptr, *mixed_ = nullptr, *product_ = nullptr;
};

// Slices or products of the right half; the products of pairs were formed in advance.
class RightSlices {
 public:
  RightSlices(const Table& table, Scratch& scratch)
      : table_(table), size_(int64_t(table.rank) * table.n2), scratch_(scratch.take(table.right.outer.size)) {}

  const float* operator()(int64_t q) const {
    return table_.right.is_pair ? table_.right_products + (q - table_.first_right_product) * size_
                                : slice_of(table_.right.outer, q, scratch_);
  }
  void prefetch_later(int64_t q) const {
    if (!table_.right.is_pair) prefetch_slice(table_.right.outer, q);
  }

 private:
  const Table& table_;
  const int64_t size_;
  float* scratch_;
};

}  // namespace
}  // namespace comera
