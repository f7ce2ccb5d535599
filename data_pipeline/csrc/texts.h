// What a cell's bytes are as a value, wherever a cell ends.
#pragma once

#include <array>

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

// FNV-1a of 64 bits (Fowler, Noll, Vo), finalized; `reference.hash_text`.
struct TextHash {
  uint64_t state = 0xCBF29CE484222325;

  void add(Byte byte) { state = (state ^ byte) * 0x100000001B3; }
  uint64_t value() const { return mix(state); }
};

}  // namespace data_pipeline
