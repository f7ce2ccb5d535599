// Conversion of a cell's bytes to a value.
#pragma once

#include <algorithm>
#include <cstring>
#include <string_view>

#include "array.h"

namespace data_pipeline {

using Byte = uint8_t;

constexpr uint64_t kEach = 0x0101010101010101;  // multiplied by a byte, repeats it eight times

// Loads eight bytes of a text, the first one lowest; zeros after the text's end.
inline uint64_t load(const Byte* cursor, const Byte* text_end) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  uint64_t bytes = 0;
  if (text_end - cursor >= 8) {
    std::memcpy(&bytes, cursor, 8);
    return bytes;
  }
  for (int i = 0; cursor + i != text_end; ++i) bytes |= uint64_t{cursor[i]} << 8 * i;
  return bytes;
}

// Moves the first `length` of eight bytes to the top, with zeros below. Two shifts, because one by 64 is undefined.
inline uint64_t align(uint64_t bytes, int64_t length) { return bytes << (32 - 4 * length) << (32 - 4 * length); }

// Reads a number of up to 8 hex digits, 0 for an empty cell; false if there are more digits, or other bytes.
//
// The eight bytes are processed as one word, without branches (broadword computing: Knuth, TAOCP 4A, section 7.1.3).
inline bool read_hex(const Byte* cursor, const Byte* end, const Byte* text_end, uint64_t& number) {
  const int64_t length = std::min<int64_t>(end - cursor, 8);
  const uint64_t bytes = align(load(cursor, text_end) ^ kEach * '0', length) ^ kEach * '0';
  const uint64_t letters = bytes >> 6 & kEach;
  const uint64_t digits = (bytes & kEach * 0x0F) + letters * 9;
  const uint64_t wrong = ((bytes & ~(letters << 5) & kEach * 0xF0) ^ (kEach * 0x30 + (letters << 4))) |  // not 0x3_, 0x4_ or 0x6_
                         (((digits + kEach * 6) & kEach * 0x10) ^ letters << 4) |                        // a letter is 10 or more
                         (digits & kEach * 0xF0);
  uint64_t halves = __builtin_bswap64(digits);
  halves = (halves | halves >> 4) & 0x00FF00FF00FF00FF;
  halves = (halves | halves >> 8) & 0x0000FFFF0000FFFF;
  number = (halves | halves >> 16) & 0xFFFFFFFF;
  return !wrong && end - cursor <= 8;
}

// Reads an integer with optional minus sign and fraction of zeros: pandas writes 64 as 64.0 in columns with missing cells. 0 for an
// empty cell; larger numbers become some number above 2^32, which no caller accepts; false for other text.
inline bool read_integer(const Byte* cursor, const Byte* end, const Byte* text_end, uint64_t& number) {
  const bool is_negative = cursor != end && *cursor == '-';
  cursor += is_negative;
  const int64_t length = end - cursor;
  uint64_t digits = length <= 8 ? align(load(cursor, text_end) ^ kEach * '0', length) : ~uint64_t{0};
  if (!(((digits + kEach * 0x76) | digits) & kEach * 0x80) && is_negative <= length) {
    digits = (digits * 10 + (digits >> 8)) & 0x00FF00FF00FF00FF;
    digits = (digits * 100 + (digits >> 16)) & 0x0000FFFF0000FFFF;
    digits = (digits * 10000 + (digits >> 32)) & 0xFFFFFFFF;
    number = is_negative ? -digits : digits;
    return true;
  }
  const Byte* const begin = cursor;
  for (number = 0; cursor != end && '0' <= *cursor && *cursor <= '9'; ++cursor) {
    if (number <= uint64_t{1} << 32) number = number * 10 + (*cursor - '0');
  }
  if (is_negative) number = -number;
  if (cursor == begin || cursor == end) return cursor != begin;
  return *cursor == '.' && cursor + 1 != end && std::all_of(cursor + 1, end, [](Byte byte) { return byte == '0'; });
}

// Reads a label: false or true in lower or upper case or capitalized, or an integer as `read_integer` does.
inline bool read_label(const Byte* cursor, const Byte* end, const Byte* text_end, uint64_t& label) {
  static constexpr std::string_view words[] = {"false", "False", "FALSE", "true", "True", "TRUE"};
  const std::string_view text(reinterpret_cast<const char*>(cursor), end - cursor);
  for (int word = 0; text.size() >= 4 && word < 6; ++word) {
    if (text == words[word]) {
      label = word / 3;
      return true;
    }
  }
  return cursor != end && read_integer(cursor, end, text_end, label);
}

// FNV-1a of 64 bits (Fowler, Noll, Vo), finalized; `reference.hash_text`.
inline uint64_t hash_text(const Byte* cursor, const Byte* end) {
  uint64_t state = 0xCBF29CE484222325;
  for (; cursor != end; ++cursor) state = (state ^ *cursor) * 0x100000001B3;
  return mix(state);
}

}  // namespace data_pipeline
