// Vectors of floats in the vector extension of GCC and Clang, which needs no library.
//
// A translation unit is compiled once for each instruction set, which determines `kWidth` and `kRegisters`.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

#define COMERA_INLINE inline __attribute__((always_inline))

namespace comera {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;      // floats in the widest vector
constexpr int kRegisters = 32;  // vector registers
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRegisters = 16;
#else
constexpr int kWidth = 4;
constexpr int kRegisters = 16;
#endif

template <int W>
struct VectorOf {
  typedef float type __attribute__((vector_size(4 * W)));
  typedef float unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));
};
template <>
struct VectorOf<1> {
  typedef float type;
  typedef float unaligned;
};
template <int W>
using Vector = typename VectorOf<W>::type;

template <int W>
COMERA_INLINE Vector<W> load(const float* from) {
  return *reinterpret_cast<const typename VectorOf<W>::unaligned*>(from);
}

template <int W>
COMERA_INLINE void store(float* to, Vector<W> value) {
  *reinterpret_cast<typename VectorOf<W>::unaligned*>(to) = value;
}

// The first `count` floats of a vector, fewer than its width; zeros beyond.
COMERA_INLINE Vector<kWidth> load_part(const float* from, int64_t count) {
#if defined(__AVX512F__)
  return (Vector<kWidth>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#else
  Vector<kWidth> value{};
  for (int64_t n = 0; n < count; ++n) value[n] = from[n];
  return value;
#endif
}

COMERA_INLINE void store_part(float* to, Vector<kWidth> value, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)value);
#else
  for (int64_t n = 0; n < count; ++n) to[n] = value[n];
#endif
}

// Vectors of bfloat16 or int8, with as many numbers as the widest vector of floats.
COMERA_INLINE Vector<kWidth> load_bfloat16(const void* from) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  return (Vector<kWidth>)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  return (Vector<kWidth>)_mm256_slli_epi32(wide, 16);
#else
  uint16_t bits[kWidth];
  uint32_t wide[kWidth];
  std::memcpy(bits, from, sizeof bits);
  for (int n = 0; n < kWidth; ++n) wide[n] = uint32_t(bits[n]) << 16;
  Vector<kWidth> value;
  std::memcpy(&value, wide, sizeof value);
  return value;
#endif
}

COMERA_INLINE Vector<kWidth> load_int8(const void* from) {
#if defined(__AVX512F__)
  return (Vector<kWidth>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Vector<kWidth>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#else
  int8_t numbers[kWidth];
  std::memcpy(numbers, from, sizeof numbers);
  Vector<kWidth> value{};
  for (int n = 0; n < kWidth; ++n) value[n] = float(numbers[n]);
  return value;
#endif
}

template <int W>
COMERA_INLINE float sum_of(Vector<W> value) {
  if constexpr (W == 1) {
    return value;
  } else if constexpr (W == 2) {
    return value[0] + value[1];
  } else {
    const auto add_halves = [&]<int... N>(std::integer_sequence<int, N...>) {  // within registers
      return __builtin_shufflevector(value, value, N...) + __builtin_shufflevector(value, value, (W / 2 + N)...);
    };
    return sum_of<W / 2>(add_halves(std::make_integer_sequence<int, W / 2>{}));
  }
}

// The widest vector that `columns` fill, so that no vector needs a mask: 12 columns are a vector of 8 and one of 4.
constexpr int widest(int64_t columns) {
  int width = kWidth;
  while (width > columns) width /= 2;
  return width;
}

COMERA_INLINE void prefetch(const void* address, int64_t bytes) {
  // After a few lines the hardware prefetches by itself.
  for (int64_t line = 0; line < bytes && line < 1024; line += 64) __builtin_prefetch(static_cast<const char*>(address) + line);
}

// Copy past the caches: an ordinary store first reads the line that it is about to overwrite. `to` is aligned to a vector and
// `count` a multiple of 16.
COMERA_INLINE void stream(float* to, const float* from, int64_t count) {
#if defined(__AVX512F__)
  for (int64_t n = 0; n < count; n += 16) _mm512_stream_ps(to + n, _mm512_loadu_ps(from + n));
#elif defined(__AVX__)
  for (int64_t n = 0; n < count; n += 8) _mm256_stream_ps(to + n, _mm256_loadu_ps(from + n));
#else
  std::memcpy(to, from, 4 * count);
#endif
}

// Make streamed stores visible before later stores, as other threads see them.
COMERA_INLINE void finish_streaming() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

COMERA_INLINE void transpose_8x8(const float* from, int64_t from_step, float* to, int64_t to_step) {
  Vector<8> in[8], pairs[8], fours[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) in[i] = load<8>(from + i * from_step);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = __builtin_shufflevector(in[2 * i], in[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[2 * i + 1] = __builtin_shufflevector(in[2 * i], in[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const int i = 4 * half;
    fours[i] = __builtin_shufflevector(pairs[i], pairs[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    fours[i + 1] = __builtin_shufflevector(pairs[i], pairs[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    fours[i + 2] = __builtin_shufflevector(pairs[i + 1], pairs[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    fours[i + 3] = __builtin_shufflevector(pairs[i + 1], pairs[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store<8>(to + i * to_step, __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store<8>(to + (i + 4) * to_step, __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

COMERA_INLINE void transpose_4x4(const float* from, int64_t from_step, float* to, int64_t to_step) {
  const Vector<4> a = load<4>(from), b = load<4>(from + from_step), c = load<4>(from + 2 * from_step),
                  d = load<4>(from + 3 * from_step);
  const Vector<4> ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Vector<4> cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store<4>(to, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
  store<4>(to + to_step, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
  store<4>(to + 2 * to_step, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
  store<4>(to + 3 * to_step, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
}

// [rows, cols] -> [cols, rows], each contiguous.
COMERA_INLINE void transpose(int rows, int cols, const float* from, float* to) {
  if (rows % 8 == 0 && cols % 8 == 0) {
    for (int i = 0; i < rows; i += 8)
      for (int j = 0; j < cols; j += 8) transpose_8x8(from + i * cols + j, cols, to + j * rows + i, rows);
  } else if (rows % 4 == 0 && cols % 4 == 0) {
    for (int i = 0; i < rows; i += 4)
      for (int j = 0; j < cols; j += 4) transpose_4x4(from + i * cols + j, cols, to + j * rows + i, rows);
  } else {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < cols; ++j) to[j * rows + i] = from[i * cols + j];
  }
}

}  // namespace
}  // namespace comera
