// Bags of rows for requests: tables that no longer change, read from one block of memory, without a plan.
//
// A feature's row is formed in advance, or it is the product of one slice of each core, plus a hot row if a slab has one.
#pragma once

#include <cstdint>
#include <vector>

namespace comera {

enum class Stored : int32_t { float32, bfloat16, int8 };

// Consecutive rows of numbers; those of int8 begin with their scale, a float.
struct StoredRows {
  const char* data = nullptr;
  Stored type = Stored::float32;
  int64_t count = 0;
  int64_t size = 0;    // numbers in a row
  int64_t stride = 0;  // bytes from one row to the next
};

// A core's slices, [left rank, right rank, columns].
struct ServedCore {
  StoredRows slices;
  int left = 1, right = 1, columns = 1;
};

// Hot rows of ids from `first` on: `width` numbers each, times columns [width, N], are added to the rows of the cores.
struct Slab {
  StoredRows rows;
  const float* columns = nullptr;
  int64_t first = 0;
};

constexpr int kMostCores = 4;
constexpr int64_t kSlack = 64;  // bytes after the last row that may be read

struct ServedFeature {
  int64_t rows = 0;
  bool mean = false;
  StoredRows formed;  // rows of the first ids
  int order = 0;      // 0 if all rows are formed in advance
  ServedCore cores[kMostCores];
  std::vector<Slab> slabs;
};

// The bags of one feature in a task: `lengths` values each, written to out, `step` floats apart.
struct ServedBags {
  const int64_t* values = nullptr;
  const int64_t* lengths = nullptr;
  const float* weights = nullptr;  // of the values; null if all are 1
  int64_t count = 0;
  int64_t columns = 0;
  float* out = nullptr;
  int64_t step = 0;
};

}  // namespace comera
