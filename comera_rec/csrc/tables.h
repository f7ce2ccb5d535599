// A batch's tables as kernels take them, its rows in ranges of about equal work, and the bag of each lookup.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "pool.h"

namespace comera {

constexpr int64_t kTaskWork = 2048;        // rows and lookups of a task: few enough to balance threads, enough to be cheap
constexpr int64_t kMostTasks = 256;

// The pairs of cores that form halves of tables, one for each table or none.
struct Pairs {
  explicit Pairs(const Batch& batch) {
    const int64_t d = batch.order, T = batch.num_tables;
    const Plan& plan = batch.plan;
    const auto pair = [&](int64_t t, int64_t outer, int64_t inner, int64_t bond, int64_t cut, const int32_t* bounds) {
      Pair made;
      made.outer = batch.cores[t * d + outer];
      made.inner = batch.cores[t * d + inner];
      made.outer_n = batch.columns[t * d + outer];
      made.inner_n = batch.columns[t * d + inner];
      made.bond = batch.ranks[t * (d - 1) + bond];
      made.rank = batch.ranks[t * (d - 1) + cut];
      made.diagonal = batch.diagonals[t * (d - 1) + bond];
      made.first = bounds[t];
      made.beyond = bounds[t + 1];
      return made;
    };
    for (int64_t t = 0; d >= 3 && t < T; ++t) {
      left.push_back(pair(t, 0, 1, 0, 1, plan.bounds + T + 1));
      left.back().outer_of = plan.left_outer;
      left.back().inner_of = plan.left_inner;
    }
    for (int64_t t = 0; d == 4 && t < T; ++t) {
      right.push_back(pair(t, 3, 2, 2, 1, plan.bounds + 2 * (T + 1)));
      right.back().outer_of = plan.right_outer;
      right.back().inner_of = plan.right_inner;
      right.back().outer_is_slow = false;
    }
  }

  std::vector<Pair> left, right;
};

// The tables of a batch, whose right halves must still be formed if they are pairs.
inline std::vector<Table> tables_of(const Batch& batch, const Pairs& pairs) {
  const int64_t d = batch.order, cut = (d + 1) / 2;
  std::vector<Table> tables(batch.num_tables);
  for (int64_t t = 0; t < batch.num_tables; ++t) {
    Table& table = tables[t];
    const Core* cores = &batch.cores[t * d];
    const int* columns = &batch.columns[t * d];
    table.rank = batch.ranks[t * (d - 1) + cut - 1];
    table.diagonal = batch.diagonals[t * (d - 1) + cut - 1];
    table.n1 = columns[0] * (d >= 3 ? columns[1] : 1);
    table.n2 = columns[d - 1] * (d == 4 ? columns[2] : 1);
    if (pairs.left.empty()) {
      table.left = cores[0];
    } else {
      table.left_pair = &pairs.left[t];
      table.left.size = table.left_pair->size();
    }
    table.right = pairs.right.empty() ? cores[d - 1] : pairs.right[t].core_of(nullptr, pairs.right[t].first, pairs.right[t].beyond);
    table.row_begin = batch.plan.bounds[t];
    table.row_end = batch.plan.bounds[t + 1];
  }
  return tables;
}

// Bounds of at most `count` ranges of [begin, end) with about equal work.
template <class Work>
std::vector<int64_t> cut_evenly(int64_t begin, int64_t end, int64_t count, const Work& work_before) {
  std::vector<int64_t> bounds{begin};
  const int64_t before = work_before(begin), work = work_before(end) - before;
  for (int64_t k = 1; k <= count; ++k) {
    int64_t low = bounds.back(), high = end;  // binary search for the first with so much work before it
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      work_before(middle) < before + work * k / count ? low = middle + 1 : high = middle;
    }
    if (low > bounds.back()) bounds.push_back(low);
  }
  if (bounds.back() < end || bounds.size() == 1) bounds.push_back(end);
  return bounds;
}

// Hot blocks as kernels take them, and the rows of the batch that they contain.
class HotTables {
 public:
  HotTables(const Batch& batch, std::vector<Table>& tables) {
    if (batch.hot.empty()) return;
    int64_t floats = 0, rows = 0;
    const int64_t blocks = batch.hot.back().first + batch.hot.back().count;
    for (int64_t block = 0; block < blocks; ++block) floats += rounded(batch.hot_projection(block).size);
    blocks_.reserve(blocks);
    projections_ = Buffer<float>(floats);
    float* projection = projections_.get();
    for (int64_t t = 0; t < batch.num_tables; ++t) {
      const HotBlocks& hot = batch.hot[t];
      Table& table = tables[t];
      table.hot = blocks_.data() + blocks_.size();
      int64_t beyond = -hot.first_row;
      for (int64_t block = hot.first; block < hot.first + hot.count; ++block) {
        const Core& core = batch.hot_rows(block);
        blocks_.push_back({core, projection, core.size, beyond});
        kernels().scaled_rows(batch.hot_projection(block), batch.hot_diagonal(block), core.size, projection);
        projection += rounded(batch.hot_projection(block).size);
        beyond += core.slices;
        table.hot_width = std::max(table.hot_width, core.size);
      }
      int64_t low = table.row_begin, high = table.row_end;  // binary search for the first row beyond all blocks
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        id_of(batch, t, middle) < beyond ? low = middle + 1 : high = middle;
      }
      table.hot_end = low;
      rows += low - table.row_begin;
    }
    ids_ = Buffer<int32_t>(rows);
    int32_t* ids = ids_.get();
    for (int64_t t = 0; t < batch.num_tables; ++t) {
      tables[t].hot_ids = ids;
      for (int64_t u = tables[t].row_begin; u < tables[t].hot_end; ++u) *ids++ = int32_t(id_of(batch, t, u));
    }
  }

 private:
  static int64_t id_of(const Batch& batch, int64_t t, int64_t u) {
    const int64_t d = batch.order, p = batch.plan.p[u], q = batch.plan.q[u];
    const Core* cores = &batch.cores[t * d];
    int64_t id = 0;
    const auto append = [&](int64_t k, int64_t slice) { id = id * cores[k].slices + slice - cores[k].first; };
    append(0, d > 2 ? batch.plan.left_outer[p] : p);
    if (d > 2) append(1, batch.plan.left_inner[p]);
    if (d > 3) append(2, batch.plan.right_inner[q]);
    append(d - 1, d > 3 ? batch.plan.right_outer[q] : q);
    return id;
  }

  std::vector<HotBlock> blocks_;
  Buffer<float> projections_;
  Buffer<int32_t> ids_;
};

struct Range {
  int64_t table, first, beyond;
};

// Rows of all tables in ranges of about equal work; the work of a row is its number of lookups plus one.
inline std::vector<Range> cut_rows(const std::vector<Table>& tables, const int32_t* starts) {
  const auto work_before = [&](int64_t u) { return starts[u] + u; };
  const int64_t share = std::max(kTaskWork, work_before(tables.back().row_end) / kMostTasks + 1);
  std::vector<Range> ranges;
  for (int64_t t = 0; t < int64_t(tables.size()); ++t) {
    const int64_t begin = tables[t].row_begin, end = tables[t].row_end;
    if (begin == end) continue;
    const auto bounds = cut_evenly(begin, end, std::max<int64_t>(1, (work_before(end) - work_before(begin)) / share), work_before);
    for (size_t k = 1; k < bounds.size(); ++k) ranges.push_back({t, bounds[k - 1], bounds[k]});
  }
  return ranges;
}

class ScratchMemory {
 public:
  ScratchMemory(const std::vector<Table>& tables, const Pairs& pairs, const Kernels& kernels) {
    for (const Table& table : tables) floats_ = std::max(floats_, rounded(kernels.scratch_floats(table)));
    for (const Pair& pair : pairs.right) floats_ = std::max(floats_, rounded(kernels.pair_floats(pair)));
    memory_ = Buffer<float>(floats_ * torch::stable::get_num_threads());
  }
  float* of(int64_t thread) const { return memory_.get() + thread * floats_; }

 private:
  int64_t floats_ = 0;
  Buffer<float> memory_;
};

// The bag of each lookup in the output and the factor of its row, both by sorted lookup; if `of_rows`, only where every bag is a row.
class LookupBags {
 public:
  LookupBags(const Batch& batch, bool of_rows) : bag_of_(batch.num_lookups) {
    const int64_t L = batch.num_lookups, bags = batch.bags, samples = batch.samples(), num_slots = batch.num_slots;
    const int32_t* slots = batch.slots.data();
    const int32_t* order = batch.plan.order;
    bool has_one_id_each = bags == L;
    for (int64_t bag = 0; bag <= bags && has_one_id_each; ++bag) has_one_id_each = batch.offsets[bag] == bag;
    are_rows_ = has_one_id_each && batch.weights == nullptr;
    if (of_rows && !are_rows_) return;
    const int64_t tasks = (L + kTaskWork * 4 - 1) / (kTaskWork * 4);
    const auto in_tasks = [&](int64_t count, const auto& run) {
      run_tasks(tasks, [&](int64_t task, int64_t) { run(count * task / tasks, count * (task + 1) / tasks); });
    };
    const bool all_in_bags = batch.offsets[bags] == L;
    if (are_rows_) {
      in_tasks(L, [&](int64_t first, int64_t beyond) {
        for (int64_t t = first; t < beyond; ++t) {
          const uint32_t bag = uint32_t(order[t]), feature = bag / uint32_t(samples);
          bag_of_[t] = int32_t((bag - feature * samples) * num_slots + slots[feature]);
        }
      });
      return;
    }
    Buffer<int32_t> by_lookup(L);
    if (!all_in_bags) std::fill_n(by_lookup.get(), L, -1);
    in_tasks(bags, [&](int64_t first, int64_t beyond) {
      for (int64_t bag = first; bag < beyond; ++bag)
        std::fill(
            by_lookup.get() + batch.offsets[bag], by_lookup.get() + batch.offsets[bag + 1],
            int32_t(bag % samples * num_slots + slots[bag / samples]));
    });
    in_tasks(L, [&](int64_t first, int64_t beyond) {
      for (int64_t t = first; t < beyond; ++t) bag_of_[t] = by_lookup[order[t]];
    });
    if (all_in_bags && batch.weights == nullptr && !batch.mean) return;
    Buffer<float> scale_by_lookup(L);
    scales_ = Buffer<float>(L);
    std::fill_n(scale_by_lookup.get(), L, 0.0f);
    for (int64_t bag = 0; bag < bags; ++bag) {
      const int64_t start = batch.offsets[bag], end = batch.offsets[bag + 1];
      for (int64_t i = start; i < end; ++i)
        scale_by_lookup[i] = batch.weights != nullptr ? batch.weights[i] : batch.mean ? 1.0f / float(end - start) : 1.0f;
    }
    in_tasks(L, [&](int64_t first, int64_t beyond) {
      for (int64_t t = first; t < beyond; ++t) (*scales_)[t] = scale_by_lookup[order[t]];
    });
  }

  // Whether every bag is the row of one lookup.
  bool are_rows() const { return are_rows_; }

  Lookups lookups(const Plan& plan) const {
    return {plan.p, plan.q, plan.starts, plan.order, bag_of_.get(), scales_ ? scales_->get() : nullptr};
  }

 private:
  Buffer<int32_t> bag_of_;
  std::optional<Buffer<float>> scales_;
  bool are_rows_ = false;
};

// Forms the products of all tables' right halves that are pairs.
inline Buffer<float> make_right_products(
    const Pairs& pairs, std::vector<Table>& tables, const Kernels& kernels, const ScratchMemory& scratch) {
  if (pairs.right.empty()) return {};
  int64_t floats = 0;
  std::vector<Range> ranges;
  for (const Pair& pair : pairs.right) floats += rounded((pair.beyond - pair.first) * pair.size());
  Buffer<float> made(floats);
  float* products = made.get();
  for (int64_t t = 0; t < int64_t(tables.size()); ++t) {
    const Pair& pair = pairs.right[t];
    tables[t].right.data = products;
    products += rounded((pair.beyond - pair.first) * pair.size());
    for (int64_t first = pair.first; first < pair.beyond; first += 256)
      ranges.push_back({t, first, std::min<int64_t>(first + 256, pair.beyond)});
  }
  run_tasks(int64_t(ranges.size()), [&](int64_t task, int64_t thread) {
    const auto [t, first, beyond] = ranges[task];
    const Pair& pair = pairs.right[t];
    float* out = static_cast<float*>(tables[t].right.data) + (first - pair.first) * pair.size();
    kernels.make_products(pair, first, beyond, out, scratch.of(thread));
  });
  return made;
}

}  // namespace comera
