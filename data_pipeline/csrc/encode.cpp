// Encoding of keys as ids, by the hash tables of `data_pipeline/hashing.py` or by hashes.

#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "array.h"

namespace data_pipeline {
namespace {

constexpr int64_t kAhead = 8;             // how many lookups in advance slots are prefetched
constexpr int64_t kLeastRange = 64 << 10;  // bytes of a file that the system maps on one access

template <class Key>
struct Slot {
  Key key;
  Key id;  // 0 if the slot is free
};

// A table [slots, 2] in a file. An untrusted one may be full or empty, so the number of probes is limited.
template <class Key>
class Table {
 public:
  explicit Table(Array<Key> pairs) : slots_{reinterpret_cast<Slot<Key>*>(pairs.data), pairs.size / 2} {}

  // Returns a key's slot, or the free slot for it; null if there is neither.
  Slot<Key>* find(Key key) const {
    int64_t slot = home(key);
    for (int64_t probes = 0; probes < slots_.size; ++probes) {
      Slot<Key>* candidate = slots_.data + slot;
      if (candidate->key == key || candidate->id == 0) return candidate;
      slot = slot + 1 == slots_.size ? 0 : slot + 1;
    }
    return nullptr;
  }

  void fetch(Key key) const { __builtin_prefetch(slots_.data + home(key)); }

  // Returns a key's first slot by Fibonacci hashing (Knuth, TAOCP 3, section 6.4), the upper half of a product: cheap and good
  // enough for probing. Each slot is a range of hashes, so any number of slots below 2^32 works.
  int64_t home(Key key) const { return (key * 0x9E3779B97F4A7C15 >> 32) * static_cast<uint64_t>(slots_.size) >> 32; }

 private:
  const Array<Slot<Key>> slots_;
};

template <class Key>
int64_t insert(Array<Key> pairs, Array<const Key> keys, int64_t first_id, int64_t first_slot, int64_t end_slot) {
  const Table<Key> table(pairs);
  for (int64_t i = 0; i < keys.size; ++i) {
    const int64_t home = table.home(keys[i]);
    if (home < first_slot || home >= end_slot) continue;
    Slot<Key>* slot = table.find(keys[i]);
    if (!slot) return kWrongSizes;
    *slot = {keys[i], static_cast<Key>(first_id + i)};
  }
  return 0;
}

// Releases a mapped file's pages: the file keeps what was written, and pages are mapped again on access.
template <class T>
void release(Array<T> file) {
  if (file.size) madvise(const_cast<std::remove_const_t<T>*>(file.data), file.size * sizeof(T), MADV_DONTNEED);
}

// A column's id source: hashes into `buckets` if that isn't 0, else a table's pairs, of which at most `room` bytes may be in memory.
template <class Key>
struct IdSource {
  Array<Key> pairs;
  int64_t room;
  int64_t buckets;
};

// Calls `look(i, ahead)` for every key i, where `ahead` is a key to prefetch. If room is limited, the table is visited range by
// range, and pages are released after each: in the keys' order, nearly every key would map pages again.
template <class Key, class Look>
void visit(const Table<Key>& table, const IdSource<Key>& column, Array<const Key> keys, Look look) {
  if (column.room >= column.pairs.size * static_cast<int64_t>(sizeof(Key))) {
    for (int64_t i = 0; i < keys.size; ++i) look(i, std::min(i + kAhead, keys.size - 1));
    return;
  }
  const int64_t slots = std::max(column.room, kLeastRange) / sizeof(Slot<Key>);
  const auto range_of = [&](int64_t i) { return table.home(keys[i]) / slots; };
  std::vector<int64_t> ends(column.pairs.size / 2 / slots + 2);
  for (int64_t i = 0; i < keys.size; ++i) ++ends[range_of(i) + 1];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::vector<int64_t> order(keys.size);
  for (int64_t i = 0; i < keys.size; ++i) order[ends[range_of(i)]++] = i;
  int64_t next = 0;
  for (const int64_t end : ends) {
    if (next == end) continue;
    for (; next < end; ++next) look(order[next], order[std::min(next + kAhead, keys.size - 1)]);
    release(column.pairs);
  }
}

// Fills ids, 0 where a key is missing or not in the table, and returns how many are 0.
template <class Key>
int64_t look_up(const IdSource<Key>& column, Array<const Key> keys, Array<const bool> missing, Array<int32_t> ids) {
  const Table<Key> table(column.pairs);
  int64_t zeros = 0;
  visit(table, column, keys, [&](int64_t i, int64_t ahead) {
    table.fetch(keys[ahead]);
    const Slot<Key>* slot = missing[i] ? nullptr : table.find(keys[i]);
    ids[i] = slot ? static_cast<int32_t>(slot->id) : 0;
    zeros += ids[i] == 0;
  });
  return zeros;
}

// Fills ids 1..buckets - 1 by the keys' hashes, 0 where a key is missing, and returns how many are 0.
template <class Key>
int64_t hash(int64_t buckets, Array<const Key> keys, Array<const bool> missing, Array<int32_t> ids) {
  int64_t zeros = 0;
  for (int64_t i = 0; i < keys.size; ++i) {
    const uint64_t bucket = (mix(keys[i] + 0x9E3779B97F4A7C15) >> 32) * static_cast<uint64_t>(buckets - 1) >> 32;
    ids[i] = missing[i] ? 0 : static_cast<int32_t>(bucket + 1);
    zeros += ids[i] == 0;
  }
  return zeros;
}

template <class Key>
int64_t encode_keys(
    Array<const IdSource<Key>> id_sources, Matrix<const Key> keys, Matrix<const bool> missing, Matrix<int32_t> ids, Array<int64_t> zeros) {
  if (!keys.is_like(missing) || !keys.is_like(ids) || id_sources.size != keys.columns || zeros.size != keys.columns) return kWrongSizes;
  for (int64_t c = 0; c < keys.columns; ++c) {
    const IdSource<Key>& column = id_sources[c];
    zeros[c] = column.buckets ? hash(column.buckets, keys[c], missing[c], ids[c]) : look_up(column, keys[c], missing[c], ids[c]);
  }
  return 0;
}

}  // namespace

// Inserts new keys into free slots, with consecutive ids from `first_id` on; but only keys whose first slot is in
// [first_slot, end_slot), so that a table larger than memory can be filled range by range.
EXPORTED int64_t insert_u32(
    Array<uint32_t> pairs, Array<const uint32_t> keys, int64_t first_id, int64_t first_slot, int64_t end_slot) {
  return insert(pairs, keys, first_id, first_slot, end_slot);
}
EXPORTED int64_t insert_u64(
    Array<uint64_t> pairs, Array<const uint64_t> keys, int64_t first_id, int64_t first_slot, int64_t end_slot) {
  return insert(pairs, keys, first_id, first_slot, end_slot);
}

EXPORTED int64_t release_pages(Array<const uint8_t> file) {
  release(file);
  return 0;
}

// Fills each column's ids, 0 where a key is missing or not in the table, and how many are 0.
EXPORTED int64_t encode_keys_u32(
    Array<const IdSource<uint32_t>> id_sources, Matrix<const uint32_t> keys, Matrix<const bool> missing, Matrix<int32_t> ids,
    Array<int64_t> zeros) {
  return encode_keys(id_sources, keys, missing, ids, zeros);
}
EXPORTED int64_t encode_keys_u64(
    Array<const IdSource<uint64_t>> id_sources, Matrix<const uint64_t> keys, Matrix<const bool> missing, Matrix<int32_t> ids,
    Array<int64_t> zeros) {
  return encode_keys(id_sources, keys, missing, ids, zeros);
}

}  // namespace data_pipeline
