#include "pool.h"

#include "tables.h"

namespace comera {

void pool_bags(const Batch& batch, float* out) {
  const Kernels& kernels = comera::kernels();
  const Pairs pairs(batch);
  std::vector<Table> tables = tables_of(batch, pairs);
  const HotTables hot(batch, tables);
  const ScratchMemory scratch(tables, pairs, kernels);
  const Buffer<float> right_products = make_right_products(pairs, tables, kernels, scratch);
  const LookupBags lookup_bags(batch, true);
  const Lookups lookups = lookup_bags.lookups(batch.plan);
  const int64_t width = batch.num_cols;
  const bool streams = width % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  const Bags bags{out, width, streams, batch.samples(), batch.num_slots, batch.slots.data()};
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
        rows.get(), batch.plan.inverse, batch.offsets, batch.weights, batch.mean, bags, batch.bags, batch.bags * task / tasks,
        batch.bags * (task + 1) / tasks);
  });
}

}  // namespace comera
