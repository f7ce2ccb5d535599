#include "plan.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

#include "memory.h"
#include "parallel.h"

namespace comera {
namespace {

constexpr int kDigitBits = 12;     // of a pass of the radix sort, whose counters fit the first-level cache
constexpr int64_t kFewWords = 512;  // up to which a comparison sort is faster

// Stable sort of words by their bits [low, low + bits), in place.
void sort_words(uint64_t* words, uint64_t* other, int64_t count, int low, int bits) {
  if (count <= kFewWords) {
    const uint64_t mask = ((uint64_t(1) << bits) - 1) << low;
    std::stable_sort(words, words + count, [mask](uint64_t a, uint64_t b) { return (a & mask) < (b & mask); });
    return;
  }
  const int passes = (bits + kDigitBits - 1) / kDigitBits, width = passes > 0 ? (bits + passes - 1) / passes : 0;
  const uint64_t mask = (uint64_t(1) << width) - 1;
  int32_t counters[1 << kDigitBits];
  uint64_t *source = words, *target = other;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = low + pass * width;
    std::fill_n(counters, int64_t(1) << width, 0);
    for (int64_t i = 0; i < count; ++i) ++counters[size_t(source[i] >> shift & mask)];
    int32_t before = 0;
    for (int64_t digit = 0; digit < int64_t(1) << width; ++digit) {
      const int32_t here = counters[digit];
      counters[digit] = before;
      before += here;
    }
    for (int64_t i = 0; i < count; ++i) target[counters[size_t(source[i] >> shift & mask)]++] = source[i];
    std::swap(source, target);
  }
  if (source != words) std::copy(source, source + count, words);
}

int bits_of(int64_t count) { return std::bit_width(uint64_t(count > 0 ? count - 1 : 0)); }

// One table's share of the plan.
struct Part {
  TableIds table;
  int64_t first_lookup = 0, first_row = 0;
  int64_t left_slices = 0, right_slices = 0;  // or the possible products of two slices
  int64_t rows = 0, left_products = 0, right_products = 0;
  int64_t bad_id = 0;
  bool has_bad_id = false;
};

// Sorts the ids, each with its position in one word.
void sort_ids(Part& part, uint64_t* words, uint64_t* other) {
  const int64_t count = part.table.count, limit = part.table.num_embeddings;
  const int position_bits = bits_of(count);
  const auto pack = [&](const auto* ids) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = ids[i];
      if (uint64_t(id) >= uint64_t(limit)) {
        part.bad_id = id;
        part.has_bad_id = true;
        return;
      }
      words[i] = uint64_t(id) << position_bits | uint64_t(i);
    }
  };
  part.table.is_long ? pack(static_cast<const int64_t*>(part.table.ids)) : pack(static_cast<const int32_t*>(part.table.ids));
  if (part.has_bad_id) return;
  sort_words(words, other, count, position_bits, bits_of(limit));
  for (int64_t i = 0; i < count; ++i) part.rows += i == 0 || words[i] >> position_bits != words[i - 1] >> position_bits;
}

// Finds the rows of a table from its sorted ids; p and q are numbered within the table.
void write_rows(const Part& part, const uint64_t* words, const Plan& plan) {
  const int position_bits = bits_of(part.table.count);
  const uint64_t mask = (uint64_t(1) << position_bits) - 1;
  const int64_t right = part.right_slices;
  int64_t row = part.first_row - 1, digit = 0, digit_start = 0;
  for (int64_t i = 0; i < part.table.count; ++i) {
    const int64_t position = part.first_lookup + int64_t(words[i] & mask);
    if (i == 0 || words[i] >> position_bits != words[i - 1] >> position_bits) {
      const int64_t id = int64_t(words[i] >> position_bits);
      if (id - digit_start >= right) {  // neighbors usually share the leading digit, and comparing is cheaper than dividing
        digit = id / right;
        digit_start = digit * right;
      }
      ++row;
      plan.starts[row] = int32_t(part.first_lookup + i);
      plan.p[row] = int32_t(digit);
      plan.q[row] = int32_t(id - digit_start);
    }
    plan.order[part.first_lookup + i] = int32_t(position);
    plan.inverse[position] = int32_t(row);
  }
}

// Sorts the rows of a table by q.
void sort_by_q(const Part& part, uint64_t* words, uint64_t* other, const Plan& plan) {
  const int row_bits = bits_of(part.rows);
  for (int64_t u = 0; u < part.rows; ++u)
    words[u] = uint64_t(uint32_t(plan.q[part.first_row + u])) << row_bits | uint64_t(u);
  sort_words(words, other, part.rows, row_bits, bits_of(part.right_slices));
  const uint64_t mask = (uint64_t(1) << row_bits) - 1;
  for (int64_t t = 0; t < part.rows; ++t) words[t] = uint64_t(part.first_row) + (words[t] & mask);
}

// Replaces digits of rows, in ascending order, by numbers of products, whose two digits are appended to `high_digit` and `low_digit`.
template <class RowAt>
int64_t number_products(const Part& part, int32_t* digits, const RowAt& row_at, int64_t low, int32_t* high_digit, int32_t* low_digit) {
  int64_t products = 0, previous = -1;
  for (int64_t t = 0; t < part.rows; ++t) {
    int32_t& digit = digits[row_at(t)];
    if (digit != previous) {
      previous = digit;
      high_digit[part.first_row + products] = int32_t(digit / low);
      low_digit[part.first_row + products] = int32_t(digit % low);
      ++products;
    }
    digit = int32_t(products - 1);
  }
  return products;
}

void shift(int32_t* values, int64_t count, int64_t by) {
  for (int64_t i = 0; i < count; ++i) values[i] += int32_t(by);
}

// Moves products of a table next to those of the table before, and numbers their slices through all tables.
void close_gap(int32_t* products, int64_t from, int64_t to, int64_t count, int64_t first_slice) {
  std::copy(products + from, products + from + count, products + to);
  shift(products + to, count, first_slice);
}

}  // namespace

void make_plan(const std::vector<TableIds>& tables, int64_t order, const Plan& plan) {
  const int64_t cut = (order + 1) / 2, T = int64_t(tables.size());
  std::vector<Part> parts(tables.size());
  int64_t lookups = 0;
  for (int64_t t = 0; t < T; ++t) {
    Part& part = parts[t];
    part.table = tables[t];
    part.first_lookup = lookups;
    lookups += tables[t].count;
    part.left_slices = part.right_slices = 1;
    for (int64_t k = 0; k < order; ++k) (k < cut ? part.left_slices : part.right_slices) *= tables[t].row_shape[k];
  }
  // An id and its position in one word: sorting moves both.
  Buffer<uint64_t> words(2 * lookups);
  uint64_t *of_ids = words.get(), *other = of_ids + lookups;
  run_tasks(T, [&](int64_t t, int64_t) {
    sort_ids(parts[t], of_ids + parts[t].first_lookup, other + parts[t].first_lookup);
  });
  int64_t rows = 0;
  for (int64_t t = 0; t < T; ++t) {
    if (parts[t].has_bad_id)
      throw std::invalid_argument(
          "ids[" + std::to_string(t) + "] holds " + std::to_string(parts[t].bad_id) + ", which is out of range: ids run from 0 to " +
          std::to_string(tables[t].num_embeddings - 1));
    parts[t].first_row = rows;
    rows += parts[t].rows;
  }
  run_tasks(T, [&](int64_t t, int64_t) {
    Part& part = parts[t];
    const int64_t at = part.first_lookup;
    write_rows(part, of_ids + at, plan);
    if (order >= 3)
      part.left_products = number_products(
          part, plan.p, [&](int64_t u) { return part.first_row + u; }, part.table.row_shape[1], plan.left_outer, plan.left_inner);
    if (order == 4) {
      const uint64_t* by_q = of_ids + at;
      sort_by_q(part, of_ids + at, other + at, plan);
      part.right_products = number_products(
          part, plan.q, [&](int64_t t) { return int64_t(by_q[t]); }, part.table.row_shape[3], plan.right_inner, plan.right_outer);
    }
  });
  // Numbers within each table become numbers through all tables.
  int32_t *row_bounds = plan.bounds, *left_bounds = plan.bounds + T + 1, *right_bounds = plan.bounds + 2 * (T + 1);
  int64_t left = 0, right = 0;
  std::vector<int64_t> first_slices(order, 0);
  const auto write_first_slices = [&](int64_t t) {
    for (int64_t k = 0; k < order; ++k) plan.bounds[(3 + k) * (T + 1) + t] = int32_t(first_slices[k]);
  };
  for (int64_t t = 0; t < T; ++t) {
    const Part& part = parts[t];
    write_first_slices(t);
    row_bounds[t] = int32_t(part.first_row);
    left_bounds[t] = int32_t(left);
    right_bounds[t] = int32_t(right);
    shift(plan.p + part.first_row, part.rows, order >= 3 ? left : first_slices[0]);
    shift(plan.q + part.first_row, part.rows, order == 4 ? right : first_slices[order - 1]);
    if (order >= 3) {
      close_gap(plan.left_outer, part.first_row, left, part.left_products, first_slices[0]);
      close_gap(plan.left_inner, part.first_row, left, part.left_products, first_slices[1]);
    }
    if (order == 4) {
      close_gap(plan.right_outer, part.first_row, right, part.right_products, first_slices[3]);
      close_gap(plan.right_inner, part.first_row, right, part.right_products, first_slices[2]);
    }
    left += part.left_products;
    right += part.right_products;
    for (int64_t k = 0; k < order; ++k) first_slices[k] += tables[t].row_shape[k];
  }
  row_bounds[T] = int32_t(rows);
  left_bounds[T] = int32_t(left);
  right_bounds[T] = int32_t(right);
  write_first_slices(T);
  const auto pad = [&](int32_t* values, int64_t from) { std::fill(values + from, values + lookups, -1); };
  std::fill(plan.starts + rows, plan.starts + lookups + 1, int32_t(lookups));
  for (int32_t* values : {plan.p, plan.q}) pad(values, rows);
  if (order >= 3)
    for (int32_t* values : {plan.left_outer, plan.left_inner}) pad(values, left);
  if (order == 4)
    for (int32_t* values : {plan.right_outer, plan.right_inner}) pad(values, right);
}

bool is_plan(const Plan& plan, int64_t order, int64_t T, int64_t L) {
  const auto bounds = [&](int64_t k) { return plan.bounds + k * (T + 1); };
  for (int64_t k = 0; k < 3 + order; ++k) {
    if (bounds(k)[0] != 0) return false;
    for (int64_t t = 0; t < T; ++t)
      if (bounds(k)[t] > bounds(k)[t + 1]) return false;
  }
  const int64_t U = bounds(0)[T], left = bounds(1)[T], right = bounds(2)[T];
  if (U > L || left > (order >= 3 ? L : 0) || right > (order == 4 ? L : 0)) return false;
  if (plan.starts[0] != 0 || plan.starts[U] != L) return false;
  const auto is_within = [](int32_t number, const int32_t* range) { return number >= range[0] && number < range[1]; };
  std::atomic<bool> fits{true};
  const auto check = [&](int64_t t, int64_t first, int64_t beyond) {
    const int32_t *p_range = bounds(order >= 3 ? 1 : 3) + t, *q_range = bounds(order == 4 ? 2 : 2 + order) + t;
    const auto row_before = [&](int64_t u) { return std::pair(plan.p[u - 1], plan.q[u - 1]) < std::pair(plan.p[u], plan.q[u]); };
    for (int64_t u = first; u < beyond; ++u) {
      const int64_t start = plan.starts[u], end = plan.starts[u + 1];
      if (!is_within(plan.p[u], p_range) || !is_within(plan.q[u], q_range) || (u > bounds(0)[t] && !row_before(u))) return false;
      if (start < 0 || start >= end || end > L) return false;
      for (int64_t i = start, previous = -1; i < end; ++i) {
        const int64_t lookup = plan.order[i];
        if (lookup <= previous || lookup >= L || plan.inverse[lookup] != u) return false;
        previous = lookup;
      }
    }
    return true;
  };
  // Products ascend by the slices of core `high`, then by those of core `low`, as the ids that they are digits of do.
  const auto check_products = [&](int64_t t, int64_t k, const int32_t* high_of, const int32_t* low_of, int64_t high, int64_t low) {
    const auto product = [&](int64_t number) { return std::pair(high_of[number], low_of[number]); };
    for (int64_t number = bounds(k)[t]; number < bounds(k)[t + 1]; ++number) {
      if (!is_within(high_of[number], bounds(3 + high) + t) || !is_within(low_of[number], bounds(3 + low) + t)) return false;
      if (number > bounds(k)[t] && product(number - 1) >= product(number)) return false;
    }
    return true;
  };
  constexpr int64_t kParts = 8;  // of a table
  run_tasks(T * kParts, [&](int64_t task, int64_t) {
    const int64_t t = task / kParts, part = task % kParts, begin = bounds(0)[t], rows = bounds(0)[t + 1] - begin;
    bool is_right = check(t, begin + rows * part / kParts, begin + rows * (part + 1) / kParts);
    if (part == 0 && order >= 3) is_right = is_right && check_products(t, 1, plan.left_outer, plan.left_inner, 0, 1);
    if (part == 0 && order == 4) is_right = is_right && check_products(t, 2, plan.right_inner, plan.right_outer, 2, 3);
    if (!is_right) fits.store(false, std::memory_order_relaxed);
  });
  return fits.load();
}

}  // namespace comera
