// Products of all pairs of a sample's features, as DLRM needs them, and their gradients.
//
// A sample has F features of N numbers: one from `lead`, the others from `rows`. F and N are padded with zeros in scratch memory, so
// that every tile is whole.
#pragma once

#include <cstdint>

namespace comera {

struct Samples {
  int64_t features = 0, columns = 0;  // F, N
  const float* lead = nullptr;        // [B, N]
  const float* rows = nullptr;        // [B, F - 1, N]
  int64_t row_step = 0;               // floats from one sample's rows to the next one's

  int64_t outputs() const { return columns + features * (features - 1) / 2; }
};

}  // namespace comera
