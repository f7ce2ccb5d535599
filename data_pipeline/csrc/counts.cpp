// Sorted runs of distinct keys, each with how often it occurs: `data_pipeline/runs.py`.

#include "array.h"

namespace data_pipeline {
namespace {

// A run being written, keys ascending; entries of equal keys are merged.
template <class Key>
class Run {
 public:
  Run(Array<Key> keys, Array<uint64_t> counts) : keys_(keys.data), counts_(counts.data) {}

  void put(Key key, uint64_t count) {
    if (size_ && keys_[size_ - 1] == key) {
      counts_[size_ - 1] += count;
    } else {
      keys_[size_] = key;
      counts_[size_++] = count;
    }
  }

  int64_t size() const { return size_; }

 private:
  Key* keys_;
  uint64_t* counts_;
  int64_t size_ = 0;
};

template <class Key>
int64_t merge_runs(
    Array<const Key> left, Array<const uint64_t> left_counts, Array<const Key> right, Array<const uint64_t> right_counts,
    Array<Key> keys, Array<uint64_t> counts) {
  if (left_counts.size != left.size || right_counts.size != right.size || keys.size != left.size + right.size ||
      counts.size != keys.size) {
    return kWrongSizes;
  }
  Run<Key> run(keys, counts);
  int64_t l = 0, r = 0;
  while (l < left.size && r < right.size) {
    const bool is_left = left[l] <= right[r];  // an unpredictable branch would cost more than both loads
    run.put(is_left ? left[l] : right[r], is_left ? left_counts[l] : right_counts[r]);
    l += is_left;
    r += !is_left;
  }
  for (; l < left.size; ++l) run.put(left[l], left_counts[l]);
  for (; r < right.size; ++r) run.put(right[r], right_counts[r]);
  return run.size();
}

}  // namespace

// Merges two runs into arrays with room for both, and returns the number of entries.
EXPORTED int64_t merge_runs_u32(
    Array<const uint32_t> left, Array<const uint64_t> left_counts, Array<const uint32_t> right, Array<const uint64_t> right_counts,
    Array<uint32_t> keys, Array<uint64_t> counts) {
  return merge_runs(left, left_counts, right, right_counts, keys, counts);
}
EXPORTED int64_t merge_runs_u64(
    Array<const uint64_t> left, Array<const uint64_t> left_counts, Array<const uint64_t> right, Array<const uint64_t> right_counts,
    Array<uint64_t> keys, Array<uint64_t> counts) {
  return merge_runs(left, left_counts, right, right_counts, keys, counts);
}

}  // namespace data_pipeline
