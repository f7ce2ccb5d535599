#include "pool.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "memory.h"
#include "parallel.h"

namespace comera {
namespace {

constexpr int64_t kTaskWork = 2048;        // rows and lookups of a task: few enough to balance threads, enough to be cheap
constexpr int64_t kMostTasks = 256;
// Gradients of slices are summed in stripes of a table's rows, each in separate memory: about `kStripes` in all, for as many threads, but
// each with enough work to be worth the memory.
constexpr int64_t kStripes = 12, kMostStripes = 16;         // of all tables; of one table
constexpr int64_t kLeastWork = 4096, kMostWork = 32768;     // of a stripe, in lookups
constexpr int64_t kRowWork = 4;                             // lookups that take as long as a row's products
constexpr int64_t kStripeProducts = 1024;                   // of a right half
constexpr int64_t kStripeBytes = 32 << 20;                  // of the tables that are worked on at a time
constexpr int64_t kFinishNumbers = 64 << 10;                // of a part of a core

int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

std::vector<Table> tables_of(const Batch& batch) {
  const int64_t d = batch.order, cut = (d + 1) / 2, T = batch.num_tables;
  std::vector<Table> tables(T);
  for (int64_t t = 0; t < T; ++t) {
    Table& table = tables[t];
    const Core* cores = &batch.cores[t * d];
    const int* columns = &batch.columns[t * d];
    const int* ranks = batch.ranks.data() + t * (d - 1);
    const float* const* diagonals = batch.diagonals.data() + t * (d - 1);
    const auto half = [&](int64_t outer, int64_t inner, int64_t bond, const int32_t* outer_of, const int32_t* inner_of) {
      Half made;
      made.outer = cores[outer];
      made.outer_n = columns[outer];
      made.bond = ranks[bond];
      made.is_pair = outer != inner;
      if (made.is_pair) {
        made.inner = cores[inner];
        made.inner_n = columns[inner];
        made.diagonal = diagonals[bond];
        made.outer_is_slow = outer < inner;
        made.outer_of = outer_of;
        made.inner_of = inner_of;
      }
      return made;
    };
    table.left = half(0, cut - 1, 0, batch.plan.left_outer, batch.plan.left_inner);
    table.right = half(d - 1, cut, d - 2, batch.plan.right_outer, batch.plan.right_inner);
    table.rank = ranks[cut - 1];
    table.diagonal = diagonals[cut - 1];
    table.n1 = table.left.outer_n * table.left.inner_n;
    table.n2 = table.right.outer_n * table.right.inner_n;
    table.row_begin = batch.plan.bounds[t];
    table.row_end = batch.plan.bounds[t + 1];
    table.first_right_product = batch.plan.bounds[2 * (T + 1) + t];
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
    int64_t floats = 0, blocks = 0, rows = 0;
    for (const HotBlocks& hot : batch.hot) {
      blocks += int64_t(hot.rows.size());
      for (const Core& projection : hot.projections) floats += rounded(projection.size);
    }
    blocks_.reserve(blocks);
    projections_ = Buffer<float>(floats);
    float* projection = projections_.get();
    for (int64_t t = 0; t < batch.num_tables; ++t) {
      const HotBlocks& hot = batch.hot[t];
      Table& table = tables[t];
      table.hot = blocks_.data() + blocks_.size();
      int64_t beyond = -hot.first;
      for (size_t b = 0; b < hot.rows.size(); ++b) {
        const Core& core = hot.projections[b];
        blocks_.push_back({hot.rows[b], projection, hot.rows[b].size, beyond});
        kernels().scaled_rows(core, hot.diagonals[b], hot.rows[b].size, projection);
        projection += rounded(core.size);
        beyond += hot.rows[b].slices;
        table.hot_width = std::max(table.hot_width, hot.rows[b].size);
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
std::vector<Range> cut_rows(const std::vector<Table>& tables, const int32_t* starts) {
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
  ScratchMemory(const std::vector<Table>& tables, const Kernels& kernels) {
    for (const Table& table : tables) floats_ = std::max(floats_, rounded(kernels.scratch_floats(table)));
    memory_ = Buffer<float>(floats_ * torch::stable::get_num_threads());
  }
  float* of(int64_t thread) const { return memory_.get() + thread * floats_; }

 private:
  int64_t floats_ = 0;
  Buffer<float> memory_;
};

// The bag of each lookup in the output and the factor of its row, both by sorted lookup.
class LookupBags {
 public:
  explicit LookupBags(const Batch& batch) : bag_of_(batch.num_lookups) {
    const int64_t L = batch.num_lookups, bags = batch.bags, features = batch.features, samples = bags / features;
    const int32_t* order = batch.plan.order;
    is_one_each_ = bags == L;
    for (int64_t bag = 0; bag <= bags && is_one_each_; ++bag) is_one_each_ = batch.offsets[bag] == bag;
    const int64_t tasks = (L + kTaskWork * 4 - 1) / (kTaskWork * 4);
    const auto in_tasks = [&](int64_t count, const auto& run) {
      run_tasks(tasks, [&](int64_t task, int64_t) { run(count * task / tasks, count * (task + 1) / tasks); });
    };
    const bool all_in_bags = batch.offsets[bags] == L;
    if (is_one_each_ && batch.weights == nullptr) {
      in_tasks(L, [&](int64_t first, int64_t beyond) {
        for (int64_t t = first; t < beyond; ++t) {
          const uint32_t bag = uint32_t(order[t]), feature = bag / uint32_t(samples);
          bag_of_[t] = int32_t((bag - feature * samples) * features + feature);
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
            int32_t(bag % samples * features + bag / samples));
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
  bool are_rows() const { return is_one_each_ && !scales_; }

  Lookups lookups(const Plan& plan) const {
    return {plan.p, plan.q, plan.starts, plan.order, bag_of_.get(), scales_ ? scales_->get() : nullptr};
  }

 private:
  Buffer<int32_t> bag_of_;
  std::optional<Buffer<float>> scales_;
  bool is_one_each_ = false;
};

// Products of all tables' right halves that are pairs.
Buffer<float> make_right_products(
    const Batch& batch, std::vector<Table>& tables, const Kernels& kernels, const ScratchMemory& scratch) {
  const int64_t T = batch.num_tables;
  const int32_t* bounds = batch.plan.bounds + 2 * (T + 1);
  if (batch.order < 4) return Buffer<float>();
  std::vector<int64_t> at(T + 1, 0);
  for (int64_t t = 0; t < T; ++t) at[t + 1] = at[t] + rounded(int64_t(bounds[t + 1] - bounds[t]) * tables[t].rank * tables[t].n2);
  Buffer<float> made(at[T]);
  std::vector<Range> ranges;
  for (int64_t t = 0; t < T; ++t) {
    tables[t].right_products = made.get() + at[t];
    for (int64_t first = bounds[t]; first < bounds[t + 1]; first += 256)
      ranges.push_back({t, first, std::min<int64_t>(first + 256, bounds[t + 1])});
  }
  run_tasks(int64_t(ranges.size()), [&](int64_t task, int64_t thread) {
    const auto [t, first, beyond] = ranges[task];
    const int64_t size = int64_t(tables[t].rank) * tables[t].n2;
    kernels.make_products(
        tables[t].right, tables[t].rank, first, beyond, made.get() + at[t] + (first - bounds[t]) * size, scratch.of(thread));
  });
  return made;
}

// Sums of a core's gradients, one for each stripe.
struct StripeSums {
  StripeSums(int64_t stripes, int64_t slices, int64_t size)
      : slices(slices), values(stripes * slices * size), touched(stripes * slices) {
    std::memset(touched.get(), 0, size_t(stripes * slices));
    for (int64_t s = 0; s < stripes; ++s) each.push_back({values.get() + s * slices * size, touched.get() + s * slices, size});
  }

  int64_t slices;
  Buffer<float> values;
  Buffer<uint8_t> touched;
  std::vector<Sums> each;
};

// Adds the sums of stripes, times diagonals, to their targets; cores are cut into parts of their slices.
class Finishing {
 public:
  // `diagonal` is along the rows of the core's slices.
  void add(const StripeSums& sums, const float* diagonal, int64_t rows, const Target& target, float* diagonal_gradient) {
    const int64_t step = std::max<int64_t>(1, kFinishNumbers / std::max<int64_t>(1, target.core.size));
    for (int64_t first = 0; first < sums.slices; first += step) {
      parts_.push_back({&sums, diagonal, rows, target, diagonal_gradient, first, std::min(sums.slices, first + step), floats_});
      floats_ += rounded(target.core.size) + rounded(rows);
    }
  }

  void run(const Kernels& kernels) {
    Buffer<float> memory(floats_);
    run_tasks(int64_t(parts_.size()), [&](int64_t task, int64_t) {
      const Part& part = parts_[task];
      float* diagonal_gradient = memory.get() + part.at;
      std::fill_n(diagonal_gradient, part.rows, 0.0f);
      kernels.finish_sums(
          part.sums->each.data(), int(part.sums->each.size()), part.diagonal, part.rows, part.target, part.first, part.beyond,
          part.diagonal_gradient != nullptr ? diagonal_gradient : nullptr, diagonal_gradient + rounded(part.rows));
    });
    for (const Part& part : parts_)
      for (int64_t k = 0; part.diagonal_gradient != nullptr && k < part.rows; ++k) part.diagonal_gradient[k] += memory[part.at + k];
    parts_.clear();
    floats_ = 0;
  }

 private:
  struct Part {
    const StripeSums* sums;
    const float* diagonal;
    int64_t rows;
    Target target;
    float* diagonal_gradient;
    int64_t first, beyond, at;
  };

  std::vector<Part> parts_;
  int64_t floats_ = 0;
};

// The gradients of one table, from stripes of its rows. The stripe of a row depends on the batch alone.
class TableGradients {
 public:
  TableGradients(
      const Batch& batch, const Table& table, int64_t t, const Lookups& lookups, int64_t share, const Target* targets,
      float* const* diagonal_gradients)
      : order_(batch.order), table_(table), lookups_(lookups), targets_(targets), diagonal_gradients_(diagonal_gradients) {
    const int32_t* right = batch.plan.bounds + 2 * (batch.num_tables + 1);
    right_products_ = right[t + 1] - right[t];
    const int64_t count = stripes_of(work_before(table.row_end) - work_before(table.row_begin), share, bytes());
    bounds_ = cut_evenly(table.row_begin, table.row_end, count, [&](int64_t u) { return work_before(u); });
  }

  int64_t stripes() const { return int64_t(bounds_.size()) - 1; }
  int64_t all_bytes() const { return stripes() * bytes(); }

  void allocate() {
    const Half& left = table_.left;
    left_outer_.emplace(stripes(), left.outer.slices, left.outer.size);
    if (left.is_pair) left_inner_.emplace(stripes(), left.inner.slices, left.inner.size);
    right_.emplace(stripes(), right_count(), int64_t(table_.rank) * table_.n2);
    hot_projections_.reserve(hot_.size());
    for (const HotTargets& hot : hot_) hot_projections_.emplace_back(stripes(), 1, hot.projection.core.size);
    for (int64_t stripe = 0; stripe < stripes(); ++stripe)
      for (size_t b = 0; b < hot_.size(); ++b) hot_sums_.push_back({hot_[b].rows, hot_projections_[b].each[stripe]});
    diagonal_gradient_ = Buffer<float>(stripes() * rounded(table_.rank));
    std::fill_n(diagonal_gradient_.get(), stripes() * rounded(table_.rank), 0.0f);
  }

  void add_rows(int64_t stripe, const BagGradients& gradients, const Kernels& kernels, float* scratch) const {
    const Stripe sums{
        left_outer_->each[stripe], left_inner_ ? left_inner_->each[stripe] : Sums{}, right_->each[stripe],
        diagonal_gradient_.get() + stripe * rounded(table_.rank), hot_sums_.data() + stripe * hot_.size()};
    kernels.gradients_of_rows(table_, lookups_, gradients, bounds_[stripe], bounds_[stripe + 1], sums, scratch);
  }

  // Targets of rows and projection of each block.
  void take_hot(const HotBlocks& hot, const Target* targets, float* const* diagonal_gradients) {
    for (size_t b = 0; b < hot.rows.size(); ++b) {
      const Target &rows = targets[2 * b], &projection = targets[2 * b + 1];
      hot_.push_back({rows, projection, hot.diagonals[b], diagonal_gradients[b]});
      const int64_t bytes = rows.core.slices * rows.core.size * (rows.core.number == Number::float32 ? 4 : 2);
      if (rows.update == nullptr && bytes > 0) std::memset(rows.gradient, 0, size_t(bytes));
    }
  }

  void finish(Finishing& finishing) {
    for (size_t b = 0; b < hot_.size(); ++b)
      finishing.add(hot_projections_[b], hot_[b].diagonal, hot_[b].rows.core.size, hot_[b].projection, hot_[b].diagonal_gradient);
    const Half& left = table_.left;
    float* cut_gradient = diagonal_gradients_[left.is_pair ? 1 : 0];
    for (int64_t stripe = 0; stripe < stripes(); ++stripe)
      for (int k = 0; k < table_.rank; ++k) cut_gradient[k] += diagonal_gradient_[stripe * rounded(table_.rank) + k];
    if (left.is_pair) {
      finishing.add(*left_outer_, left.diagonal, left.bond, targets_[0], nullptr);
      finishing.add(*left_inner_, left.diagonal, left.bond, targets_[1], diagonal_gradients_[0]);
    } else {
      finishing.add(*left_outer_, table_.diagonal, table_.rank, targets_[0], nullptr);
    }
    if (!table_.right.is_pair) {
      finishing.add(*right_, table_.diagonal, table_.rank, targets_[order_ - 1], left.is_pair ? nullptr : cut_gradient);
      return;
    }
    const int64_t size = int64_t(table_.rank) * table_.n2;
    of_products_ = Buffer<float>(right_products_ * size);
    Target products;
    products.core = {const_cast<float*>(table_.right_products), Number::float32, right_products_, size, 0};
    products.gradient = of_products_.get();
    finishing.add(*right_, table_.diagonal, table_.rank, products, nullptr);
  }

  // Propagates the finished gradients of the products of a right pair to its two cores.
  void finish_products(Finishing& finishing, const Kernels& kernels, const ScratchMemory& scratch) {
    const Half& half = table_.right;
    const int64_t size = int64_t(table_.rank) * table_.n2, first = table_.first_right_product;
    const int64_t bytes = 4 * (half.outer.slices * half.outer.size + half.inner.slices * half.inner.size);
    const std::vector<int64_t> bounds = cut_evenly(
        first, first + right_products_, stripes_of(right_products_, kStripeProducts, bytes), [](int64_t w) { return w; });
    const int64_t count = int64_t(bounds.size()) - 1;
    left_outer_.emplace(count, half.outer.slices, half.outer.size);
    left_inner_.emplace(count, half.inner.slices, half.inner.size);
    right_.reset();
    run_tasks(count, [&](int64_t s, int64_t thread) {
      kernels.gradients_of_products(
          half, table_.rank, of_products_.get() + (bounds[s] - first) * size, bounds[s], bounds[s + 1], left_outer_->each[s],
          left_inner_->each[s], scratch.of(thread));
    });
    finishing.add(*left_outer_, half.diagonal, half.bond, targets_[3], nullptr);
    finishing.add(*left_inner_, half.diagonal, half.bond, targets_[2], diagonal_gradients_[2]);
  }

  void free() {
    for (std::optional<StripeSums>* sums : {&left_outer_, &left_inner_, &right_}) sums->reset();
    of_products_ = Buffer<float>();
    hot_projections_.clear();
  }

 private:
  struct HotTargets {
    Target rows, projection;
    const float* diagonal;
    float* diagonal_gradient;
  };

  int64_t work_before(int64_t u) const { return lookups_.starts[u] + kRowWork * u; }
  int64_t right_count() const { return table_.right.is_pair ? right_products_ : table_.right.outer.slices; }

  int64_t bytes() const {  // of a stripe
    const Half& left = table_.left;
    return 4 * (left.outer.slices * left.outer.size + (left.is_pair ? left.inner.slices * left.inner.size : 0) +
                right_count() * table_.rank * table_.n2);
  }

  static int64_t stripes_of(int64_t work, int64_t share, int64_t bytes) {
    const int64_t fitting = std::max<int64_t>(1, kStripeBytes / std::max<int64_t>(1, bytes));
    return std::clamp<int64_t>(work / share, 1, std::min(kMostStripes, fitting));
  }

  const int64_t order_;
  const Table& table_;
  const Lookups& lookups_;
  const Target* targets_;
  float* const* diagonal_gradients_;
  int64_t right_products_ = 0;
  std::vector<int64_t> bounds_;
  std::optional<StripeSums> left_outer_, left_inner_, right_;
  Buffer<float> diagonal_gradient_, of_products_;
  std::vector<HotTargets> hot_;
  std::vector<StripeSums> hot_projections_;
  std::vector<HotSums> hot_sums_;  // [stripes, blocks]
};

}  // namespace

void pool_bags(const Batch& batch, float* out) {
  const Kernels& kernels = comera::kernels();
  std::vector<Table> tables = tables_of(batch);
  const HotTables hot(batch, tables);
  const ScratchMemory scratch(tables, kernels);
  const Buffer<float> right_products = make_right_products(batch, tables, kernels, scratch);
  const LookupBags lookup_bags(batch);
  const Lookups lookups = lookup_bags.lookups(batch.plan);
  const int64_t width = batch.num_cols;
  const Bags bags{out, width, width % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0};
  const std::vector<Range> ranges = cut_rows(tables, lookups.starts);
  Buffer<float> rows(lookup_bags.are_rows() ? 0 : batch.plan.bounds[batch.num_tables] * width);
  run_tasks(int64_t(ranges.size()), [&](int64_t task, int64_t thread) {
    const auto [t, first, beyond] = ranges[task];
    kernels.look_up(tables[t], lookups, bags, lookup_bags.are_rows() ? nullptr : rows.get(), first, beyond, scratch.of(thread));
  });
  if (lookup_bags.are_rows()) return;
  const int64_t tasks = std::clamp<int64_t>((batch.num_lookups + batch.bags) / kTaskWork, 1, kMostTasks);
  run_tasks(tasks, [&](int64_t task, int64_t) {
    kernels.pool(
        rows.get(), batch.plan.inverse, batch.offsets, batch.weights, batch.mean, batch.features, bags, batch.bags,
        batch.bags * task / tasks, batch.bags * (task + 1) / tasks);
  });
}

void backward(
    const Batch& batch, const float* gradient, const std::vector<Target>& targets, const std::vector<float*>& diagonal_gradients,
    float* weight_gradients) {
  const Kernels& kernels = comera::kernels();
  std::vector<Table> tables = tables_of(batch);
  const HotTables hot(batch, tables);
  const ScratchMemory scratch(tables, kernels);
  const LookupBags lookup_bags(batch);
  const Lookups lookups = lookup_bags.lookups(batch.plan);
  const int64_t d = batch.order, T = batch.num_tables;
  for (size_t k = 0; k < batch.ranks.size(); ++k) std::fill_n(diagonal_gradients[k], batch.ranks[k], 0.0f);
  const Target* hot_targets = targets.data() + T * d;
  float* const* hot_diagonal_gradients = diagonal_gradients.data() + T * (d - 1);
  const BagGradients gradients{gradient, batch.num_cols, weight_gradients};
  const Buffer<float> right_products = make_right_products(batch, tables, kernels, scratch);
  const int64_t rows = batch.plan.bounds[batch.num_tables], work = batch.num_lookups + kRowWork * rows;
  const int64_t share = std::clamp(work / kStripes, kLeastWork, kMostWork);
  std::vector<TableGradients> parts;
  for (int64_t t = 0; t < T; ++t) {
    parts.emplace_back(batch, tables[t], t, lookups, share, &targets[t * d], &diagonal_gradients[t * (d - 1)]);
    if (batch.hot.empty()) continue;
    parts.back().take_hot(batch.hot[t], hot_targets, hot_diagonal_gradients);
    hot_targets += 2 * batch.hot[t].rows.size();
    hot_diagonal_gradients += batch.hot[t].rows.size();
  }
  Finishing finishing;
  for (size_t first = 0, beyond = 0; first < parts.size(); first = beyond) {
    std::vector<std::pair<TableGradients*, int64_t>> stripes;
    for (int64_t bytes = 0; beyond < parts.size(); ++beyond) {
      bytes += parts[beyond].all_bytes();
      if (beyond > first && bytes > kStripeBytes) break;
      parts[beyond].allocate();
      for (int64_t stripe = 0; stripe < parts[beyond].stripes(); ++stripe) stripes.emplace_back(&parts[beyond], stripe);
    }
    run_tasks(int64_t(stripes.size()), [&](int64_t task, int64_t thread) {
      stripes[task].first->add_rows(stripes[task].second, gradients, kernels, scratch.of(thread));
    });
    for (size_t t = first; t < beyond; ++t) parts[t].finish(finishing);
    finishing.run(kernels);
    if (d == 4) {
      for (size_t t = first; t < beyond; ++t) parts[t].finish_products(finishing, kernels, scratch);
      finishing.run(kernels);
    }
    for (size_t t = first; t < beyond; ++t) parts[t].free();
  }
}

}  // namespace comera
