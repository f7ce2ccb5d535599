// Bags of rows of TT tables and their gradients: the work is cut into tasks, which share intermediate results.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace comera {

// A table's blocks of hot rows, from its first row on.
struct HotBlocks {
  int64_t first_row = 0;         // row of the table that id 0 refers to
  int64_t first = 0, count = 0;  // numbers of its blocks among those of all tables
};

// T tables of d cores, in the order of the plan; all sizes have been checked.
struct Batch {
  int64_t num_tables = 0, order = 0, num_lookups = 0, num_cols = 0;
  std::vector<Core> cores;              // [T * d], then rows and projection of each hot block
  std::vector<int> columns;             // [T * d] n_k
  std::vector<int> ranks;               // [T * (d - 1)], then the width of each hot block
  std::vector<const float*> diagonals;  // [T * (d - 1)], then of each hot block
  std::vector<HotBlocks> hot;           // [T], or empty
  Plan plan{};
  const int64_t* offsets = nullptr;  // [bags + 1]
  int64_t bags = 0;
  std::vector<int32_t> slots;  // [F] where a sample's output has the bag of each feature, in bags
  int64_t num_slots = 1;       // of a sample's output
  const float* weights = nullptr;  // [L]
  bool mean = false;

  int64_t samples() const { return bags / int64_t(slots.size()); }
  const Core& hot_rows(int64_t block) const { return cores[num_tables * order + 2 * block]; }
  const Core& hot_projection(int64_t block) const { return cores[num_tables * order + 2 * block + 1]; }
  const float* hot_diagonal(int64_t block) const { return diagonals[num_tables * (order - 1) + block]; }
};

// out [samples, num_slots * num_cols], of which the features' slots are written.
void pool_bags(const Batch& batch, float* out);

// gradient like `out`; targets [T * d], then of rows and projection of each hot block; diagonal_gradients [T * (d - 1)],
// then of each hot block, overwritten; weight_gradients [L] or null.
void backward(
    const Batch& batch, const float* gradient, const std::vector<Target>& targets, const std::vector<float*>& diagonal_gradients,
    float* weight_gradients);

}  // namespace comera
