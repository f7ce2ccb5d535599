// The plan of a lookup: the unique rows of a batch, and the slices that form them.
#pragma once

#include <cstdint>
#include <vector>

namespace comera {

// T tables of d cores; L ids of all tables, concatenated. Slices and products are numbered through all tables.
struct Plan {
  int32_t* inverse;  // [L] number of each id's unique row
  int32_t* order;    // [L] positions of ids sorted by row
  int32_t* starts;   // [L + 1] start of each row in `order`; L beyond the last row
  int32_t* p;        // [L] by unique row: a slice of the first core or a product of `left`; here and below -1 beyond the last
  int32_t* q;        // [L] by unique row: a slice of the last core or a product of `right`
  int32_t* left_outer;   // [L] if d >= 3: slices of the first core
  int32_t* left_inner;   // [L] and of the second core in each product of `left`
  int32_t* right_outer;  // [L] if d = 4: slices of the fourth core
  int32_t* right_inner;  // [L] and of the third core in each product of `right`
  int32_t* bounds;       // [3 + d, T + 1] first row, first products of `left` and of `right`, and first slice of each core, for
                         // each table; in the last column the total counts
};

struct TableIds {
  const void* ids;  // int32 or int64
  bool is_long;
  int64_t count;
  int64_t num_embeddings;
  const int64_t* row_shape;  // [d]
};

// Throws std::invalid_argument with the number of the table and the id, if an id is out of range.
void make_plan(const std::vector<TableIds>& tables, int64_t order, const Plan& plan);

// Returns whether a plan for L lookups in T tables is one that `make_plan` makes for some ids, so that loops can rely on its numbers.
bool is_plan(const Plan& plan, int64_t order, int64_t T, int64_t L);

}  // namespace comera
