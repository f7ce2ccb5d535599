// Slices of cores as floats, and scratch memory. Included by kernels.cpp: compiled once for each instruction set.
#pragma once

#include "kernels.h"
#include "products.h"

namespace comera {
namespace {

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);                   // to the nearest, ties to even
}

float from_float16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return float(half);
}

uint16_t to_float16(float value) {
  const _Float16 half = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

COMERA_INLINE int64_t bytes_of(Number number) { return number == Number::float32 ? 4 : 2; }

COMERA_INLINE void* offset(void* data, Number number, int64_t count) {
  return static_cast<char*>(data) + bytes_of(number) * count;
}

void widen(const void* from, Number number, int64_t count, float* to) {
  const uint16_t* bits = static_cast<const uint16_t*>(from);
  if (number == Number::float32) {
    std::memcpy(to, from, 4 * count);
  } else if (number == Number::bfloat16) {
    for (int64_t n = 0; n < count; ++n) to[n] = from_bfloat16(bits[n]);
  } else {
    for (int64_t n = 0; n < count; ++n) to[n] = from_float16(bits[n]);
  }
}

void narrow(const float* from, Number number, int64_t count, void* to) {
  uint16_t* bits = static_cast<uint16_t*>(to);
  if (number == Number::float32) {
    std::memcpy(to, from, 4 * count);
  } else if (number == Number::bfloat16) {
    for (int64_t n = 0; n < count; ++n) bits[n] = to_bfloat16(from[n]);
  } else {
    for (int64_t n = 0; n < count; ++n) bits[n] = to_float16(from[n]);
  }
}

// Streams of random bits, one for each of a parameter's tensors: the start of one doesn't tell that of others (SplitMix64's finalizer;
// Steele et al., OOPSLA 2014).
inline uint64_t stream_of(uint64_t seed, uint64_t number) {
  uint64_t bits = (3 * seed + number) * 0x9E3779B97F4A7C15;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
  return bits ^ bits >> 31;
}

// Bits that look random, different for every index of a stream.
COMERA_INLINE uint32_t random_bits(uint64_t stream, uint64_t index) {
  uint32_t bits = uint32_t((stream + index) * 0x9E3779B97F4A7C15 >> 32);
  bits = (bits ^ bits >> 16) * 0x85EBCA6B;  // a step of MurmurHash3's finalizer
  return bits ^ bits >> 13;
}

// Rounds a float to one of the two nearest 16-bit numbers, at random such that the mean is the float itself (stochastic rounding,
// Gupta et al., ICML 2015): rounding to the nearest would always lose changes of less than half a step.
COMERA_INLINE uint16_t round_at_random(float value, Number number, uint32_t random) {
  constexpr uint32_t kInfinite = 0x7f800000, kLeastNormalHalf = 113u << 23;  // 2^-14
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t size = bits & 0x7fffffff;
  if (number == Number::bfloat16) return size >= kInfinite ? to_bfloat16(value) : uint16_t((bits + (random & 0xffff)) >> 16);
  if (size < kLeastNormalHalf) return to_float16(value + (float(random & 0xffff) - 32767.5f) * 0x1p-40f);  // steps of 2^-24
  if (size < kInfinite) bits = (bits + (random & 0x1fff)) & ~0x1fffu;
  std::memcpy(&value, &bits, 4);
  return to_float16(value);
}

void narrow_at_random(const float* from, Number number, int64_t count, void* to, uint64_t stream, uint64_t index) {
  uint16_t* bits = static_cast<uint16_t*>(to);
  for (int64_t n = 0; n < count; ++n) bits[n] = round_at_random(from[n], number, random_bits(stream, index + n));
}

// A slice by its number, as floats: in place, or converted in scratch.
COMERA_INLINE const float* slice_of(const Core& core, int64_t number, float* scratch) {
  const void* data = offset(core.data, core.number, (number - core.first) * core.size);
  if (core.number == Number::float32) return static_cast<const float*>(data);
  widen(data, core.number, core.size, scratch);
  return scratch;
}

COMERA_INLINE void prefetch_slice(const Core& core, int64_t number) {
  prefetch(offset(core.data, core.number, (number - core.first) * core.size), core.size * bytes_of(core.number));
}

class Scratch {
 public:
  explicit Scratch(float* memory) : memory_(memory) {}
  float* take(int64_t floats) {
    float* taken = memory_;
    memory_ += rounded(floats);
    return taken;
  }

 private:
  float* memory_;
};

void scale_rows(float* values, const float* diagonal, int64_t rows, int64_t size) {
  const int64_t columns = rows > 0 ? size / rows : 0;
  int64_t k = 0;
  if (2 * columns == kWidth) {  // two rows a store, because whole vectors are loaded next, which would wait for two stores
    const auto both = [&]<int... N>(Vector<kWidth / 2> low, Vector<kWidth / 2> high, std::integer_sequence<int, N...>) {
      return __builtin_shufflevector(low, high, N...);
    };
    for (; k + 2 <= rows; k += 2) {
      const Vector<kWidth> factors =
          both(Vector<kWidth / 2>{} + diagonal[k], Vector<kWidth / 2>{} + diagonal[k + 1], std::make_integer_sequence<int, kWidth>{});
      store<kWidth>(values + k * columns, load<kWidth>(values + k * columns) * factors);
    }
  }
  for (; k < rows; ++k)
    for (int64_t j = 0; j < columns; ++j) values[k * columns + j] *= diagonal[k];
}

// out[:] += a[:] b[:].
COMERA_INLINE void add_products(const float* __restrict a, const float* __restrict b, int64_t count, float* __restrict out) {
  for (int64_t n = 0; n < count; ++n) out[n] += a[n] * b[n];
}

COMERA_INLINE float* touch(const Sums& sums, int64_t slice) {
  float* values = sums.values + slice * sums.size;
  if (sums.states[slice] == Sums::untouched) {
    sums.states[slice] = Sums::summed;
    std::memset(values, 0, 4 * sums.size);
  }
  return values;
}

}  // namespace
}  // namespace comera
