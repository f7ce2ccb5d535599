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
constexpr int64_t kRowsOfSlice = 2;                         // of a right slice, on average: with more, uses are not counted

// Sums of a core's gradients, one for each stripe.
struct StripeSums {
  StripeSums(int64_t stripes, const Core& core)
      : slices(core.slices), values(stripes * slices * core.size), states(stripes * slices) {
    std::memset(states.get(), Sums::untouched, size_t(stripes * slices));
    for (int64_t s = 0; s < stripes; ++s) each.push_back({values.get() + s * slices * core.size, states.get() + s * slices, core.size});
  }

  int64_t slices;
  Buffer<float> values;
  Buffer<uint8_t> states;
  std::vector<Sums> each;
};

// out[k] += the sum of row k of [rows, size / rows].
void add_row_sums(const float* values, int64_t rows, int64_t size, float* out) {
  for (int64_t n = 0; n < size; ++n) out[n / (size / rows)] += values[n];
}

// Adds the sums of stripes, times diagonals, to their targets; cores are cut into parts of their slices.
class Finishing {
 public:
  // `diagonal` is along the rows of the core's slices.
  void add(const StripeSums& sums, const float* diagonal, int64_t rows, const Target& target, float* diagonal_gradient) {
    const int64_t step = std::max<int64_t>(1, kFinishNumbers / std::max<int64_t>(1, target.core.size));
    for (int64_t first = 0; first < sums.slices; first += step) {
      parts_.push_back({&sums, diagonal, rows, target, diagonal_gradient, first, std::min(sums.slices, first + step), floats_});
      floats_ += 2 * rounded(target.core.size);
    }
  }

  void run(const Kernels& kernels) {
    Buffer<float> memory(floats_);
    run_tasks(int64_t(parts_.size()), [&](int64_t task, int64_t) {
      const Part& part = parts_[task];
      const int64_t size = part.target.core.size;
      float *products = memory.get() + part.at, *scratch = products + rounded(size);
      std::fill_n(products, size, 0.0f);
      kernels.finish_sums(
          part.sums->each.data(), int(part.sums->each.size()), part.diagonal, part.rows, part.target, part.first, part.beyond,
          part.diagonal_gradient != nullptr ? products : nullptr, scratch);
    });
    for (const Part& part : parts_) {
      if (part.diagonal_gradient == nullptr) continue;
      add_row_sums(memory.get() + part.at, part.rows, part.target.core.size, part.diagonal_gradient);
    }
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
      const Table& table, const Pair* right_pair, const Lookups& lookups, int64_t share, const Target* targets,
      float* const* diagonal_gradients)
      : table_(table), left_pair_(table.left_pair), right_pair_(right_pair), lookups_(lookups), targets_(targets),
        diagonal_gradients_(diagonal_gradients) {
    const int64_t count = stripes_of(work_before(table.row_end) - work_before(table.row_begin), share, bytes());
    bounds_ = cut_evenly(table.row_begin, table.row_end, count, [&](int64_t u) { return work_before(u); });
  }

  int64_t stripes() const { return int64_t(bounds_.size()) - 1; }
  int64_t all_bytes() const { return stripes() * bytes(); }

  void allocate() {
    outer_.emplace(stripes(), left_core());
    if (left_pair_ != nullptr) inner_.emplace(stripes(), left_pair_->inner);
    right_.emplace(stripes(), table_.right);
    hot_projections_.reserve(hot_.size());
    for (const HotTargets& hot : hot_) hot_projections_.emplace_back(stripes(), hot.projection.core);
    for (int64_t stripe = 0; stripe < stripes(); ++stripe)
      for (size_t b = 0; b < hot_.size(); ++b) hot_sums_.push_back({hot_[b].rows, hot_projections_[b].each[stripe]});
    if (!finishes_at_once()) return;
    uses_ = Buffer<uint8_t>(table_.right.slices);
    const bool counts = table_.row_end - table_.row_begin < kRowsOfSlice * table_.right.slices;  // otherwise few have one row
    std::memset(uses_.get(), counts ? 0 : 2, size_t(table_.right.slices));
    for (int64_t u = table_.row_begin; counts && u < table_.row_end; ++u) {
      uint8_t& uses = uses_[lookups_.q[u] - table_.right.first];
      uses = uint8_t(std::min(uses + 1, 2));
    }
    cut_products_ = Buffer<float>(stripes() * rounded(table_.right.size));
    std::fill_n(cut_products_.get(), stripes() * rounded(table_.right.size), 0.0f);
  }

  void add_rows(int64_t stripe, const BagGradients& gradients, const Kernels& kernels, float* scratch) const {
    Stripe sums{
        outer_->each[stripe], inner_ ? inner_->each[stripe] : Sums{}, right_->each[stripe], hot_sums_.data() + stripe * hot_.size()};
    if (finishes_at_once()) {
      sums.left_target = &targets_[0];
      sums.right_target = &targets_[1];
      sums.uses = uses_.get();
      sums.cut_products = cut_products_.get() + stripe * rounded(table_.right.size);
    }
    kernels.gradients_of_rows(table_, lookups_, gradients, bounds_[stripe], bounds_[stripe + 1], sums, scratch);
  }

  // Targets of rows and projection of each block.
  void take_hot(const Batch& batch, const HotBlocks& hot, const Target* targets, float* const* diagonal_gradients) {
    for (int64_t block = hot.first; block < hot.first + hot.count; ++block) {
      const Target &rows = targets[2 * block], &projection = targets[2 * block + 1];
      hot_.push_back({rows, projection, batch.hot_diagonal(block), diagonal_gradients[block]});
      const int64_t bytes = rows.core.slices * rows.core.size * (rows.core.number == Number::float32 ? 4 : 2);
      if (rows.update == nullptr && bytes > 0) std::memset(rows.gradient, 0, size_t(bytes));
    }
  }

  void finish(Finishing& finishing) {
    for (size_t b = 0; b < hot_.size(); ++b)
      finishing.add(hot_projections_[b], hot_[b].diagonal, hot_[b].rows.core.size, hot_[b].projection, hot_[b].diagonal_gradient);
    float* cut_gradient = diagonal_gradients_[left_pair_ != nullptr ? 1 : 0];
    for (int64_t stripe = 0; finishes_at_once() && stripe < stripes(); ++stripe)
      add_row_sums(cut_products_.get() + stripe * rounded(table_.right.size), table_.rank, table_.right.size, cut_gradient);
    if (left_pair_ != nullptr) {
      finish_pair(finishing, *left_pair_, targets_, 0);
    } else {
      finishing.add(*outer_, table_.diagonal, table_.rank, targets_[0], nullptr);
    }
    if (right_pair_ == nullptr) {
      finishing.add(*right_, table_.diagonal, table_.rank, targets_[left_pair_ != nullptr ? 2 : 1], cut_gradient);
      return;
    }
    product_gradients_ = Buffer<float>(table_.right.slices * table_.right.size);
    Target products;
    products.core = table_.right;
    products.core.first = 0;
    products.gradient = product_gradients_.get();
    finishing.add(*right_, nullptr, table_.rank, products, cut_gradient);
  }

  // Propagates the finished gradients of the products of a right pair to its two cores.
  void finish_products(Finishing& finishing, const Kernels& kernels, const ScratchMemory& scratch) {
    const Pair& pair = *right_pair_;
    const int64_t bytes = 4 * (pair.outer.slices * pair.outer.size + pair.inner.slices * pair.inner.size);
    const std::vector<int64_t> bounds = cut_evenly(
        pair.first, pair.beyond, stripes_of(pair.beyond - pair.first, kStripeProducts, bytes), [](int64_t w) { return w; });
    const int64_t count = int64_t(bounds.size()) - 1;
    outer_.emplace(count, pair.outer);
    inner_.emplace(count, pair.inner);
    right_.reset();
    run_tasks(count, [&](int64_t s, int64_t thread) {
      kernels.gradients_of_products(
          pair, table_.diagonal, product_gradients_.get() + (bounds[s] - pair.first) * pair.size(), bounds[s], bounds[s + 1],
          outer_->each[s], inner_->each[s], scratch.of(thread));
    });
    finish_pair(finishing, pair, targets_ + 2, 2);
  }

  void free() {
    for (std::optional<StripeSums>* sums : {&outer_, &inner_, &right_}) sums->reset();
    product_gradients_ = Buffer<float>();
    hot_projections_.clear();
  }

 private:
  struct HotTargets {
    Target rows, projection;
    const float* diagonal;
    float* diagonal_gradient;
  };

  // Adds the sums of a pair's cores to targets of the pair's cores, in the order of the table's; `bond` is the number of the diagonal.
  void finish_pair(Finishing& finishing, const Pair& pair, const Target* targets, int bond) {
    const int outer = pair.outer_is_slow ? 0 : 1;
    finishing.add(*outer_, pair.diagonal, pair.bond, targets[outer], nullptr);
    finishing.add(*inner_, pair.diagonal, pair.bond, targets[1 - outer], diagonal_gradients_[bond]);
  }

  bool finishes_at_once() const { return left_pair_ == nullptr && right_pair_ == nullptr && table_.rank > 0; }
  int64_t work_before(int64_t u) const { return lookups_.starts[u] + kRowWork * u; }
  const Core& left_core() const { return left_pair_ != nullptr ? left_pair_->outer : table_.left; }

  int64_t bytes() const {  // of a stripe
    const auto floats = [](const Core& core) { return core.slices * core.size; };
    return 4 * (floats(left_core()) + (left_pair_ != nullptr ? floats(left_pair_->inner) : 0) + floats(table_.right));
  }

  static int64_t stripes_of(int64_t work, int64_t share, int64_t bytes) {
    const int64_t fitting = std::max<int64_t>(1, kStripeBytes / std::max<int64_t>(1, bytes));
    return std::clamp<int64_t>(work / share, 1, std::min(kMostStripes, fitting));
  }

  const Table& table_;
  const Pair *left_pair_, *right_pair_;
  const Lookups& lookups_;
  const Target* targets_;
  float* const* diagonal_gradients_;
  std::vector<int64_t> bounds_;
  std::optional<StripeSums> outer_, inner_, right_;  // of the left core or pair, later of the right pair; of the right core or products
  Buffer<float> product_gradients_;
  std::vector<HotTargets> hot_;
  std::vector<StripeSums> hot_projections_;
  std::vector<HotSums> hot_sums_;  // [stripes, blocks]
  Buffer<uint8_t> uses_;           // see Stripe
  Buffer<float> cut_products_;     // [stripes, rank, n2]
};

}  // namespace

void backward(
    const Batch& batch, const float* gradient, const std::vector<Target>& targets, const std::vector<float*>& diagonal_gradients,
    float* weight_gradients) {
  const Kernels& kernels = comera::kernels();
  const Pairs pairs(batch);
  std::vector<Table> tables = tables_of(batch, pairs);
  const HotTables hot(batch, tables);
  const ScratchMemory scratch(tables, pairs, kernels);
  const LookupBags lookup_bags(batch, false);
  const Lookups lookups = lookup_bags.lookups(batch.plan);
  const int64_t d = batch.order, T = batch.num_tables;
  for (size_t k = 0; k < batch.ranks.size(); ++k) std::fill_n(diagonal_gradients[k], batch.ranks[k], 0.0f);
  const BagGradients gradients{gradient, batch.num_cols, weight_gradients};
  const Buffer<float> right_products = make_right_products(pairs, tables, kernels, scratch);
  const int64_t rows = batch.plan.bounds[batch.num_tables], work = batch.num_lookups + kRowWork * rows;
  const int64_t share = std::clamp(work / kStripes, kLeastWork, kMostWork);
  std::vector<TableGradients> parts;
  for (int64_t t = 0; t < T; ++t) {
    const Pair* right_pair = d == 4 ? &pairs.right[t] : nullptr;
    parts.emplace_back(tables[t], right_pair, lookups, share, &targets[t * d], &diagonal_gradients[t * (d - 1)]);
    if (!batch.hot.empty()) parts.back().take_hot(batch, batch.hot[t], targets.data() + T * d, diagonal_gradients.data() + T * (d - 1));
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
