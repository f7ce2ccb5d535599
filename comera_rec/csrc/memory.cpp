#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace comera {
namespace {

constexpr size_t kHeader = 64, kLarge = size_t(1) << 20, kHugePage = size_t(2) << 20;
constexpr size_t kMostKept = size_t(512) << 20;
constexpr int64_t kPatience = 64;  // takes after which a block that none of them fitted is freed

// In front of every block.
struct Header {
  size_t capacity;
};

struct Block {
  Header* header;
  int64_t given;  // the count of takes when it was given back
};

std::mutex mutex;
std::vector<Block> kept;  // the longest kept first
size_t kept_bytes = 0;
int64_t takes = 0;

Header* allocate(size_t capacity) {
  const bool is_large = capacity >= kLarge;
  void* memory = std::aligned_alloc(is_large ? kHugePage : kHeader, capacity);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
  if (is_large) madvise(memory, capacity, MADV_HUGEPAGE);
#endif
  Header* header = static_cast<Header*>(memory);
  header->capacity = capacity;
  return header;
}

size_t rounded(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

void free_kept(size_t index) {
  kept_bytes -= kept[index].header->capacity;
  std::free(kept[index].header);
  kept.erase(kept.begin() + index);
}

}  // namespace

void* take_memory(size_t bytes) {
  bytes += kHeader;
  Header* found = nullptr;
  if (bytes >= kLarge) {
    bytes = rounded(bytes, kHugePage);
    const std::lock_guard<std::mutex> lock(mutex);
    ++takes;
    size_t best = kept.size();
    for (size_t k = 0; k < kept.size(); ++k) {
      const size_t capacity = kept[k].header->capacity;
      if (capacity >= bytes && capacity <= bytes + bytes / 4 + kHugePage &&
          (best == kept.size() || capacity <= kept[best].header->capacity))
        best = k;
    }
    if (best < kept.size()) {
      found = kept[best].header;
      kept_bytes -= found->capacity;
      kept.erase(kept.begin() + best);
    }
    while (!kept.empty() && kept.front().given + kPatience < takes) free_kept(0);
  } else {
    bytes = rounded(bytes, kHeader);
  }
  if (found == nullptr) found = allocate(bytes);
  return reinterpret_cast<char*>(found) + kHeader;
}

void give_memory(void* memory) {
  if (memory == nullptr) return;
  Header* header = reinterpret_cast<Header*>(static_cast<char*>(memory) - kHeader);
  if (header->capacity < kLarge || header->capacity > kMostKept) {
    std::free(header);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back({header, takes});
  kept_bytes += header->capacity;
  while (kept_bytes > kMostKept) free_kept(0);
}

}  // namespace comera
