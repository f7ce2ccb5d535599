#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace comera {
namespace {

constexpr size_t kHeader = 64, kLarge = size_t(1) << 20, kStep = size_t(64) << 10;
constexpr size_t kMostKept = size_t(512) << 20;
constexpr int64_t kPatience = 64;  // takes of large blocks after which an unused one is freed

// Stored before every block.
struct Header {
  size_t capacity;
};

struct Block {
  Header* header;
  int64_t given;  // number of takes when the block was given back
};

struct Pool {
  std::mutex mutex;
  std::vector<Block> kept;  // oldest first
  size_t kept_bytes = 0;
  int64_t takes = 0;

  void free_kept(size_t index) {
    kept_bytes -= kept[index].header->capacity;
    std::free(kept[index].header);
    kept.erase(kept.begin() + index);
  }
};

// Never destroyed: tensors may give their memory back while the process exits.
Pool& pool = *new Pool;

Header* allocate(size_t capacity) {
  void* memory = std::aligned_alloc(kHeader, capacity);
  if (memory == nullptr) throw std::bad_alloc();
  Header* header = static_cast<Header*>(memory);
  header->capacity = capacity;
  return header;
}

size_t rounded(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

}  // namespace

void* take_memory(size_t bytes) {
  bytes += kHeader;
  Header* header = nullptr;
  if (bytes >= kLarge) {
    bytes = rounded(bytes, kStep);
    // Another thread may hold the lock in a process that forks: the child does without the pool.
    const std::unique_lock<std::mutex> lock(pool.mutex, std::try_to_lock);
    if (!lock) return reinterpret_cast<char*>(allocate(bytes)) + kHeader;
    std::vector<Block>& kept = pool.kept;
    ++pool.takes;
    size_t best = kept.size();
    for (size_t k = 0; k < kept.size(); ++k) {
      const size_t capacity = kept[k].header->capacity;
      if (capacity >= bytes && capacity <= bytes + bytes / 4 + kStep &&
          (best == kept.size() || capacity <= kept[best].header->capacity))
        best = k;
    }
    if (best < kept.size()) {
      header = kept[best].header;
      pool.kept_bytes -= header->capacity;
      kept.erase(kept.begin() + best);
    }
    while (!kept.empty() && kept.front().given + kPatience < pool.takes) pool.free_kept(0);
  } else {
    bytes = rounded(bytes, kHeader);
  }
  if (header == nullptr) header = allocate(bytes);
  return reinterpret_cast<char*>(header) + kHeader;
}

void give_memory(void* memory) {
  if (memory == nullptr) return;
  Header* header = reinterpret_cast<Header*>(static_cast<char*>(memory) - kHeader);
  if (header->capacity < kLarge || header->capacity > kMostKept) {
    std::free(header);
    return;
  }
  const std::unique_lock<std::mutex> lock(pool.mutex, std::try_to_lock);
  if (!lock) return std::free(header);
  pool.kept.push_back({header, pool.takes});
  pool.kept_bytes += header->capacity;
  while (pool.kept_bytes > kMostKept) pool.free_kept(0);
}

}  // namespace comera
