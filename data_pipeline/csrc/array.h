// An array passed from Python: a pointer to its first element and its size (`data_pipeline/native.py` declares the same).
#pragma once

#include <cstdint>

namespace data_pipeline {

template <class T>
struct Array {
  T* data;
  int64_t size;

  T& operator[](int64_t i) const { return data[i]; }
};

// Columns of `rows` elements each: element i of column c is at c * stride + i.
template <class T>
struct Matrix {
  T* data;
  int64_t columns;
  int64_t rows;
  int64_t stride;

  Array<T> operator[](int64_t column) const { return {data + column * stride, rows}; }

  template <class U>
  bool is_like(Matrix<U> other) const {
    return columns == other.columns && rows == other.rows;
  }
};

// Returned by every function whose arrays have inconsistent sizes. It has then accessed nothing outside of the arrays, but it may have
// written to them before it noticed: callers raise an error and drop them.
constexpr int64_t kWrongSizes = -1;

// splitmix64's finalizer (Steele, Lea, Flood, OOPSLA 2014).
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace data_pipeline

#define EXPORTED extern "C" __attribute__((visibility("default")))
