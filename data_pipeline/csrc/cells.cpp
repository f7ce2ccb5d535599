// Texts to values, for columns that Arrow or json.cpp read; `data_pipeline/reference.py` says what a well-formed text is.

#include "texts.h"

namespace data_pipeline {
namespace {

// The value of each text, and whether it is malformed. Text i is bytes[offsets[i]] to bytes[offsets[i + 1]].
template <class Read>
int64_t read_texts(
    Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad, const Read& read) {
  if (offsets.size != values.size + 1 || is_bad.size != values.size || offsets[0] < 0 || offsets[values.size] > bytes.size) {
    return kWrongSizes;
  }
  for (int64_t i = 0; i < values.size; ++i) {
    if (offsets[i] > offsets[i + 1]) return kWrongSizes;
    values[i] = 0;
    is_bad[i] = !read(bytes.data + offsets[i], bytes.data + offsets[i + 1], values[i]);
  }
  return values.size;
}

// A number with or without a minus; beyond 2^32 if it is larger, which no caller takes.
bool read_integer(const Byte* at, const Byte* end, uint64_t& value) {
  const bool is_negative = at != end && *at == '-';
  at += is_negative;
  if (at == end || *at == '.') return false;
  for (; at != end && '0' <= *at && *at <= '9'; ++at) {
    if (value <= uint64_t{1} << 32) value = value * 10 + (*at - '0');
  }
  if (is_negative) value = -value;
  return skip_zero_fraction(at, end) == end;
}

bool read_label(const Byte* at, const Byte* end, uint64_t& value) {
  const Byte* word_end = at;
  const int word = read_boolean(word_end, end);
  if (word < 0) return read_integer(at, end, value);
  value = word;
  return word_end == end;
}

bool read_hex(const Byte* at, const Byte* end, uint64_t& value) {
  if (at == end || end - at > 8) return false;
  for (; at != end && kHexDigits[*at] != kNoDigit; ++at) value = value << 4 | kHexDigits[*at];
  return at == end;
}

bool hash(const Byte* at, const Byte* end, uint64_t& value) {
  TextHash hash;
  for (; at != end; ++at) hash.add(*at);
  value = hash.value();
  return true;
}

}  // namespace

EXPORTED int64_t read_integers(Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, read_integer);
}
EXPORTED int64_t read_labels(Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, read_label);
}
EXPORTED int64_t read_hex_digits(Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, read_hex);
}
EXPORTED int64_t hash_texts(Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, hash);
}

}  // namespace data_pipeline
