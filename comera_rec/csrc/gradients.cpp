#include "tables.h"

namespace comera {
namespace {

// Gradients of slices are summed in stripes of a table's rows, each in separate memory: about `kStripes` in all, so that as many
// threads have work, but each with enough work to be worth the memory.
constexpr int64_t kStripes = 12, kMostStripes = 16;         // of all tables; of one table
constexpr int64_t kLeastWork = 4096, kMostWork = 32768;     // of a stripe, in lookups
constexpr int64_t kRowWork = 4;                             // lookups that take as long as a row's products
constexpr int64_t kStripeProducts = 1024;                   // of a right half
constexpr int64_t kStripeBytes = 32 << 20;                  // of the tables that are worked on at a time
constexpr int64_t kFinishNumbers = 64 << 10;                // of a part of a core

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

// The gradients of one table, summed in stripes of its rows. The stripe of a row depends only on the batch.
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
    product_gradients_ = Buffer<float>(right_products_ * size);
    Target products;
    products.core = {const_cast<float*>(table_.right_products), Number::float32, right_products_, size, 0};
    products.gradient = product_gradients_.get();
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
          half, table_.rank, product_gradients_.get() + (bounds[s] - first) * size, bounds[s], bounds[s + 1], left_outer_->each[s],
          left_inner_->each[s], scratch.of(thread));
    });
    finishing.add(*left_outer_, half.diagonal, half.bond, targets_[3], nullptr);
    finishing.add(*left_inner_, half.diagonal, half.bond, targets_[2], diagonal_gradients_[2]);
  }

  void free() {
    for (std::optional<StripeSums>* sums : {&left_outer_, &left_inner_, &right_}) sums->reset();
    product_gradients_ = Buffer<float>();
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
  Buffer<float> diagonal_gradient_, product_gradients_;
  std::vector<HotTargets> hot_;
  std::vector<StripeSums> hot_projections_;
  std::vector<HotSums> hot_sums_;  // [stripes, blocks]
};

}  // namespace

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
