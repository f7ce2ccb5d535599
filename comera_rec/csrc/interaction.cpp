// The operators of DLRM's interaction.
#include "interaction.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "kernels.h"
#include "memory.h"
#include "parallel.h"
#include "tensors.h"

namespace comera {
namespace {

constexpr int64_t kSamplesOfATask = 32;

Samples samples_of(const Tensor& lead, const Tensor& rows) {
  require_plain(lead, "lead", ScalarType::Float, "float32");
  require(rows.scalar_type() == ScalarType::Float && rows.is_cpu(), "rows is not float32 on CPU: convert it, or move it");
  require(lead.dim() == 2 && rows.dim() == 3 && rows.size(0) == lead.size(0) && rows.size(2) == lead.size(1) && lead.size(1) > 0,
          "lead has shape ", shape_of(lead), " and rows ", shape_of(rows), ": give (B, N) and (B, F - 1, N)");
  Samples samples{rows.size(1) + 1, lead.size(1), static_cast<const float*>(lead.data_ptr()),
                  static_cast<const float*>(rows.data_ptr()), rows.stride(0)};
  const auto steps = [&](int64_t dim, int64_t step) { return rows.size(dim) == 1 || rows.stride(dim) == step; };
  const bool is_dense = rows.numel() == 0 || (steps(2, 1) && steps(1, rows.size(2)));
  require(is_dense, "rows has rows apart from each other: copy it");
  return samples;
}

template <class Run>
void for_samples(const Samples& samples, int64_t count, const Run& run) {
  const int64_t tasks = (count + kSamplesOfATask - 1) / kSamplesOfATask;
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(tasks, torch::stable::get_num_threads()));
  const int64_t floats = kernels().interaction_scratch_floats(samples);
  const Buffer<float> scratch(threads * floats);
  run_tasks(tasks, [&](int64_t task, int64_t thread) {
    const int64_t first = task * kSamplesOfATask;
    run(first, std::min(first + kSamplesOfATask, count), scratch.get() + thread * floats);
  });
}

// [B, N] and [B, F - 1, N] -> [B, N + P]: the lead, then the products of all pairs of features.
Tensor interact(Tensor lead, Tensor rows) {
  const Samples samples = samples_of(lead, rows);
  Tensor out = reused({lead.size(0), samples.outputs()});
  float* out_at = static_cast<float*>(out.data_ptr());
  for_samples(samples, lead.size(0), [&](int64_t first, int64_t beyond, float* scratch) {
    kernels().interact(samples, first, beyond, out_at, scratch);
  });
  return out;
}

std::tuple<Tensor, Tensor> interact_backward(Tensor gradient, Tensor lead, Tensor rows) {
  const Samples samples = samples_of(lead, rows);
  require_plain(gradient, "gradient", ScalarType::Float, "float32");
  require(gradient.numel() == lead.size(0) * samples.outputs(), "gradient has shape ", shape_of(gradient), ", but there are ",
          lead.size(0), " samples with ", samples.outputs(), " outputs each");
  Tensor lead_gradient = reused({lead.size(0), lead.size(1)}), rows_gradient = reused({rows.size(0), rows.size(1), rows.size(2)});
  const float* gradient_at = static_cast<const float*>(gradient.data_ptr());
  float *lead_at = static_cast<float*>(lead_gradient.data_ptr()), *rows_at = static_cast<float*>(rows_gradient.data_ptr());
  for_samples(samples, lead.size(0), [&](int64_t first, int64_t beyond, float* scratch) {
    kernels().interact_backward(samples, gradient_at, first, beyond, lead_at, rows_at, scratch);
  });
  return {lead_gradient, rows_gradient};
}

}  // namespace
}  // namespace comera

STABLE_TORCH_LIBRARY_FRAGMENT(comera_rec, library) {
  library.def("interact(Tensor lead, Tensor rows) -> Tensor");
  library.def("interact_backward(Tensor gradient, Tensor lead, Tensor rows) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(comera_rec, CPU, library) {
  library.impl("interact", TORCH_BOX(&comera::interact));
  library.impl("interact_backward", TORCH_BOX(&comera::interact_backward));
}
