// The operators, over LibTorch's stable ABI: one binary for every Python and several releases of torch. Arguments are checked here;
// other files rely on their sizes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tensors.h"
#include "memory.h"
#include "parallel.h"
#include "pool.h"

namespace comera {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// The plan in the memory of its tensors.
Plan plan_in(const std::vector<Tensor>& tensors) {
  const auto at = [&](size_t k) { return static_cast<int32_t*>(tensors[k].data_ptr()); };
  const int64_t L = tensors[0].numel();
  return {at(0), at(1), at(2), at(3), at(3) + L, at(4), at(4) + L, at(5), at(5) + L, at(6)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_lookup(
    std::vector<Tensor> ids, std::vector<int64_t> num_embeddings, std::vector<int64_t> row_shapes) {
  const int64_t T = int64_t(ids.size());
  require(T > 0, "ids is empty: give the ids of at least one table");
  require(int64_t(num_embeddings.size()) == T, "num_embeddings holds ", num_embeddings.size(), " numbers for ", T, " tables");
  const int64_t d = int64_t(row_shapes.size()) / T;
  require(int64_t(row_shapes.size()) == d * T && d >= 2 && d <= 4, "row_shapes holds ", row_shapes.size(), " numbers for ", T,
          " tables: give the 2, 3 or 4 row modes of each, as many for all");
  std::vector<TableIds> tables;
  std::vector<int64_t> slices(d, 0);
  int64_t L = 0;
  for (int64_t t = 0; t < T; ++t) {
    const ScalarType type = ids[t].scalar_type();
    require(type == ScalarType::Long || type == ScalarType::Int, "ids[", t, "] is neither int64 nor int32: convert it");
    require(ids[t].is_cpu(), "ids[", t, "] is not on CPU: move it");
    ids[t] = torch::stable::contiguous(ids[t]);
    const int64_t* modes = &row_shapes[t * d];
    double rows = 1, products = 1;  // may exceed the range of integers
    for (int64_t k = 0; k < d; ++k) {
      require(modes[k] >= 1, "row_shapes holds ", modes[k], ": row modes are positive");
      rows *= double(modes[k]);
      slices[k] += modes[k];
      require(slices[k] <= kMost, "row_shapes holds modes m_", k + 1, " that add up to more than ", kMost,
              " slices over all tables");
    }
    for (int64_t k = 0; k < (d + 1) / 2; ++k) products *= double(modes[k]);
    require(products <= kMost && rows / products <= kMost, "row_shapes of table ", t, " has a half of more than ", kMost,
            " products: give modes that are more even");
    require(num_embeddings[t] >= 1 && double(num_embeddings[t]) <= rows, "num_embeddings[", t, "] is ", num_embeddings[t],
            ", but its row modes make ", rows, " rows: give a number from 1 to that");
    require(double(num_embeddings[t]) * double(ids[t].numel()) < 0x1p62, "table ", t, " has too many rows for ", ids[t].numel(),
            " ids: look up fewer at a time");
    tables.push_back({ids[t].data_ptr(), type == ScalarType::Long, ids[t].numel(), num_embeddings[t], modes});
    L += ids[t].numel();
  }
  require(L < kMost, "ids holds ", L, " ids: look up fewer than ", kMost, " at a time");
  Tensor inverse = empty({L}, ScalarType::Int), order = empty({L}, ScalarType::Int), starts = empty({L + 1}, ScalarType::Int);
  Tensor rows = empty({2, L}, ScalarType::Int), left = empty({2, d >= 3 ? L : 0}, ScalarType::Int);
  Tensor right = empty({2, d == 4 ? L : 0}, ScalarType::Int), bounds = empty({3 + d, T + 1}, ScalarType::Int);
  make_plan(tables, d, plan_in({inverse, order, starts, rows, left, right, bounds}));
  return {inverse, order, starts, rows, left, right, bounds};
}

Number number_of(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  require(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
          " holds neither float32 nor bfloat16 nor float16: convert the cores, or choose impl 'reference'");
  return type == ScalarType::Float ? Number::float32 : type == ScalarType::BFloat16 ? Number::bfloat16 : Number::float16;
}

// Returns whether a core (r0, m, n, r1) is slice-major: (m, r0, r1, n) in the leading half, (m, r1, r0, n) in the trailing half.
bool is_slice_major(const Tensor& core, bool is_leading) {
  const int order[4] = {2, is_leading ? 3 : 0, is_leading ? 0 : 3, 1};  // fastest first
  int64_t step = 1;
  for (int k : order) {
    if (core.size(k) != 1 && core.stride(k) != step) return core.numel() == 0;
    step *= core.size(k);
  }
  return true;
}

// The arguments of a lookup as the loops take them, and the tensors that own their memory. The plan of a backward pass must be one
// that the forward pass accepted and saved: it isn't checked again.
struct Arguments {
  Arguments(
      const std::vector<Tensor>& cores, const std::vector<Tensor>& diagonals, const std::vector<Tensor>& plan, const Tensor& offsets,
      const std::optional<Tensor>& weights, bool mean, const std::vector<int64_t>& slots, int64_t num_slots, int64_t num_cols,
      const std::vector<int64_t>& hot_blocks, const std::vector<int64_t>& first_rows, bool is_checked = false) {
    require(plan.size() == 7, "plan holds ", plan.size(), " tensors: give the 7 of plan_lookup");
    const auto &inverse = plan[0], &order = plan[1], &starts = plan[2], &rows = plan[3], &left = plan[4], &right = plan[5],
               &bounds = plan[6];
    for (const Tensor& tensor : plan) require_plain(tensor, "plan", ScalarType::Int, "int32");
    const int64_t L = inverse.numel(), T = bounds.dim() == 2 ? bounds.size(1) - 1 : 0, d = T > 0 ? bounds.size(0) - 3 : 0;
    require(d >= 2 && d <= 4 && order.numel() == L && starts.numel() == L + 1 && rows.numel() == 2 * L &&
                left.numel() == (d >= 3 ? 2 * L : 0) && right.numel() == (d == 4 ? 2 * L : 0),
            "plan has tensors of inconsistent sizes: take all of them from one call of plan_lookup");
    require((hot_blocks.empty() || int64_t(hot_blocks.size()) == T) && first_rows.size() == hot_blocks.size(), "hot_blocks and first_rows "
            "hold ", hot_blocks.size(), " and ", first_rows.size(), " numbers for ", T, " tables: give one for each, or nothing");
    int64_t blocks = 0;
    for (size_t t = 0; t < hot_blocks.size(); ++t) {
      require(hot_blocks[t] >= 0 && hot_blocks[t] <= kMost && first_rows[t] >= 0, "table ", t, " has ", hot_blocks[t],
              " hot_blocks and first row ", first_rows[t], ": give numbers from 0 on");
      blocks += hot_blocks[t];
    }
    require(int64_t(cores.size()) == T * d + 2 * blocks, "cores holds ", cores.size(), " tensors, but the plan is for ", T,
            " tables of ", d, " cores, with ", blocks, " hot blocks of 2 each");
    require(diagonals.empty() || int64_t(diagonals.size()) == T * (d - 1) + blocks, "diagonals holds ", diagonals.size(),
            " tensors for ", T, " tables of ", d, " cores and ", blocks,
            " hot blocks: give one for every two neighboring cores and one for each block, or none at all");
    batch.num_tables = T;
    batch.order = d;
    batch.num_lookups = L;
    batch.num_cols = num_cols;
    batch.plan = plan_in(plan);
    require(is_checked || is_plan(batch.plan, d, T, L), "plan holds numbers that plan_lookup doesn't make: take it from one call, unchanged");
    int64_t floats = 0;
    for (int64_t t = 0; t < T; ++t) take_table(cores, t);
    int64_t width = 1;
    for (int64_t k = 0; k < d; ++k) width *= batch.columns[k];
    require(num_cols >= 1 && num_cols <= width, "num_cols is ", num_cols, ", but the cores make ", width, " columns");
    take_hot(cores, hot_blocks, first_rows);
    for (int rank : batch.ranks) floats += rank;
    take_diagonals(diagonals, floats);
    take_bags(offsets, weights, mean, slots, num_slots);
  }

  Batch batch;

 private:
  static void require_readable(const std::vector<Tensor>& cores, size_t k, bool is_leading) {
    require(cores[k].is_cpu() && is_slice_major(cores[k], is_leading), "cores[", k,
            "] is not a slice-major tensor on CPU: see slice_major");
    require(cores[k].scalar_type() == cores[0].scalar_type(), "cores[", k, "] has another type than cores[0]: convert it");
  }

  void take_table(const std::vector<Tensor>& cores, int64_t t) {
    const int64_t T = batch.num_tables, d = batch.order;
    int64_t rank = 1;
    for (int64_t k = 0; k < d; ++k) {
      const Tensor& core = cores[t * d + k];
      const int32_t* firsts = batch.plan.bounds + (3 + k) * (T + 1) + t;
      require(core.dim() == 4 && core.size(0) == rank, "cores[", t * d + k, "] has shape ", shape_of(core), ": give (", rank,
              ", m, n, r), with equal ranks at each bond");
      require(core.size(1) == firsts[1] - firsts[0], "cores[", t * d + k, "] has shape ", shape_of(core), ", but the plan is for ",
              firsts[1] - firsts[0], " slices: make the plan for these tables");
      const int64_t columns = t == 0 ? core.size(2) : batch.columns[k];
      require(core.size(2) == columns, "cores[", t * d + k, "] has ", core.size(2), " columns, but that of table 0 has ", columns,
              ": look up tables with different column modes separately");
      require_readable(cores, t * d + k, k < (d + 1) / 2);
      rank = core.size(3);
      if (k + 1 < d) batch.ranks.push_back(int(rank));
      batch.columns.push_back(int(core.size(2)));
      batch.cores.push_back(
          {core.data_ptr(), number_of(core, "cores"), core.size(1), core.size(0) * core.size(2) * core.size(3), firsts[0]});
    }
    require(rank == 1, "cores[", t * d + d - 1, "] has last rank ", rank, ": the last core must end in rank 1");
  }

  void take_hot(
      const std::vector<Tensor>& cores, const std::vector<int64_t>& hot_blocks, const std::vector<int64_t>& first_rows) {
    const size_t cores_of_tables = batch.cores.size();
    size_t next = cores_of_tables;
    for (size_t t = 0; t < hot_blocks.size(); ++t) {
      batch.hot.push_back({first_rows[t], int64_t(next - cores_of_tables) / 2, hot_blocks[t]});
      int64_t beyond = 0;
      for (int64_t block = 0; block < hot_blocks[t]; ++block, next += 2) {
        const Tensor &rows = cores[next], &projection = cores[next + 1];
        require(rows.dim() == 4 && rows.size(0) == 1 && rows.size(1) > 0 && rows.size(2) == 1, "cores[", next, "] has shape ",
                shape_of(rows), ": give (1, rows, 1, k), the rows of a hot block");
        require(projection.dim() == 4 && projection.size(0) == rows.size(3) && projection.size(1) == 1 &&
                    projection.size(2) == batch.num_cols && projection.size(3) == 1,
                "cores[", next + 1, "] has shape ", shape_of(projection), ": give (", rows.size(3), ", 1, ", batch.num_cols,
                ", 1), the projection of a hot block");
        for (size_t k = next; k < next + 2; ++k) require_readable(cores, k, k == next);
        beyond += rows.size(1);
        require(beyond <= kMost, "cores[", next, "] ends at row ", beyond, ": tables have at most ", kMost, " hot rows");
        batch.cores.push_back({rows.data_ptr(), number_of(rows, "cores"), rows.size(1), rows.size(3), 0});
        batch.cores.push_back(
            {projection.data_ptr(), number_of(projection, "cores"), 1, projection.size(0) * projection.size(2), 0});
        batch.ranks.push_back(int(rows.size(3)));
      }
    }
  }

  void take_diagonals(const std::vector<Tensor>& diagonals, int64_t floats) {
    diagonals_ = Buffer<float>(floats);
    float* next = diagonals_.get();
    for (size_t k = 0; k < batch.ranks.size(); ++k) {
      const int rank = batch.ranks[k];
      if (diagonals.empty()) {
        std::fill_n(next, rank, 1.0f);
      } else {
        const Tensor& diagonal = diagonals[k];
        require(diagonal.numel() == rank && diagonal.is_cpu() && diagonal.is_contiguous(), "diagonals[", k,
                "] has shape ", shape_of(diagonal), ": give a contiguous one of ", rank, " numbers on CPU");
        widen(diagonal, next);
      }
      batch.diagonals.push_back(next);
      next += rank;
    }
  }

  static void widen(const Tensor& from, float* to) {
    const void* data = from.data_ptr();
    switch (number_of(from, "diagonals")) {
      case Number::float32: std::copy_n(static_cast<const float*>(data), from.numel(), to); break;
      case Number::bfloat16: std::copy_n(static_cast<const torch::headeronly::BFloat16*>(data), from.numel(), to); break;
      case Number::float16: std::copy_n(static_cast<const torch::headeronly::Half*>(data), from.numel(), to); break;
    }
  }

  void take_bags(
      const Tensor& offsets, const std::optional<Tensor>& weights, bool mean, const std::vector<int64_t>& slots, int64_t num_slots) {
    const int64_t L = batch.num_lookups;
    offsets_ = contiguous(offsets, "offsets", ScalarType::Long, "int64");
    batch.offsets = static_cast<const int64_t*>(offsets_.data_ptr());
    batch.bags = offsets_.numel() - 1;
    batch.num_slots = num_slots;
    batch.mean = mean;
    bool ascends = batch.bags >= 0 && batch.offsets[0] == 0;
    for (int64_t bag = 0; bag < batch.bags; ++bag) ascends &= batch.offsets[bag] <= batch.offsets[bag + 1];
    require(ascends && batch.offsets[batch.bags] <= L, "offsets must ascend from 0 to at most ", L, ", the number of ids");
    const int64_t features = int64_t(slots.size());
    require(features >= 1 && batch.bags % features == 0, "offsets holds ", batch.bags, " bags, which is not a multiple of ",
            features, " features");
    batch.slots.assign(slots.begin(), slots.end());
    std::vector<int64_t> sorted = slots;
    std::sort(sorted.begin(), sorted.end());
    require(sorted[0] >= 0 && sorted.back() < num_slots && std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
            "slots are not different numbers from 0 to ", num_slots - 1, ": give each feature its own");
    require(batch.samples() <= kMost / num_slots, "there are ", batch.samples(), " samples of ", num_slots, " slots: give at most ",
            kMost, " slots together");
    if (!weights) return;
    weights_ = contiguous(*weights, "per_sample_weights", ScalarType::Float, "float32");
    require(weights_.numel() == L && !mean, "per_sample_weights holds ", weights_.numel(), " numbers for ", L,
            " ids: give one for each, and mode 'sum'");
    batch.weights = static_cast<const float*>(weights_.data_ptr());
  }

  Buffer<float> diagonals_;
  Tensor offsets_, weights_;
};

// A contiguous float32 tensor of all slots.
void require_bags(const Tensor& tensor, const char* name, const Batch& batch) {
  require_plain(tensor, name, ScalarType::Float, "float32");
  require(tensor.numel() == batch.samples() * batch.num_slots * batch.num_cols, name, " has shape ", shape_of(tensor),
          ", but the bags are ", batch.samples(), " x ", batch.num_slots * batch.num_cols);
}

Tensor pool(
    std::vector<Tensor> cores, std::vector<Tensor> diagonals, std::vector<Tensor> plan, Tensor offsets, std::optional<Tensor> weights,
    bool mean, std::vector<int64_t> slots, int64_t num_slots, int64_t num_cols, std::vector<int64_t> hot_blocks,
    std::vector<int64_t> first_rows) {
  const Arguments arguments(cores, diagonals, plan, offsets, weights, mean, slots, num_slots, num_cols, hot_blocks, first_rows);
  Tensor out = reused({arguments.batch.samples(), num_slots * num_cols});
  pool_bags(arguments.batch, static_cast<float*>(out.data_ptr()));
  return out;
}

// Writes the features' slots of a tensor that `pool` returned for other features.
void pool_into(
    Tensor out, std::vector<Tensor> cores, std::vector<Tensor> diagonals, std::vector<Tensor> plan, Tensor offsets,
    std::optional<Tensor> weights, bool mean, std::vector<int64_t> slots, int64_t num_slots, int64_t num_cols,
    std::vector<int64_t> hot_blocks, std::vector<int64_t> first_rows) {
  const Arguments arguments(cores, diagonals, plan, offsets, weights, mean, slots, num_slots, num_cols, hot_blocks, first_rows);
  require_bags(out, "out", arguments.batch);
  pool_bags(arguments.batch, static_cast<float*>(out.data_ptr()));
}

std::tuple<std::vector<Tensor>, Tensor> run_backward(
    const Tensor& gradient, const Batch& batch, const std::vector<Target>& targets, bool has_weights) {
  require_bags(gradient, "gradient", batch);
  std::vector<Tensor> diagonal_gradients;
  std::vector<float*> pointers;
  for (int rank : batch.ranks) {
    diagonal_gradients.push_back(empty({rank}, ScalarType::Float));
    pointers.push_back(static_cast<float*>(diagonal_gradients.back().data_ptr()));
  }
  Tensor weight_gradients = empty({has_weights ? batch.num_lookups : 0}, ScalarType::Float);
  backward(
      batch, static_cast<const float*>(gradient.data_ptr()), targets, pointers,
      has_weights ? static_cast<float*>(weight_gradients.data_ptr()) : nullptr);
  return {diagonal_gradients, weight_gradients};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, Tensor> pool_backward(
    Tensor gradient, std::vector<Tensor> cores, std::vector<Tensor> diagonals, std::vector<Tensor> plan, Tensor offsets,
    std::optional<Tensor> weights, bool mean, std::vector<int64_t> slots, int64_t num_slots, int64_t num_cols,
    std::vector<int64_t> hot_blocks, std::vector<int64_t> first_rows) {
  const Arguments arguments(cores, diagonals, plan, offsets, weights, mean, slots, num_slots, num_cols, hot_blocks, first_rows, true);
  std::vector<Tensor> core_gradients;
  std::vector<Target> targets;
  for (size_t k = 0; k < cores.size(); ++k) {
    core_gradients.push_back(torch::stable::empty_like(cores[k]));
    targets.push_back({arguments.batch.cores[k], core_gradients.back().data_ptr(), nullptr});
  }
  auto [diagonal_gradients, weight_gradients] = run_backward(gradient, arguments.batch, targets, weights.has_value());
  return {core_gradients, diagonal_gradients, weight_gradients};
}

constexpr int64_t kSettings = 7;

// An optimizer's state of a core, laid out like the core or with one number for each slice.
void* state_of(const std::vector<Tensor>& states, size_t k, const Tensor& core, bool is_by_slice, const char* name) {
  if (states.empty()) return nullptr;
  const Tensor& state = states[k];
  if (is_by_slice) {
    const int64_t slices = core.size(core.dim() == 4 ? 1 : 0);
    require(state.scalar_type() == ScalarType::Float && state.is_contiguous() && state.numel() == slices, name, "[", k,
            "] has shape ", shape_of(state), ": give a float32 number for each of ", slices, " slices");
  } else {
    bool is_alike = state.dim() == core.dim() && state.scalar_type() == core.scalar_type();
    for (int64_t axis = 0; is_alike && axis < core.dim(); ++axis)
      is_alike = state.size(axis) == core.size(axis) && (core.size(axis) == 1 || state.stride(axis) == core.stride(axis));
    require(is_alike, name, "[", k, "] has shape ", shape_of(state), " or strides unlike those of its core, ", shape_of(core));
  }
  require(state.is_cpu(), name, "[", k, "] is not on CPU: move it");
  return state.data_ptr();
}

std::tuple<std::vector<Tensor>, Tensor> pool_backward_update(
    Tensor gradient, std::vector<Tensor> cores, std::vector<Tensor> diagonals, std::vector<Tensor> plan, Tensor offsets,
    std::optional<Tensor> weights, bool mean, std::vector<int64_t> slots, int64_t num_slots, int64_t num_cols,
    std::vector<int64_t> hot_blocks, std::vector<int64_t> first_rows, std::vector<Tensor> first, std::vector<Tensor> second, int64_t kind,
    std::vector<double> settings, int64_t seed) {
  const Arguments arguments(cores, diagonals, plan, offsets, weights, mean, slots, num_slots, num_cols, hot_blocks, first_rows, true);
  require(kind >= 0 && kind <= int64_t(Update::Kind::adamw), "kind is ", kind, ": choose 0 to 4");
  const Update::Kind chosen = Update::Kind(kind);
  // Diagonals are updated too if there are settings for them.
  const size_t count = settings.size() / kSettings;
  require(settings.size() == count * kSettings && (count == cores.size() || count == cores.size() + diagonals.size()),
          "settings holds ", settings.size(), " numbers: give ", kSettings, " for each core, or for each core and diagonal");
  const bool has_second = chosen == Update::Kind::adam || chosen == Update::Kind::adamw;
  require(first.size() == (chosen == Update::Kind::sgd ? 0 : count) && second.size() == (has_second ? count : 0),
          "first and second hold ", first.size(), " and ", second.size(), " states for ", count, " parameters");
  std::vector<Update> updates(count);
  std::vector<Target> targets(cores.size());
  for (size_t k = 0; k < count; ++k) {
    const bool is_core = k < cores.size();
    const Tensor& parameter = is_core ? cores[k] : diagonals[k - cores.size()];
    const double* const values = &settings[k * kSettings];
    const auto value = [&](size_t number) { return float(values[number]); };
    updates[k] = {
        chosen, value(0), value(1), value(2), value(3), value(4), value(5), value(6), float(1 - values[3]), float(1 - values[4]),
        state_of(first, k, parameter, chosen == Update::Kind::row_wise_adagrad, "first"),
        state_of(second, k, parameter, false, "second"), uint64_t(seed) + k};
    if (is_core) targets[k] = {arguments.batch.cores[k], nullptr, &updates[k]};
  }
  auto gradients = run_backward(gradient, arguments.batch, targets, weights.has_value());
  for (size_t k = cores.size(); k < count; ++k) {
    const Tensor& diagonal = diagonals[k - cores.size()];
    float* gradient = static_cast<float*>(std::get<0>(gradients)[k - cores.size()].data_ptr());
    // Rows of a diagonal (r, 1) have one number each.
    const int64_t size = chosen == Update::Kind::row_wise_adagrad ? 1 : std::max<int64_t>(1, diagonal.numel());
    const Core core{diagonal.data_ptr(), number_of(diagonal, "diagonals"), diagonal.numel() / size, size, 0};
    for (int64_t slice = 0; slice < core.slices; ++slice) kernels().update_slice(core, updates[k], slice, gradient + slice * size);
  }
  return gradients;
}

// Calls run(bag, slot) with pointers to bag f of `few`, [B, F * N], and to bag slots[f] of `all`, [B, S * N], for all f and samples.
template <class Run>
void for_slots(const Tensor& few, const Tensor& all, const std::vector<int64_t>& slots, const Run& run) {
  require_plain(few, "few", ScalarType::Float, "float32");
  require_plain(all, "all", ScalarType::Float, "float32");
  const int64_t features = int64_t(slots.size());
  require(few.dim() == 2 && all.dim() == 2 && features > 0 && few.size(1) % features == 0 && few.size(1) > 0 &&
              few.size(0) == all.size(0), "few has shape ", shape_of(few), " and all ", shape_of(all), ": give bags of as many samples");
  const int64_t width = few.size(1) / features, row = all.size(1);
  for (int64_t slot : slots) require(slot >= 0 && slot < row / width, "slots hold ", slot, ", but there are ", row / width);
  float *few_at = static_cast<float*>(few.data_ptr()), *all_at = static_cast<float*>(all.data_ptr());
  const int64_t samples = few.size(0), of_task = std::max<int64_t>(1, 2048 / features);
  run_tasks((samples + of_task - 1) / of_task, [&](int64_t task, int64_t) {
    for (int64_t sample = task * of_task; sample < std::min(samples, (task + 1) * of_task); ++sample)
      for (int64_t f = 0; f < features; ++f)
        run(few_at + (sample * features + f) * width, all_at + sample * row + slots[f] * width, size_t(4 * width));
  });
}

void write_slots(Tensor all, Tensor few, std::vector<int64_t> slots) {
  for_slots(few, all, slots, [](float* bag, float* slot, size_t bytes) { std::memcpy(slot, bag, bytes); });
}

Tensor read_slots(Tensor all, std::vector<int64_t> slots, int64_t width) {
  require(all.dim() == 2 && width > 0, "all has shape ", shape_of(all), " and width is ", width, ": give bags (B, S * width)");
  Tensor few = reused({all.size(0), int64_t(slots.size()) * width});
  for_slots(few, all, slots, [](float* bag, float* slot, size_t bytes) { std::memcpy(bag, slot, bytes); });
  return few;
}

std::string cpu() { return kernels().name; }

int64_t threads_used_last() { return threads_used.load(); }

}  // namespace
}  // namespace comera

#define COMERA_LOOKUP \
  "Tensor[] plan, Tensor offsets, Tensor? weights, bool mean, int[] slots, int num_slots, int num_cols, int[] hot_blocks, " \
  "int[] first_rows"

STABLE_TORCH_LIBRARY(comera_rec, library) {
  library.def(
      "plan_lookup(Tensor[] ids, int[] num_embeddings, int[] row_shapes) -> "
      "(Tensor inverse, Tensor order, Tensor starts, Tensor rows, Tensor left, Tensor right, Tensor bounds)");
  library.def("pool(Tensor[] cores, Tensor[] diagonals, " COMERA_LOOKUP ") -> Tensor");
  library.def("pool_into(Tensor(a!) out, Tensor[] cores, Tensor[] diagonals, " COMERA_LOOKUP ") -> ()");
  library.def(
      "pool_backward(Tensor gradient, Tensor[] cores, Tensor[] diagonals, " COMERA_LOOKUP ") -> "
      "(Tensor[] cores, Tensor[] diagonals, Tensor weights)");
  library.def(
      "pool_backward_update(Tensor gradient, Tensor(a!)[] cores, Tensor(d!)[] diagonals, " COMERA_LOOKUP ", Tensor(b!)[] first, "
      "Tensor(c!)[] second, int kind, float[] settings, int seed) -> (Tensor[] diagonals, Tensor weights)");
  library.def("write_slots(Tensor(a!) all, Tensor few, int[] slots) -> ()");
  library.def("read_slots(Tensor all, int[] slots, int width) -> Tensor");
  library.def("cpu() -> str");
  library.def("threads_used_last() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(comera_rec, CPU, library) {
  library.impl("plan_lookup", TORCH_BOX(&comera::plan_lookup));
  library.impl("pool", TORCH_BOX(&comera::pool));
  library.impl("pool_into", TORCH_BOX(&comera::pool_into));
  library.impl("write_slots", TORCH_BOX(&comera::write_slots));
  library.impl("read_slots", TORCH_BOX(&comera::read_slots));
  library.impl("pool_backward", TORCH_BOX(&comera::pool_backward));
  library.impl("pool_backward_update", TORCH_BOX(&comera::pool_backward_update));
}

STABLE_TORCH_LIBRARY_IMPL(comera_rec, CompositeExplicitAutograd, library) {
  library.impl("cpu", TORCH_BOX(&comera::cpu));
  library.impl("threads_used_last", TORCH_BOX(&comera::threads_used_last));
}
