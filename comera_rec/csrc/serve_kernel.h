// Rows for requests, included by kernels.cpp: compiled once for each instruction set.
#pragma once

#include <algorithm>

#include "products.h"
#include "serve.h"

namespace comera {
namespace {

constexpr int64_t kPrepared = 16;  // lookups to prefetch ahead

// Returns a row's numbers as floats, in place or in scratch, to be multiplied by `scale`. Whole vectors are read, so storage and
// scratch have padding after the last row.
COMERA_INLINE const float* read_row(const StoredRows& rows, int64_t number, float* scratch, float* scale) {
  const char* data = rows.data + number * rows.stride;
  *scale = 1.0f;
  if (rows.type == Stored::float32) return reinterpret_cast<const float*>(data);
  if (rows.type == Stored::bfloat16) {
    for (int64_t n = 0; n < rows.size; n += kWidth) store<kWidth>(scratch + n, load_bfloat16(data + 2 * n));
  } else {
    std::memcpy(scale, data, 4);
    for (int64_t n = 0; n < rows.size; n += kWidth) store<kWidth>(scratch + n, load_int8(data + 4 + n));
  }
  return scratch;
}

void multiply_sized(int n1, int64_t n2, const float* a, const float* b, const float* d, int64_t depth, float* c) {
  with_common_sizes(n1, n2, [&]<int N1, int N2>() { multiply<N1, N2>(n1, n2, a, b, d, depth, c); });
}

// Forms the rows of a feature one by one.
class ServedRows {
 public:
  ServedRows(const ServedFeature& feature, int64_t columns, float* scratch) : feature_(feature), columns_(columns) {
    const Sizes sizes(feature, columns);
    product_ = sizes.product;
    first_ = scratch;
    slice_ = first_ + sizes.widest;
    products_[0] = slice_ + sizes.widest;
    products_[1] = products_[0] + sizes.largest;
    ones_ = products_[1] + sizes.largest;
    scales_ = ones_ + sizes.deepest;
    std::fill_n(ones_, sizes.deepest, 1.0f);
  }

  static int64_t scratch_floats(const ServedFeature& feature, int64_t columns) {
    const Sizes sizes(feature, columns);
    return 2 * (sizes.widest + sizes.largest + sizes.deepest);
  }

  // Prefetches what forms the row of an id, which must be in range.
  COMERA_INLINE void prepare(int64_t id, uint32_t* digits) const {
    if (id < feature_.formed.count) return prefetch_row(feature_.formed, id);
    uint64_t rest = uint64_t(id);
    for (int k = feature_.order - 1; k > 0; --k) {
      const uint64_t mode = uint64_t(feature_.cores[k].slices.count);
      // Division in 32 bits is several times as fast.
      const uint64_t next = rest >> 32 ? rest / mode : uint64_t(uint32_t(rest) / uint32_t(mode));
      digits[k] = uint32_t(rest - next * mode);
      rest = next;
    }
    digits[0] = uint32_t(rest);
    for (int k = 0; k < feature_.order; ++k) prefetch_row(feature_.cores[k].slices, digits[k]);
  }

  // Returns the row of an id, [columns].
  COMERA_INLINE void form(int64_t id, const uint32_t* digits, float* out) {
    float scale;
    if (id < feature_.formed.count) {
      const float* row = read_row(feature_.formed, id, slice_, &scale);
      for (int64_t n = 0; n < columns_; ++n) out[n] = row[n] * scale;
      return;
    }
    multiply_cores(digits, out);
    add_slab(id, out);
  }

 private:
  struct Sizes {
    Sizes(const ServedFeature& feature, int64_t columns) : widest(feature.formed.size), largest(columns) {
      for (int k = 0; k < feature.order; ++k) {
        const ServedCore& core = feature.cores[k];
        product *= core.columns;
        widest = std::max(widest, core.slices.size);
        largest = std::max(largest, product * core.right);
        deepest = std::max<int64_t>(deepest, core.right);
      }
      for (const Slab& slab : feature.slabs) widest = std::max(widest, slab.rows.size);
      widest = rounded(widest);
      largest = rounded(largest);
      deepest = rounded(deepest);
    }
    int64_t product = 1, widest, largest, deepest = 1;
  };

  static void prefetch_row(const StoredRows& rows, int64_t number) { prefetch(rows.data + number * rows.stride, rows.stride); }

  // Core by core, each block [rank, n] times a slice [rank, rank' * n'] gives n blocks [rank', n'].
  COMERA_INLINE void multiply_cores(const uint32_t* digits, float* out) {
    float scale, factor = 1.0f;
    const float* blocks = read_row(feature_.cores[0].slices, digits[0], first_, &factor);
    int64_t count = 1;
    for (int k = 1; k < feature_.order; ++k) {
      const ServedCore &before = feature_.cores[k - 1], &core = feature_.cores[k];
      const float* slice = read_row(core.slices, digits[k], slice_, &scale);
      factor *= scale;
      const bool is_last = k + 1 == feature_.order;
      if (is_last) std::fill_n(scales_, before.right, factor);
      float* to = is_last && product_ == columns_ ? out : products_[k % 2];
      const int64_t width = int64_t(core.right) * core.columns, size = int64_t(before.right) * before.columns;
      for (int64_t i = 0; i < count; ++i)
        multiply_sized(
            before.columns, width, blocks + i * size, slice, is_last ? scales_ : ones_, before.right, to + i * before.columns * width);
      count *= before.columns;
      blocks = to;
    }
    if (feature_.order == 1) {
      for (int64_t n = 0; n < columns_; ++n) out[n] = blocks[n] * factor;
    } else if (blocks != out) {
      std::memcpy(out, blocks, 4 * columns_);
    }
  }

  COMERA_INLINE void add_slab(int64_t id, float* out) {
    for (const Slab& slab : feature_.slabs) {
      if (id >= slab.first + slab.rows.count) continue;
      float scale;
      const float* row = read_row(slab.rows, id - slab.first, slice_, &scale);
      if (slab.rows.type == Stored::int8)
        for (int64_t k = 0; k < slab.rows.size; ++k) slice_[k] *= scale;
      return add_row(columns_, row, slab.columns, slab.rows.size, out);
    }
  }

  const ServedFeature& feature_;
  const int64_t columns_;
  int64_t product_ = 1;
  float *first_, *slice_, *products_[2], *ones_, *scales_;
};

int64_t serve_scratch_floats(const ServedFeature& feature, int64_t columns) {
  return ServedRows::scratch_floats(feature, columns) + rounded(columns);
}

// Forms bags; returns the position of a value that is out of range, or -1.
int64_t serve_bags(const ServedFeature& feature, const ServedBags& bags, float* scratch) {
  const int64_t columns = bags.columns;
  float* row = scratch;
  ServedRows rows(feature, columns, scratch + rounded(columns));
  int64_t lookups = 0;
  for (int64_t bag = 0; bag < bags.count; ++bag) lookups += bags.lengths[bag];
  uint32_t digits[kPrepared][kMostCores];
  int64_t next = 0, prepared = 0, single = -1;  // `single`: the only id of the bag before
  for (int64_t bag = 0; bag < bags.count; ++bag) {
    float* out = bags.out + bag * bags.step;
    const int64_t length = bags.lengths[bag], before = single;
    const bool is_copied = length == 1 && bags.weights == nullptr;
    single = is_copied ? bags.values[next] : -1;
    if (!is_copied) std::memset(out, 0, 4 * columns);
    for (int64_t beyond = next + length; next < beyond; ++next) {
      if (next == prepared) {
        prepared = std::min(next + kPrepared, lookups);
        for (int64_t n = next; n < prepared; ++n) {
          const int64_t id = bags.values[n];
          if (id < 0 || id >= feature.rows) return n;
          rows.prepare(id, digits[n % kPrepared]);
        }
      }
      if (single >= 0 && single == before) {  // candidates for one user share most of their ids
        std::memcpy(out, out - bags.step, 4 * columns);
      } else {
        rows.form(bags.values[next], digits[next % kPrepared], is_copied ? out : row);
        if (!is_copied) add_scaled(out, row, bags.weights ? bags.weights[next] : 1.0f, columns);
      }
    }
    if (feature.mean && length > 1)
      for (int64_t n = 0; n < columns; ++n) out[n] /= float(length);
  }
  return -1;
}

}  // namespace
}  // namespace comera
