// Shared by operators: checks of arguments, made before any pointer is used, and memory for results.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "memory.h"

namespace comera {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Words>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(const Words&... words) {
  std::ostringstream message;
  (message << ... << words);
  throw std::invalid_argument(message.str());
}

template <class... Words>
inline void require(bool is_met, const Words&... words) {
  if (!is_met) refuse(words...);
}

// A tensor's shape in a message, formatted only if the message is needed.
struct Shape {
  const Tensor& tensor;
};

inline Shape shape_of(const Tensor& tensor) { return {tensor}; }

inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '(';
  for (int64_t k = 0; k < shape.tensor.dim(); ++k) out << (k ? ", " : "") << shape.tensor.size(k);
  return out << ')';
}

inline void require_plain(const Tensor& tensor, const char* name, ScalarType type, const char* type_name) {
  require(tensor.scalar_type() == type, name, " is not ", type_name, ": convert it");
  require(tensor.is_cpu() && tensor.is_contiguous(), name, " is not a contiguous tensor on CPU: move it, or copy it");
}

// The tensor, or a contiguous copy: torch.export drops the copies that callers make.
inline Tensor contiguous(const Tensor& tensor, const char* name, ScalarType type, const char* type_name) {
  require(tensor.scalar_type() == type, name, " is not ", type_name, ": convert it");
  require(tensor.is_cpu(), name, " is not on CPU: move it");
  return torch::stable::contiguous(tensor);
}

inline Tensor empty(std::vector<int64_t> sizes, ScalarType type) {
  return torch::stable::empty(
      sizes, type, std::nullopt, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

// Floats in memory that later calls reuse.
inline Tensor reused(std::vector<int64_t> sizes) {
  int64_t count = 1;
  std::vector<int64_t> strides(sizes.size());
  for (size_t k = sizes.size(); k-- > 0; count *= sizes[k]) strides[k] = count;
  if (count == 0) return empty(sizes, ScalarType::Float);
  return torch::stable::from_blob(
      take_memory(sizeof(float) * size_t(count)), sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
      ScalarType::Float, give_memory);
}

}  // namespace comera
