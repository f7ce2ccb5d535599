// What a cell's bytes are as a value, wherever a cell ends.
#pragma once

#include <algorithm>
#include <cstring>
#include <string_view>

#include "array.h"

namespace data_pipeline {

using Byte = uint8_t;

constexpr uint64_t kEach = 0x0101010101010101;  // times a byte: that byte eight times

// Eight bytes of a text, the first one lowest; zeros behind the text's end.
inline uint64_t load(const Byte* at, const Byte* text_end) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  uint64_t bytes = 0;
  if (text_end - at >= 8) {
    std::memcpy(&bytes, at, 8);
    return bytes;
  }
  for (int i = 0; at + i != text_end; ++i) bytes |= uint64_t{at[i]} << 8 * i;
  return bytes;
}

// The first `length` of eight bytes, behind zeros. Two shifts, because one by 64 is undefined.
inline uint64_t align(uint64_t bytes, int64_t length) { return bytes << (32 - 4 * length) << (32 - 4 * length); }

// A number of up to 8 hex digits, 0 for an empty cell; false if there are more digits, or other bytes.
//
// The eight bytes are one word, worked on without branches (broadword computing: Knuth, TAOCP 4A, section 7.1.3).
inline bool read_hex(const Byte* at, const Byte* end, const Byte* text_end, uint64_t& number) {
  const int64_t length = std::min<int64_t>(end - at, 8);
  const uint64_t bytes = align(load(at, text_end) ^ kEach * '0', length) ^ kEach * '0';
  const uint64_t letters = bytes >> 6 & kEach;
  const uint64_t digits = (bytes & kEach * 0x0F) + letters * 9;
  const uint64_t wrong = ((bytes & ~(letters << 5) & kEach * 0xF0) ^ (kEach * 0x30 + (letters << 4))) |  // not 0x3_, 0x4_ or 0x6_
                         (((digits + kEach * 6) & kEach * 0x10) ^ letters << 4) |                        // ten and more are letters
                         (digits & kEach * 0xF0);
  uint64_t halves = __builtin_bswap64(digits);
  halves = (halves | halves >> 4) & 0x00FF00FF00FF00FF;
  halves = (halves | halves >> 8) & 0x0000FFFF0000FFFF;
  number = (halves | halves >> 16) & 0xFFFFFFFF;
  return !wrong && end - at <= 8;
}

// An integer, which may have a minus and a fraction of zeros: pandas writes 64 as 64.0 where a column has missing cells. 0 for an empty
// cell; some number beyond 2^32 for a larger one, which no caller accepts; false for other text.
inline bool read_integer(const Byte* at, const Byte* end, const Byte* text_end, uint64_t& number) {
  const bool is_negative = at != end && *at == '-';
  at += is_negative;
  const int64_t length = end - at;
  uint64_t digits = length <= 8 ? align(load(at, text_end) ^ kEach * '0', length) : ~uint64_t{0};
  if (!(((digits + kEach * 0x76) | digits) & kEach * 0x80) && is_negative <= length) {
    digits = (digits * 10 + (digits >> 8)) & 0x00FF00FF00FF00FF;
    digits = (digits * 100 + (digits >> 16)) & 0x0000FFFF0000FFFF;
    digits = (digits * 10000 + (digits >> 32)) & 0xFFFFFFFF;
    number = is_negative ? -digits : digits;
    return true;
  }
  const Byte* const begin = at;
  for (number = 0; at != end && '0' <= *at && *at <= '9'; ++at) {
    if (number <= uint64_t{1} << 32) number = number * 10 + (*at - '0');
  }
  if (is_negative) number = -number;
  if (at == begin || at == end) return at != begin;
  return *at == '.' && at + 1 != end && std::all_of(at + 1, end, [](Byte byte) { return byte == '0'; });
}

// A label: false or true in lower or upper case or capitalized, or as `read_integer`.
inline bool read_label(const Byte* at, const Byte* end, const Byte* text_end, uint64_t& label) {
  static constexpr std::string_view words[] = {"false", "False", "FALSE", "true", "True", "TRUE"};
  const std::string_view text(reinterpret_cast<const char*>(at), end - at);
  for (int word = 0; text.size() >= 4 && word < 6; ++word) {
    if (text == words[word]) {
      label = word / 3;
      return true;
    }
  }
  return at != end && read_integer(at, end, text_end, label);
}

// FNV-1a of 64 bits (Fowler, Noll, Vo), finalized; `reference.hash_text`.
struct TextHash {
  uint64_t state = 0xCBF29CE484222325;

  void add(Byte byte) { state = (state ^ byte) * 0x100000001B3; }
  uint64_t value() const { return mix(state); }
};

inline uint64_t hash_text(const Byte* at, const Byte* end) {
  TextHash hash;
  for (; at != end; ++at) hash.add(*at);
  return hash.value();
}

}  // namespace data_pipeline
