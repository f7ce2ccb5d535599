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

// Consecutive bags of a feature: the first one's number, how many, and the number of their first value.
struct Task {
  int64_t feature, bag, count, value;
};

// Returns the bags of F features, [B, F, N]; if they have `counts` [F] bags, in all at most those of `lengths`, [bags, N].
Tensor served_bags(
    Tensor storage, Tensor layout, Tensor slabs, Tensor values, Tensor lengths, std::optional<Tensor> counts, std::optional<Tensor> weights,
    int64_t columns) {
  require_plain(storage, "storage", ScalarType::Byte, "uint8");
  require_plain(layout, "layout", ScalarType::Long, "int64");
  require_plain(slabs, "slabs", ScalarType::Long, "int64");
  values = contiguous(values, "values", ScalarType::Long, "int64");
  require_plain(lengths, "lengths", ScalarType::Long, "int64");
  require(layout.dim() == 2 && layout.size(1) == kFeatureNumbers && slabs.dim() == 2 && slabs.size(1) == kSlabNumbers, "layout has shape ",
          shape_of(layout), " and slabs ", shape_of(slabs), ": give (F, ", kFeatureNumbers, ") and (S, ", kSlabNumbers, ")");
  const int64_t N = columns, F = layout.size(0), V = values.numel(), bags = lengths.numel(), B = F > 0 ? bags / F : 0;
  require(N >= 1, "columns is ", N, ": give at least 1");
  require(F > 0 && (counts ? counts->numel() == F : bags == F * B), "lengths holds ", bags, " numbers for ", F,
          " features: give as many for each, or counts for all");
  if (counts) require_plain(*counts, "counts", ScalarType::Long, "int64");
  if (weights) weights = contiguous(*weights, "weights", ScalarType::Float, "float32");
  require(!weights || weights->numel() == V, "weights don't hold ", V, " numbers: give one for each value");
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
  const int64_t* counts_at = counts ? static_cast<const int64_t*>(counts->data_ptr()) : nullptr;
  const float* weights_at = weights ? static_cast<const float*>(weights->data_ptr()) : nullptr;
  std::vector<Task> tasks;
  int64_t total = 0, bag = 0;
  for (int64_t f = 0; f < F; ++f) {
    const int64_t first = bag, count = counts_at ? counts_at[f] : B;
    require(count >= 0 && count <= bags - first, "counts, or lengths by feature, are below 0 or add up to more than ", bags);
    for (; bag < first + count; ++bag) {
      if ((bag - first) % kBagsOfATask == 0) tasks.push_back({f, bag, std::min(kBagsOfATask, first + count - bag), total});
      require(lengths_at[bag] >= 0 && lengths_at[bag] <= V - total, "lengths are below 0 or add up to more than the ", V, " values");
      total += lengths_at[bag];
    }
  }
  // All features for a few rows, then for the next rows, so that the output stays in the cache until a row is complete.
  const auto part_of = [&](const Task& task) { return (task.bag - task.feature * B) / kBagsOfATask; };
  if (!counts && B > kBagsOfATask)
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return part_of(a) < part_of(b); });
  Tensor out = counts ? reused({bags, N}) : reused({B, F, N});
  float* out_at = static_cast<float*>(out.data_ptr());
  if (bag < bags && counts) std::fill_n(out_at + bag * N, (bags - bag) * N, 0.0f);
  const bool parallel = int64_t(tasks.size()) > F;
  const int64_t threads = parallel ? torch::stable::get_num_threads() : 1;
  const Buffer<float> scratch(threads * scratch_floats);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> invalid_lookup{kNone};  // the smallest position among the values, times F, plus its feature
  run_tasks(
      int64_t(tasks.size()),
      [&](int64_t number, int64_t thread) {
        const Task& task = tasks[number];
        const int64_t f = task.feature, place = counts ? task.bag : (task.bag - f * B) * F + f;
        const ServedBags part{
            values_at + task.value, lengths_at + task.bag, weights_at ? weights_at + task.value : nullptr, task.count, N,
            out_at + place * N, counts ? N : F * N};
        const int64_t invalid = kernels().serve_bags(features[f], part, scratch.get() + thread * scratch_floats);
        if (invalid < 0) return;
        const int64_t lookup = (task.value + invalid) * F + f;
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
  library.def(
      "served_bags(Tensor storage, Tensor layout, Tensor slabs, Tensor values, Tensor lengths, Tensor? counts, Tensor? weights, "
      "int columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(comera_rec, CPU, library) { library.impl("served_bags", TORCH_BOX(&comera::served_bags)); }
