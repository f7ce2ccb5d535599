// The operator of a served model: bags of all features from one block of memory.
#include "serve.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <vector>

#include "tensors.h"
#include "kernels.h"
#include "memory.h"
#include "parallel.h"

namespace comera {
namespace {

// Sizes of a feature's and of a slab's record in the layout; see comera_rec/ops/served_bags/storage.py.
constexpr int64_t kFeatureNumbers = 6 + 5 * kMostCores, kSlabNumbers = 6;
constexpr int64_t kMostNumbers = int64_t{1} << 40;  // of rows, and in a row: their product stays below 2^63 bytes
constexpr int64_t kBagsOfATask = 64;

// Rows in a block of memory, checked to be within it.
StoredRows rows_at(const Tensor& storage, int64_t offset, int64_t type, int64_t count, int64_t size) {
  require(type >= 0 && type <= 2, "layout names number type ", type, ": choose 0 to 2");
  require(count >= 0 && size >= 0 && count < kMostNumbers && size < (int64_t{1} << 20), "layout holds sizes ", count, " x ", size,
          ": export the model again");
  StoredRows rows;
  rows.type = Stored(type);
  rows.count = count;
  rows.size = size;
  rows.stride = rows.type == Stored::float32 ? 4 * size : rows.type == Stored::bfloat16 ? 2 * size : (4 + size + 3) / 4 * 4;
  const int64_t bytes = count * rows.stride;
  require(offset >= 0 && offset % 4 == 0 && bytes <= storage.numel() - kSlack && offset <= storage.numel() - kSlack - bytes, "layout names bytes ",
          offset, " to ", offset + bytes, " of a storage of ", storage.numel(), ": export the model again");
  rows.data = static_cast<const char*>(storage.data_ptr()) + offset;
  return rows;
}

ServedFeature feature_at(const Tensor& storage, const int64_t* record, const int64_t* slabs, int64_t num_slabs, int64_t columns) {
  ServedFeature feature;
  feature.rows = record[0];
  feature.mean = record[1] != 0;
  const int64_t type = record[2];
  feature.formed = rows_at(storage, record[4], type, record[3], columns);
  require(record[5] >= 0 && record[5] <= kMostCores, "layout names ", record[5], " cores: tables have at most ", kMostCores);
  feature.order = int(record[5]);
  constexpr int64_t kMostRows = int64_t{1} << 62;
  int64_t rows = feature.order > 0 ? 1 : 0;  // at most kMostRows
  int64_t left = 1, product = 1;
  for (int k = 0; k < feature.order; ++k) {
    const int64_t* core = record + 6 + 5 * k;  // slices, left rank, right rank, columns, offset
    const int64_t count = core[0], right = core[2], n = core[3];
    require(core[1] == left && right >= 0 && right < (1 << 16) && n >= 1 && n < (1 << 16) && product < (1 << 20), "layout names a core of ",
            core[1], " x ", n, " x ", right, ": export the model again");
    require(count >= 1 && count <= int64_t{0xffffffff}, "layout names ", count, " slices: export the model again");
    feature.cores[k] = {rows_at(storage, core[4], type, count, left * right * n), int(left), int(right), int(n)};
    rows = rows > kMostRows / count ? kMostRows : rows * count;
    product *= n;
    left = right;
  }
  require(feature.order == 0 || (left == 1 && product >= columns), "layout names cores of ", product, " columns for ", columns);
  require(feature.rows >= 0 && feature.rows <= std::max(rows, feature.formed.count), "layout names ", feature.rows,
          " rows, but what it holds makes fewer: export the model again");
  int64_t first = 0;
  for (int64_t s = 0; s < num_slabs; ++s, slabs += kSlabNumbers) {  // feature, type, rows, width, offset of rows, of columns
    Slab slab;
    slab.rows = rows_at(storage, slabs[4], slabs[1], slabs[2], slabs[3]);
    slab.columns = reinterpret_cast<const float*>(rows_at(storage, slabs[5], 0, slabs[3], columns).data);
    slab.first = first;
    first += slabs[2];
    feature.slabs.push_back(slab);
  }
  return feature;
}

// Returns the bags of F features, [B, F, N].
Tensor served_bags(Tensor storage, Tensor layout, Tensor slabs, Tensor values, Tensor lengths, int64_t columns) {
  require_plain(storage, "storage", ScalarType::Byte, "uint8");
  require_plain(layout, "layout", ScalarType::Long, "int64");
  require_plain(slabs, "slabs", ScalarType::Long, "int64");
  require_plain(values, "values", ScalarType::Long, "int64");
  require_plain(lengths, "lengths", ScalarType::Long, "int64");
  require(layout.dim() == 2 && layout.size(1) == kFeatureNumbers && slabs.dim() == 2 && slabs.size(1) == kSlabNumbers, "layout has shape ",
          shape_of(layout), " and slabs ", shape_of(slabs), ": give (F, ", kFeatureNumbers, ") and (S, ", kSlabNumbers, ")");
  const int64_t N = columns, F = layout.size(0), V = values.numel(), B = F > 0 ? lengths.numel() / F : 0;
  require(N >= 1, "columns is ", N, ": give at least 1");
  require(F > 0 && lengths.numel() == F * B, "lengths holds ", lengths.numel(), " numbers for ", F, " features: give as many for each");
  const int64_t *records = static_cast<const int64_t*>(layout.data_ptr()), *lengths_at = static_cast<const int64_t*>(lengths.data_ptr()),
                *values_at = static_cast<const int64_t*>(values.data_ptr()), *slabs_at = static_cast<const int64_t*>(slabs.data_ptr());
  std::vector<ServedFeature> features;
  int64_t scratch_floats = 0, slab = 0;
  for (int64_t f = 0; f < F; ++f) {
    const int64_t first = slab;
    while (slab < slabs.size(0) && slabs_at[slab * kSlabNumbers] == f) ++slab;
    features.push_back(feature_at(storage, records + f * kFeatureNumbers, slabs_at + first * kSlabNumbers, slab - first, N));
    scratch_floats = std::max(scratch_floats, kernels().serve_scratch_floats(features.back(), N));
  }
  require(slab == slabs.size(0), "slabs are not in the order of their features: export the model again");
  // All features for a few rows, then for the next rows, so that the output stays in the cache until a row is complete.
  const int64_t parts = (B + kBagsOfATask - 1) / kBagsOfATask, tasks = F * parts;
  std::vector<int64_t> starts(tasks);
  int64_t total = 0;
  for (int64_t f = 0; f < F; ++f)
    for (int64_t bag = 0; bag < B; ++bag) {
      if (bag % kBagsOfATask == 0) starts[bag / kBagsOfATask * F + f] = total;
      const int64_t length = lengths_at[f * B + bag];
      require(length >= 0 && length <= V - total, "lengths are below 0 or add up to more than the ", V, " values");
      total += length;
    }
  Tensor out = reused({B, F, N});
  float* out_at = static_cast<float*>(out.data_ptr());
  const bool parallel = B > kBagsOfATask;
  const int64_t threads = parallel ? torch::stable::get_num_threads() : 1;
  const Buffer<float> scratch(threads * scratch_floats);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> invalid_lookup{kNone};  // the smallest position among the values, times F, plus its feature
  run_tasks(
      tasks,
      [&](int64_t task, int64_t thread) {
        const int64_t f = task % F, first = task / F * kBagsOfATask;
        const ServedBags bags{
            values_at + starts[task], lengths_at + f * B + first, std::min(kBagsOfATask, B - first), N,
            out_at + (first * F + f) * N, F * N};
        const int64_t invalid = kernels().serve_bags(features[f], bags, scratch.get() + thread * scratch_floats);
        if (invalid < 0) return;
        const int64_t lookup = (starts[task] + invalid) * F + f;
        int64_t first_lookup = invalid_lookup.load();
        while (lookup < first_lookup && !invalid_lookup.compare_exchange_weak(first_lookup, lookup)) {
        }
      },
      parallel);
  if (const int64_t lookup = invalid_lookup.load(); lookup != kNone)
    refuse("id ", values_at[lookup / F], " is out of range for feature ", lookup % F, ": its ids run from 0 to ",
           features[lookup % F].rows - 1);
  return out;
}

}  // namespace
}  // namespace comera

STABLE_TORCH_LIBRARY_FRAGMENT(comera_rec, library) {
  library.def("served_bags(Tensor storage, Tensor layout, Tensor slabs, Tensor values, Tensor lengths, int columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(comera_rec, CPU, library) { library.impl("served_bags", TORCH_BOX(&comera::served_bags)); }
