// What a cell's bytes are as a value, wherever a cell ends.
#pragma once

#include <array>
#include <cstring>
#include <string_view>

#include "array.h"

namespace data_pipeline {

using Byte = uint8_t;

constexpr Byte kNoDigit = 255;
constexpr auto kHexDigits = [] {
  std::array<Byte, 256> digits{};
  digits.fill(kNoDigit);
  for (Byte digit = 0; digit < 16; ++digit) {
    digits["0123456789abcdef"[digit]] = digits["0123456789ABCDEF"[digit]] = digit;
  }
  return digits;
}();

// Behind the zeros after an integer's point: pandas writes 64 as 64.0 where a column has missing cells.
inline const Byte* skip_zero_fraction(const Byte* at, const Byte* end) {
  if (at == end || *at != '.') return at;
  const Byte* zeros = at + 1;
  while (zeros != end && *zeros == '0') ++zeros;
  return zeros == at + 1 ? at : zeros;
}

// 1 for true, 0 for false, in lower or upper case or capitalized, and `at` behind the word; -1 for other text.
inline int read_boolean(const Byte*& at, const Byte* end) {
  static constexpr std::string_view words[] = {"false", "False", "FALSE", "true", "True", "TRUE"};
  for (int word = 0; word < 6; ++word) {
    const std::string_view letters = words[word];
    if (static_cast<size_t>(end - at) >= letters.size() && std::memcmp(at, letters.data(), letters.size()) == 0) {
      at += letters.size();
      return word / 3;
    }
  }
  return -1;
}

// FNV-1a of 64 bits (Fowler, Noll, Vo), finalized; `reference.hash_text`.
struct TextHash {
  uint64_t state = 0xCBF29CE484222325;

  void add(Byte byte) { state = (state ^ byte) * 0x100000001B3; }
  uint64_t value() const { return mix(state); }
};

}  // namespace data_pipeline
