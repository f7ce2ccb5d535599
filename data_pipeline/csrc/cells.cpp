// Conversion of texts to values, for columns that Arrow reads; `data_pipeline/reference.py` defines well-formed texts.

#include "texts.h"

namespace data_pipeline {
namespace {

// Reads the value of each text, and whether it is malformed. Text i is bytes [offsets[i], offsets[i + 1]).
template <class Read>
int64_t read_texts(
    Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad, const Read& read) {
  if (offsets.size != values.size + 1 || is_bad.size != values.size || offsets[0] < 0) return kWrongSizes;
  for (int64_t i = 0; i < values.size; ++i) {
    if (offsets[i] > offsets[i + 1] || offsets[i + 1] > bytes.size) return kWrongSizes;
    is_bad[i] = !read(bytes.data + offsets[i], bytes.data + offsets[i + 1], bytes.data + bytes.size, values[i]);
  }
  return values.size;
}

bool read_text(const Byte* cursor, const Byte* end, const Byte*, uint64_t& value) {
  value = hash_text(cursor, end);
  return true;
}

}  // namespace

EXPORTED int64_t read_integers(Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, read_integer);
}
EXPORTED int64_t read_labels(Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, read_label);
}
EXPORTED int64_t read_hex_digits(
    Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, read_hex);
}
EXPORTED int64_t hash_texts(Array<const Byte> bytes, Array<const int64_t> offsets, Array<uint64_t> values, Array<bool> is_bad) {
  return read_texts(bytes, offsets, values, is_bad, read_text);
}

}  // namespace data_pipeline
