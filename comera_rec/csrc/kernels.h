// The arguments of the loops over rows, and the table of these loops, of which there is one for each instruction set.
//
// T tables of two, three or four cores each. A table's cores are cut into a leading and a trailing half, of one or two cores; a pair
// of cores is multiplied first, so that loops over rows know one core a half: row (p, q) is the product of slice p of the left and
// slice q of the right one. Slices, and products of pairs, are numbered through all tables.
// U unique rows, sorted by table, p and q. L lookups, sorted by row.
#pragma once

#include <cstdint>

#include "interaction.h"
#include "serve.h"

namespace comera {

namespace {

// Floats in whole vectors of every instruction set.
[[maybe_unused]] constexpr int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

enum class Number : int32_t { float32, bfloat16, float16 };

// Slices of a core, one after the other, each contiguous.
struct Core {
  void* data = nullptr;
  Number number = Number::float32;
  int64_t slices = 0;
  int64_t size = 0;   // numbers in a slice
  int64_t first = 0;  // number of its first slice among those of all tables
};

// Two cores that form a half: their products [rank, n] are stored rank by rank, like slices.
struct Pair {
  Core outer;  // the core at the end of the chain: slices [bond, outer_n]
  Core inner;  // the core next to the cut: slices [bond, rank, inner_n]
  const float* diagonal = nullptr;  // [bond]
  int bond = 0, rank = 0, outer_n = 0, inner_n = 0;
  bool outer_is_slow = true;  // whether the outer core's columns are the slow index of a product's: true for leading halves
  const int32_t* outer_of = nullptr;  // slices by number of the product
  const int32_t* inner_of = nullptr;
  int64_t first = 0, beyond = 0;  // numbers of the table's products

  [[gnu::always_inline]] int64_t size() const { return int64_t(rank) * outer_n * inner_n; }
  // Products [first, beyond) as slices of a core.
  [[gnu::always_inline]] Core core_of(float* products, int64_t first, int64_t beyond) const {
    return {products, Number::float32, beyond - first, size(), first};
  }
};

// A block of hot rows, which are added to the rows of the cores: `width` numbers each, times the projection.
struct HotBlock {
  Core rows;                           // slices [width]
  const float* projection = nullptr;   // [width, columns], times the diagonal
  int64_t width = 0, first = 0;        // numbers of a row; id of the first row, which may be below 0 in shards
};

struct Table {
  Core left, right;                 // slices [rank, n1] and [rank, n2]; of a pair on the right, its products
  const Pair* left_pair = nullptr;  // on the left, its products are formed as rows need them
  const float* diagonal = nullptr;  // at the cut, [rank]
  int rank = 0;
  int n1 = 0, n2 = 0;
  int64_t row_begin = 0, row_end = 0;
  const HotBlock* hot = nullptr;      // consecutive blocks
  const int32_t* hot_ids = nullptr;   // ids of the rows from row_begin to hot_end
  int64_t hot_end = 0, hot_width = 0;  // width of the widest block
};

// The lookups of a batch.
struct Lookups {
  const int32_t* p = nullptr;       // [U]
  const int32_t* q = nullptr;       // [U]
  const int32_t* starts = nullptr;  // [U + 1] the first lookup of each row
  const int32_t* order = nullptr;   // [L] lookups sorted by row
  const int32_t* bags = nullptr;    // [L] by sorted lookup: its bag in the output, -1 for none
  const float* scales = nullptr;    // [L] by sorted lookup: factor of its row; null if all are 1 and in bags
};

struct Bags {
  float* values = nullptr;  // [samples, num_slots, width]
  int64_t width = 0;        // at most n1 * n2
  bool streams = false;     // whether bags are whole cache lines, which are then written past the caches
  int64_t samples = 0, num_slots = 0;
  const int32_t* slots = nullptr;  // [F] the slot of each feature
};

// An optimizer's update of a slice; `update_floats` in update.h has the formulas.
struct Update {
  enum class Kind : int32_t { sgd, adagrad, row_wise_adagrad, adam, adamw };
  Kind kind = Kind::sgd;
  float lr = 0, eps = 0, weight_decay = 0;
  float beta1 = 0, beta2 = 0, correction1 = 1, correction2 = 1;  // of Adam and AdamW; corrections are 1 - beta^step
  float gain1 = 1, gain2 = 1;                                    // 1 - beta, which floats near 1 would lose
  void* first = nullptr;   // Adagrad's sums or Adam's first moments, like the core; row-wise Adagrad's sums: float [slices]
  void* second = nullptr;  // Adam's second moments
  uint64_t seed = 0;       // of the rounding to 16 bits
};

// Target of the gradient of a core's slices: a tensor like the core, or an update of the core. Slices that no row uses get a zero
// gradient, or no update.
struct Target {
  Core core;
  void* gradient = nullptr;
  const Update* update = nullptr;
};

// Gradients of the bags; gradients of the scales are written if their pointer isn't null.
struct BagGradients {
  const float* values = nullptr;
  int64_t width = 0;
  float* scale_gradients = nullptr;  // [L] by lookup
};

// Sums of gradients [slices, size]; only those of slices in state `summed` are initialized.
struct Sums {
  enum State : uint8_t { untouched, summed, finished };
  float* values = nullptr;
  uint8_t* states = nullptr;
  int64_t size = 0;
};

// Targets of the gradients of a hot block. Each row is in one range of rows only, so its gradient needs no sum.
struct HotSums {
  Target rows;
  Sums projection;  // one slice, not yet times the diagonal
};

// Gradient sums of one range of a table's rows, separate from other ranges so that each is summed in the order of its rows.
struct Stripe {
  Sums left, left_inner, right;  // if the left half is a pair, of its outer and its inner core
  const HotSums* hot = nullptr;  // of each block
  // Of tables of two cores, whose slices are finished at once where no other row has them, or rows that follow each other.
  const Target *left_target = nullptr, *right_target = nullptr;
  const uint8_t* uses = nullptr;     // by right slice: how many rows have it, 2 for more
  float* cut_products = nullptr;     // [rank, n2], of right slices that were finished at once; see `finish_sums`
};

struct Kernels {
  const char* name;

  // The most floats of scratch memory that loops over a table's rows, and those over a pair's products, need.
  int64_t (*scratch_floats)(const Table&);
  int64_t (*pair_floats)(const Pair&);

  // Writes rows [first, beyond) to `rows` [U, width] or, if that is null, to their bags of one lookup each.
  void (*look_up)(const Table&, const Lookups&, const Bags&, float* rows, int64_t first, int64_t beyond, float* scratch);
  // Forms products [first, beyond) of a pair in out [.., rank, n].
  void (*make_products)(const Pair&, int64_t first, int64_t beyond, float* out, float* scratch);
  // Pools rows to bags [first, beyond) of `count`, numbered feature by feature: inverse [L], offsets [count + 1].
  void (*pool)(
      const float* rows, const int32_t* inverse, const int64_t* offsets, const float* weights, bool mean, const Bags&, int64_t count,
      int64_t first, int64_t beyond);

  // Propagates gradients of rows [first, beyond) to the slices, not yet times the diagonal beside these.
  void (*gradients_of_rows)(
      const Table&, const Lookups&, const BagGradients&, int64_t first, int64_t beyond, const Stripe&, float* scratch);
  // Multiplies gradients [.., rank, n] of products [first, beyond) of a pair by the diagonal at the cut, and propagates them to its
  // cores.
  void (*gradients_of_products)(
      const Pair&, const float* diagonal, float* gradients, int64_t first, int64_t beyond, const Sums& outer,
      const Sums& inner, float* scratch);
  // For slices [first, beyond), adds the sums of all stripes, times the diagonal unless its pointer is null, to the target; if its
  // pointer isn't null, also adds products of the sums and slices to `products` [rows, ..], whose rows' sums are the gradient of the
  // diagonal.
  void (*finish_sums)(
      const Sums* stripes, int count, const float* diagonal, int64_t rows, const Target&, int64_t first, int64_t beyond,
      float* products, float* scratch);
  // Writes a core's only slice as floats, its rows times a diagonal, to `out`.
  void (*scaled_rows)(const Core&, const float* diagonal, int64_t rows, float* out);
  // Makes an optimizer's step for one slice, numbered from the core's first.
  void (*update_slice)(const Core&, const Update&, int64_t slice, float* gradient);

  // The scratch memory and the bags of a feature; see serve_kernel.h.
  int64_t (*serve_scratch_floats)(const ServedFeature&, int64_t columns);
  int64_t (*serve_bags)(const ServedFeature&, const ServedBags&, float* scratch);

  // DLRM's interaction of samples [first, beyond); see interaction_kernel.h.
  int64_t (*interaction_scratch_floats)(const Samples&);
  void (*interact)(const Samples&, int64_t first, int64_t beyond, float* out, float* scratch);
  void (*interact_backward)(
      const Samples&, const float* gradient, int64_t first, int64_t beyond, float* lead_gradient, float* rows_gradient,
      float* scratch);
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The best kernels for this machine, or those that the environment variable COMERA_CPU names.
const Kernels& kernels();

}  // namespace comera
