// Text to columns: the fast form of `data_pipeline/reference.py`, which says what a well-formed line is.
//
// A text is whole lines, each ended by \n or \r\n. Bytes are foreign: a line is looked for its end first, and every loop over its
// bytes stops there. Digits need no bound of their own, because what stands at a line's end is no digit.

#include <algorithm>
#include <cstring>

#include "texts.h"

namespace data_pipeline {
namespace {

enum Kind : Byte { kIgnore, kLabel, kInteger, kHex, kCategory, kList };  // as `schema.KINDS` orders them

// separators: of each column's list elements, whatever it is for other columns.
struct Schema {
  Array<const Byte> kinds;
  Array<const Byte> separators;
  int64_t separator;

  int64_t count(Kind kind) const { return std::count(kinds.data, kinds.data + kinds.size, kind); }
};

// `parse.Parsed` with room for R rows, as many as `starts` holds: [R], or [columns of the kind, R].
template <class Key>
struct Columns {
  Array<int8_t> labels;
  Array<int32_t> integers;
  Array<bool> integer_missing;
  Array<Key> keys;
  Array<bool> key_missing;
  Array<uint64_t> list_keys;  // [list columns, elements]
  Array<int64_t> list_ends;
  Array<int64_t> starts;
  Array<int64_t> bad_lines;  // the first malformed lines, by number, and where they begin and end
  Array<int64_t> bad_starts;
  Array<int64_t> bad_ends;
};

const Byte* find_newline(const Byte* at, const Byte* end) {
  return static_cast<const Byte*>(std::memchr(at, '\n', end - at));
}

bool ends_with_newline(Array<const Byte> text) { return text.size == 0 || text[text.size - 1] == '\n'; }

// Writes lines as rows of `columns`; a malformed line's row is left to the next line.
template <class Key>
class Parser {
 public:
  Parser(const Schema& schema, const Columns<Key>& columns)
      : schema_(schema),
        columns_(columns),
        rows_(columns.starts.size),
        lists_(schema.count(kList)),
        elements_(lists_ ? columns.list_keys.size / lists_ : 0) {}

  bool fits() const {
    const int64_t integers = schema_.count(kInteger), singles = schema_.count(kHex) + schema_.count(kCategory);
    return schema_.separators.size == schema_.kinds.size && columns_.labels.size == schema_.count(kLabel) * rows_ &&
           columns_.integers.size == integers * rows_ && columns_.integer_missing.size == integers * rows_ &&
           columns_.keys.size == singles * rows_ && columns_.key_missing.size == singles * rows_ &&
           columns_.list_ends.size == lists_ * rows_ && columns_.list_keys.size == elements_ * lists_ &&
           columns_.bad_starts.size == columns_.bad_lines.size && columns_.bad_ends.size == columns_.bad_lines.size;
  }

  // Parses the line [at, end), whose end holds \n or \r; false if it is malformed.
  bool parse_line(const Byte* at, const Byte* end, int64_t row) {
    if (at == end) return false;  // whatever a single column would take
    int64_t label = 0, integer = 0, single = 0, list = 0;
    const int64_t last = schema_.kinds.size - 1;
    for (int64_t column = 0; column <= last; ++column) {
      const Byte* begin = at;
      bool is_good = true;
      switch (schema_.kinds[column]) {
        case kLabel: {
          int64_t number = parse_number(at);
          if (at == begin) {
            number = read_boolean(at, end);
          } else if (at[-1] != '-') {
            at = skip_zero_fraction(at, end);
          }
          is_good = at != begin && at[-1] != '-' && (number == 0 || number == 1);
          columns_.labels[label++ * rows_ + row] = static_cast<int8_t>(number);
          break;
        }
        case kInteger: {
          const int64_t number = parse_number(at), cell = integer++ * rows_ + row;
          is_good = INT32_MIN <= number && number <= INT32_MAX && (at == begin || at[-1] != '-');
          columns_.integers[cell] = static_cast<int32_t>(number);
          columns_.integer_missing[cell] = at == begin;
          if (*at == '.' && at != begin) at = skip_zero_fraction(at, end);
          break;
        }
        case kHex: {
          uint64_t key = 0;
          for (Byte digit; (digit = kHexDigits[*at]) != kNoDigit; ++at) key = key << 4 | digit;
          is_good = at - begin <= 8;
          put_key(single++, row, key, at == begin);
          break;
        }
        case kCategory: {
          TextHash hash;
          for (; at != end && *at != schema_.separator; ++at) hash.add(*at);
          put_key(single++, row, at == begin ? 0 : hash.value(), at == begin);
          break;
        }
        case kList:
          is_good = parse_list(at, end, schema_.separators[column], list++, row);
          break;
        default:
          while (at != end && *at != schema_.separator) ++at;
      }
      if (!is_good) return false;
      if (column == last) return at == end;
      if (at == end || *at != schema_.separator) return false;
      ++at;
    }
    return false;
  }

 private:
  // A number with or without a minus, and `at` behind it; 0 if there are no digits, beyond 2^32 if it is larger.
  static int64_t parse_number(const Byte*& at) {
    const bool is_negative = *at == '-';
    int64_t number = 0;
    for (at += is_negative; '0' <= *at && *at <= '9'; ++at) {
      if (number <= int64_t{1} << 32) number = number * 10 + (*at - '0');
    }
    return is_negative ? -number : number;
  }

  void put_key(int64_t column, int64_t row, uint64_t key, bool is_missing) {
    columns_.keys[column * rows_ + row] = static_cast<Key>(key);
    columns_.key_missing[column * rows_ + row] = is_missing;
  }

  // Elements behind those of the rows before; false if one is empty, where there are others, or if there is no room.
  bool parse_list(const Byte*& at, const Byte* end, Byte separator, int64_t list, int64_t row) {
    int64_t* ends = columns_.list_ends.data + list * rows_;
    int64_t element = row ? ends[row - 1] : 0;
    const bool is_empty = at == end || *at == schema_.separator;
    while (!is_empty) {
      TextHash hash;
      const Byte* begin = at;
      for (; at != end && *at != schema_.separator && *at != separator; ++at) hash.add(*at);
      if (at == begin || element == elements_) return false;
      columns_.list_keys[list * elements_ + element++] = hash.value();
      if (at == end || *at == schema_.separator) break;
      ++at;
    }
    ends[row] = element;
    return true;
  }

  const Schema schema_;
  const Columns<Key> columns_;
  const int64_t rows_, lists_, elements_;
};

template <class Key>
int64_t parse(Array<const Byte> text, const Schema& schema, const Columns<Key>& columns) {
  Parser<Key> parser(schema, columns);
  const Byte* const end = text.data + text.size;
  if (!ends_with_newline(text) || std::count(text.data, end, '\n') != columns.starts.size || !parser.fits()) return kWrongSizes;
  int64_t row = 0, line = 0;
  for (const Byte* at = text.data; at != end; ++line) {
    const Byte* newline = find_newline(at, end);
    const Byte* line_end = newline - (newline != at && newline[-1] == '\r');
    if (parser.parse_line(at, line_end, row)) {
      columns.starts[row++] = at - text.data;
    } else if (line - row < columns.bad_lines.size) {
      columns.bad_lines[line - row] = line;
      columns.bad_starts[line - row] = at - text.data;
      columns.bad_ends[line - row] = newline - text.data;
    }
    at = newline + 1;
  }
  return row;
}

}  // namespace

// The rows of a text of as many lines as `columns` has room for, in its first rows.
EXPORTED int64_t parse_u32(Array<const Byte> text, const Schema* schema, const Columns<uint32_t>* columns) {
  return parse(text, *schema, *columns);
}
EXPORTED int64_t parse_u64(Array<const Byte> text, const Schema* schema, const Columns<uint64_t>* columns) {
  return parse(text, *schema, *columns);
}

// A block of whole lines, and what it takes at most.
struct Block {
  int64_t bytes;
  int64_t lines;
  int64_t elements;  // of any list column
};

// Measures lines from the text's beginning on as long as they take no more than `room` bytes, but at least one.
//
// Args:
//   list_separators: those of all list columns, once each.
//   line_bytes, element_bytes: what the columns take for a line and for a list's element.
EXPORTED int64_t measure_block(
    Array<const Byte> text, Array<const Byte> list_separators, int64_t line_bytes, int64_t element_bytes, int64_t room, Block* block) {
  if (!ends_with_newline(text)) return kWrongSizes;
  *block = {0, 0, 0};
  int64_t taken = 0;
  while (block->bytes != text.size) {
    const Byte* line = text.data + block->bytes;
    const Byte* newline = find_newline(line, text.data + text.size);
    int64_t elements = list_separators.size ? 1 : 0;
    for (int64_t i = 0; i < list_separators.size; ++i) elements += std::count(line, newline, list_separators[i]);
    taken += line_bytes + elements * element_bytes;
    if (block->lines && taken > room) break;
    block->bytes = newline + 1 - text.data;
    block->lines += 1;
    block->elements += elements;
  }
  return 0;
}

// Bytes of a text's longest line without its \n.
EXPORTED int64_t longest_line(Array<const Byte> text) {
  if (!ends_with_newline(text)) return kWrongSizes;
  int64_t longest = 0;
  const Byte* const end = text.data + text.size;
  for (const Byte* at = text.data; at != end;) {
    const Byte* newline = find_newline(at, end);
    longest = std::max<int64_t>(longest, newline - at);
    at = newline + 1;
  }
  return longest;
}

}  // namespace data_pipeline
