// What an operator asks of its arguments before any pointer is used; errors become Python's.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

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

// A tensor's shape in a message; written only if there is one.
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
  require(tensor.scalar_type() == type, name, " is of another type than ", type_name, ": convert it");
  require(tensor.is_cpu() && tensor.is_contiguous(), name, " is not a contiguous tensor on CPU: move it, or copy it");
}

inline Tensor empty(std::vector<int64_t> sizes, ScalarType type) {
  return torch::stable::empty(
      sizes, type, std::nullopt, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

}  // namespace comera
