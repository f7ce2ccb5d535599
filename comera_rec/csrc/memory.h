// Memory for outputs and scratch that calls reuse, because touching new pages takes longer than the work on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace comera {

// Take at least `bytes` uninitialized bytes, aligned to cache lines.
void* take_memory(size_t bytes);

// Give back what `take_memory` returned. Large blocks are kept for a while.
void give_memory(void* memory);

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : memory_(static_cast<T*>(take_memory(sizeof(T) * size_t(count > 0 ? count : 1)))) {}
  T* get() const { return memory_.get(); }
  T& operator[](int64_t i) const { return memory_.get()[i]; }

 private:
  struct Give {
    void operator()(T* memory) const { give_memory(memory); }
  };
  std::unique_ptr<T, Give> memory_;
};

}  // namespace comera
