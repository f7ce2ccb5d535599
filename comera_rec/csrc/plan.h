// The plan of a lookup: the unique rows of a batch, and which slices make them.
#pragma once

#include <cstdint>
#include <vector>

namespace comera {

// T tables of d cores; L ids of all tables, end to end. Numbers of slices and products count over all tables.
struct Plan {
  int32_t* inverse;  // [L] the unique row that each id is
  int32_t* order;    // [L] ids sorted by row
  int32_t* starts;   // [L + 1] where the ids of each row start in `order`; L beyond the last row
  int32_t* p;        // [L] of the leading half: by unique row, a slice or a product of `left`; -1 beyond the last, as all below
  int32_t* q;        // [L] of the trailing half: a slice or a product of `right`
  int32_t* left_outer;   // [L] of d >= 3: slices of the first core, and
  int32_t* left_inner;   // [L] of the second, whose products p counts
  int32_t* right_outer;  // [L] of d = 4: slices of the fourth core, and
  int32_t* right_inner;  // [L] of the third, whose products q counts
  int32_t* bounds;       // [3 + d, T + 1] the first row, product of `left` and product of `right` of each table, and their number;
                         // and the first slice of each core
};

struct TableIds {
  const void* ids;  // int32 or int64
  bool is_long;
  int64_t count;
  int64_t num_embeddings;
  const int64_t* row_shape;  // [d]
};

// Throws std::invalid_argument that names the table's number and the id for one that is out of range.
void make_plan(const std::vector<TableIds>& tables, int64_t order, bool parallel, const Plan& plan);

}  // namespace comera
