// Bags of rows for requests: tables that no longer change, read from one block of memory, without a plan.
//
// A feature's row is formed in advance, or it is the product of one slice a core, to which a slab of hot rows may add.
#pragma once

#include <cstdint>
#include <vector>

namespace comera {

enum class Stored : int32_t { float32, bfloat16, int8 };

// Rows of numbers, one after the other; those of int8 begin with their scale, a float.
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

// Rows of `width` numbers that are added, times columns [width, N], to those of the cores for ids from `first` on.
struct Slab {
  StoredRows rows;
  const float* columns = nullptr;
  int64_t first = 0;
};

constexpr int kMostCores = 4;
constexpr int64_t kSlack = 64;  // bytes behind the last row that are read with it

struct ServedFeature {
  int64_t rows = 0;
  bool mean = false;
  StoredRows formed;  // of ids from 0 on
  int order = 0;      // 0 where all rows are formed
  ServedCore cores[kMostCores];
  std::vector<Slab> slabs;
};

// The bags of one feature that a task makes: `lengths` values each, into out, `step` floats from one bag to the next.
struct ServedBags {
  const int64_t* values = nullptr;
  const int64_t* lengths = nullptr;
  int64_t count = 0;
  int64_t columns = 0;
  float* out = nullptr;
  int64_t step = 0;
};

}  // namespace comera
