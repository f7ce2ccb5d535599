// Loops over rows and slices. Compiled once for each instruction set, as `COMERA_KERNELS`; nothing here is shared between them.
#include "kernels.h"

#include "interaction_kernel.h"
#include "pairs.h"
#include "products.h"
#include "serve_kernel.h"
#include "slices.h"
#include "update.h"

namespace comera {
namespace {

constexpr int64_t kAhead = 6;          // rows to prefetch ahead, so that data has arrived when it is needed
constexpr int64_t kAheadLookups = 16;  // lookups to prefetch ahead

// What hot blocks add to rows, which are visited in the order of their ids.
class HotRows {
 public:
  HotRows(const Table& table, int64_t width, Scratch& scratch) : table_(table), width_(width), block_(table.hot) {
    widened_ = scratch.take(table.hot_width);
    row_gradient_ = scratch.take(table.hot_width);
  }

  // Whether a block has row u; if so, `current_` is the block's numbers for it.
  COMERA_INLINE bool find(int64_t u) {
    if (u >= table_.hot_end) return false;
    const int64_t id = table_.hot_ids[u - table_.row_begin];
    while (id >= block_->first + block_->rows.slices) ++block_;
    slice_ = id - block_->first;
    current_ = slice_of(block_->rows, slice_, widened_);
    return true;
  }

  // With sums, also prefetches the state that the gradient will update.
  COMERA_INLINE void prefetch_later(int64_t u, const HotSums* sums = nullptr) const {
    if (u >= table_.hot_end) return;
    const int64_t slice = table_.hot_ids[u - table_.row_begin] - block_->first;
    if (slice >= block_->rows.slices) return;
    prefetch_slice(block_->rows, slice);
    if (sums == nullptr) return;
    const Target& rows = sums[block_ - table_.hot].rows;
    if (rows.update == nullptr || rows.update->first == nullptr) return;
    const bool is_row_wise = rows.update->kind == Update::Kind::row_wise_adagrad;
    const Number number = is_row_wise ? Number::float32 : rows.core.number;
    __builtin_prefetch(offset(rows.update->first, number, is_row_wise ? slice : slice * block_->width), 1);
  }

  void add_to(float* row) const { add_row(width_, current_, block_->projection, block_->width, row); }

  // Propagates the gradient of the row to the block's rows and projection.
  void add_gradient(const float* gradient, const HotSums* sums) const {
    if (block_->width == 0) return;  // truncated to rank 0
    const auto& [rows, projection] = sums[block_ - table_.hot];
    float* projection_gradient = touch(projection, 0);
    std::memset(row_gradient_, 0, 4 * block_->width);
    row_gradients(width_, current_, block_->projection, gradient, block_->width, row_gradient_, projection_gradient);
    if (rows.update != nullptr) {
      update_slice(rows.core, *rows.update, slice_, row_gradient_);
    } else {
      narrow(row_gradient_, rows.core.number, block_->width, offset(rows.gradient, rows.core.number, slice_ * block_->width));
    }
  }

 private:
  const Table& table_;
  const int64_t width_;
  const HotBlock* block_;
  const float* current_ = nullptr;
  int64_t slice_ = 0;
  float *widened_, *row_gradient_;
};

// Calls run(table, first, beyond) for rows [first, beyond) or, if the left half is a pair, for blocks of them with few products, which
// are formed first and then are the table's left slices.
constexpr int64_t kBlockProducts = 32;

template <class Run>
COMERA_INLINE void for_blocks(
    const Table& table, const Lookups& lookups, int64_t first, int64_t beyond, float* products, float* memory, const Run& run) {
  if (table.left_pair == nullptr) return run(table, first, beyond);
  const Pair& pair = *table.left_pair;
  Table formed = table;
  for (int64_t end = first; first < beyond; first = end) {
    const int64_t number = lookups.p[first];
    while (end < beyond && lookups.p[end] < number + kBlockProducts) ++end;
    formed.left = pair.core_of(products, number, lookups.p[end - 1] + 1);
    make_products(pair, number, lookups.p[end - 1] + 1, products, memory);
    run(formed, first, end);
  }
}

int64_t block_floats(const Table& table) {
  return table.left_pair == nullptr ? 0 : rounded(kBlockProducts * table.left_pair->size());
}

int64_t scratch_floats(const Table& table) {
  return (table.left_pair == nullptr ? 0 : pair_floats(*table.left_pair)) + 2 * block_floats(table) + 2 * rounded(table.left.size) +
         2 * rounded(table.right.size) + 3 * rounded(int64_t(table.n1) * table.n2) + 2 * rounded(table.hot_width) + rounded(kBlockProducts);
}

template <int N1, int N2>
void look_up(
    const Table& table, const Lookups& lookups, const Bags& bags, float* rows, int64_t first, int64_t beyond, Scratch scratch) {
  const int n1 = N1 > 0 ? N1 : table.n1, n2 = N2 > 0 ? N2 : table.n2;
  const int64_t width = bags.width;
  const Core lefts = table.left, rights = table.right;  // copies, which stores to bags can't change
  float *row = scratch.take(int64_t(n1) * n2), *left_floats = scratch.take(lefts.size), *right_floats = scratch.take(rights.size);
  HotRows hot(table, width, scratch);
  const float* left = nullptr;
  for (int64_t u = first; u < beyond; ++u) {
    if (left == nullptr || lookups.p[u] != lookups.p[u - 1]) left = slice_of(lefts, lookups.p[u], left_floats);
    if (u + kAhead < beyond) {
      prefetch_slice(lefts, lookups.p[u + kAhead]);
      prefetch_slice(rights, lookups.q[u + kAhead]);
    }
    multiply<N1, N2>(n1, n2, left, slice_of(rights, lookups.q[u], right_floats), table.diagonal, table.rank, row);
    if (hot.find(u)) {
      hot.prefetch_later(u + kAhead);
      hot.add_to(row);
    }
    if (rows != nullptr) {
      std::memcpy(rows + u * width, row, 4 * width);
      continue;
    }
    for (int64_t t = lookups.starts[u]; t < lookups.starts[u + 1]; ++t) {
      float* bag = bags.values + lookups.bags[t] * width;
      if (bags.streams) {
        stream(bag, row, width);
      } else {
        std::memcpy(bag, row, 4 * width);
      }
    }
  }
  finish_streaming();
}

void pool(
    const float* rows, const int32_t* inverse, const int64_t* offsets, const float* weights, bool mean, const Bags& bags, int64_t count,
    int64_t first, int64_t beyond) {
  const int64_t width = bags.width;
  for (int64_t bag = first; bag < beyond; ++bag) {
    const int64_t start = offsets[bag], end = offsets[bag + 1];
    float* out = bags.values + (bag % bags.samples * bags.num_slots + bags.slots[bag / bags.samples]) * width;
    std::memset(out, 0, 4 * width);
    const float share = mean && end > start ? 1.0f / float(end - start) : 1.0f;
    for (int64_t i = start; i < end; ++i) {
      if (i + kAheadLookups < offsets[count]) prefetch(rows + inverse[i + kAheadLookups] * width, 4 * width);
      add_scaled(out, rows + inverse[i] * width, weights != nullptr ? weights[i] * share : share, width);
    }
  }
}

// The gradient of a row: the sum over its lookups of their bags' gradients. Also gradients of the lookups' scales.
template <int N>
COMERA_INLINE void sum_lookups(
    const Lookups& lookups, const BagGradients& gradients, int64_t u, int64_t last, int64_t n, const float* row, float* sum) {
  const int64_t width = gradients.width;
  int64_t t = lookups.starts[u];
  const int64_t end = lookups.starts[u + 1];
  for (int64_t i = t; i < end && i + kAheadLookups < last; ++i)
    if (lookups.bags[i + kAheadLookups] >= 0) prefetch(gradients.values + lookups.bags[i + kAheadLookups] * width, 4 * width);
  if constexpr (N > 0) {
    if (N == width && lookups.scales == nullptr && gradients.scale_gradients == nullptr) {
      constexpr int kBlock = smaller(N, 4 * kWidth), W = widest(kBlock), V = kBlock / W;  // powers of two
      for (int j = 0; j < N; j += kBlock) {
        Vector<W> sums[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[v] = load<W>(gradients.values + lookups.bags[t] * width + j + v * W);
        for (int64_t i = t + 1; i < end; ++i)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[v] += load<W>(gradients.values + lookups.bags[i] * width + j + v * W);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store<W>(sum + j + v * W, sums[v]);
      }
      return;
    }
  }
  std::memset(sum, 0, 4 * n);
  for (; t < end; ++t) {
    if (lookups.bags[t] < 0) {
      if (gradients.scale_gradients != nullptr) gradients.scale_gradients[lookups.order[t]] = 0;
      continue;
    }
    const float* gradient = gradients.values + lookups.bags[t] * width;
    add_scaled(sum, gradient, lookups.scales != nullptr ? lookups.scales[t] : 1.0f, width);
    if (gradients.scale_gradients != nullptr) gradients.scale_gradients[lookups.order[t]] = dot(gradient, row, width);
  }
}

// Multiplies the gradient of a slice by the diagonal and gives it to the target; also adds to `products`, whose rows' sums are the
// gradient of the diagonal. Either pointer may be null.
COMERA_INLINE void finish_slice(
    const Target& target, int64_t slice, float* total, const float* diagonal, int64_t rows, float* products, float* widened) {
  const Core& core = target.core;
  if (products != nullptr) add_products(total, slice_of(core, slice + core.first, widened), core.size, products);
  if (diagonal != nullptr) scale_rows(total, diagonal, rows, core.size);
  if (target.update == nullptr) {
    narrow(total, core.number, core.size, offset(target.gradient, core.number, slice * core.size));
  } else {
    update_slice(core, *target.update, slice, total);
  }
}

template <int N1, int N2>
void gradients_of_rows(
    const Table& table, const Lookups& lookups, const BagGradients& gradients, int64_t first, int64_t beyond, int64_t last_lookup,
    const Stripe& stripe, Scratch scratch) {
  const int n1 = N1 > 0 ? N1 : table.n1, n2 = N2 > 0 ? N2 : table.n2, rank = table.rank;
  const int64_t n = int64_t(n1) * n2, left_size = table.left.size, right_size = table.right.size;
  const int32_t *p = lookups.p, *q = lookups.q;
  float *sum = scratch.take(n), *turned = scratch.take(n), *row = scratch.take(n);
  float *left_floats = scratch.take(left_size), *right_floats = scratch.take(right_size), *left_gradient = nullptr;
  float *left_total = scratch.take(left_size), *right_total = scratch.take(right_size);
  HotRows hot(table, gradients.width, scratch);
  const float* left = nullptr;
  const bool at_once = stripe.uses != nullptr;
  // Left slices that this range shares with the ones before and after it.
  const int64_t before = first > table.row_begin ? p[first - 1] : -1, after = beyond < table.row_end ? p[beyond] : -1;
  const auto finish_left = [&](int64_t number) {
    if (left_gradient != left_total) return;
    finish_slice(*stripe.left_target, number - table.left.first, left_total, table.diagonal, rank, nullptr, left_floats);
    stripe.left.states[number - table.left.first] = Sums::finished;
  };
  for (int64_t u = first; u < beyond; ++u) {
    if (u == first || p[u] != p[u - 1]) {
      if (u > first) finish_left(p[u - 1]);
      left = slice_of(table.left, p[u], left_floats);
      if (at_once && p[u] != before && p[u] != after) {
        left_gradient = left_total;
        std::memset(left_total, 0, 4 * left_size);
      } else {
        left_gradient = touch(stripe.left, p[u] - table.left.first);
      }
    }
    const int64_t right_slice = q[u] - table.right.first;
    if (u + kAhead < beyond) {
      const int64_t later = q[u + kAhead] - table.right.first;
      prefetch_slice(table.left, p[u + kAhead]);
      prefetch_slice(table.right, q[u + kAhead]);
      if (!at_once || stripe.uses[later] > 1) prefetch(stripe.right.values + later * right_size, 4 * right_size);
    }
    const float* right = slice_of(table.right, q[u], right_floats);
    const bool is_hot = hot.find(u);
    if (gradients.scale_gradients != nullptr) {
      multiply<N1, N2>(n1, n2, left, right, table.diagonal, rank, row);
      if (is_hot) hot.add_to(row);
    }
    sum_lookups<N1 * N2>(lookups, gradients, u, last_lookup, n, row, sum);
    if (is_hot) {
      hot.prefetch_later(u + kAhead, stripe.hot);
      hot.add_gradient(sum, stripe.hot);
    }
    transpose(n1, n2, sum, turned);
    add_product<N2, N1>(n2, n1, right, turned, rank, left_gradient);
    if (at_once && stripe.uses[right_slice] == 1) {
      std::memset(right_total, 0, 4 * right_size);
      add_product<N1, N2>(n1, n2, left, sum, rank, right_total);
      finish_slice(*stripe.right_target, right_slice, right_total, table.diagonal, rank, stripe.cut_products, right_floats);
      stripe.right.states[right_slice] = Sums::finished;
    } else {
      add_product<N1, N2>(n1, n2, left, sum, rank, touch(stripe.right, right_slice));
    }
  }
  if (first < beyond) finish_left(p[beyond - 1]);
}

void finish_sums(
    const Sums* stripes, int count, const float* diagonal, int64_t rows, const Target& target, int64_t first, int64_t beyond,
    float* products, float* memory) {
  Scratch scratch(memory);
  const Core& core = target.core;
  if (core.size == 0) return;  // truncated to rank 0: there is no memory
  float* widened = scratch.take(core.size);
  for (int64_t slice = first; slice < beyond; ++slice) {
    float* total = nullptr;
    bool is_finished = false;
    for (int s = 0; s < count; ++s) {
      is_finished |= stripes[s].states[slice] == Sums::finished;
      if (stripes[s].states[slice] != Sums::summed) continue;
      float* values = stripes[s].values + slice * core.size;
      if (total == nullptr) {
        total = values;
      } else {
        add_scaled(total, values, 1.0f, core.size);
      }
    }
    if (total != nullptr) {
      finish_slice(target, slice, total, diagonal, rows, products, widened);
    } else if (target.update == nullptr && !is_finished) {
      std::memset(offset(target.gradient, core.number, slice * core.size), 0, core.size * bytes_of(core.number));
    }
  }
}

void scaled_rows(const Core& core, const float* diagonal, int64_t rows, float* out) {
  if (core.size == 0) return;  // truncated to rank 0
  widen(core.data, core.number, core.size, out);
  scale_rows(out, diagonal, rows, core.size);
}

void look_up_by_size(
    const Table& table, const Lookups& lookups, const Bags& bags, float* rows, int64_t first, int64_t beyond, float* memory) {
  Scratch scratch(memory);
  float *products = scratch.take(block_floats(table)), *rest = scratch.take(0);
  for_blocks(table, lookups, first, beyond, products, rest, [&](const Table& formed, int64_t u, int64_t end) {
    with_common_sizes(formed.n1, formed.n2, [&]<int N1, int N2>() {
      look_up<N1, N2>(formed, lookups, bags, rows, u, end, scratch);
    });
  });
}

void gradients_of_rows_by_size(
    const Table& table, const Lookups& lookups, const BagGradients& gradients, int64_t first, int64_t beyond, const Stripe& stripe,
    float* memory) {
  Scratch scratch(memory);
  float *products = scratch.take(block_floats(table)), *product_gradients = scratch.take(block_floats(table)), *rest = scratch.take(0);
  for_blocks(table, lookups, first, beyond, products, rest, [&](const Table& formed, int64_t u, int64_t end) {
    Stripe sums = stripe;
    uint8_t states[kBlockProducts] = {};
    const Pair* pair = formed.left_pair;
    if (pair != nullptr) {
      std::memset(product_gradients, 0, 4 * formed.left.slices * formed.left.size);
      std::memset(states, Sums::summed, sizeof states);
      sums.left = {product_gradients, states, formed.left.size};
    }
    with_common_sizes(formed.n1, formed.n2, [&]<int N1, int N2>() {
      gradients_of_rows<N1, N2>(formed, lookups, gradients, u, end, lookups.starts[beyond], sums, scratch);
    });
    if (pair == nullptr) return;
    const int64_t number = formed.left.first;
    gradients_of_products(
        *pair, formed.diagonal, product_gradients, number, number + formed.left.slices, stripe.left, stripe.left_inner, rest);
  });
}

}  // namespace

#define COMERA_STRING_OF(name) #name
#define COMERA_NAMED(name) COMERA_STRING_OF(name)
#define COMERA_JOINED(a, b) a##b
#define COMERA_TABLE(name) COMERA_JOINED(kernels_, name)

const Kernels COMERA_TABLE(COMERA_KERNELS) = {
    COMERA_NAMED(COMERA_KERNELS),
    scratch_floats,
    pair_floats,
    look_up_by_size,
    make_products,
    pool,
    gradients_of_rows_by_size,
    gradients_of_products,
    finish_sums,
    scaled_rows,
    update_slice,
    serve_scratch_floats,
    serve_bags,
    interaction_scratch_floats,
    interact,
    interact_backward,
};

}  // namespace comera
