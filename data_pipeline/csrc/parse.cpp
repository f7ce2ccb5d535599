// Parsing of text into columns: the fast form of `data_pipeline/reference.py`, which defines well-formed lines.
//
// A text is whole lines, each ending with \n or \r\n. A few lines at a time are split into cells, which are then read column by
// column, so that no cell waits for the end of the previous one. Texts are untrusted: a cell's end is known before it is read;
// eight bytes are loaded at once, but never past the end of the text, and those after the cell are masked.

#include <algorithm>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "texts.h"

namespace data_pipeline {
namespace {

enum Kind : Byte { kIgnore, kLabel, kInteger, kHex, kCategory, kList };  // in the order of `schema.KINDS`

// separators: of list elements, by column; ignored for other columns.
struct Schema {
  Array<const Byte> kinds;
  Array<const Byte> separators;
  int64_t separator;

  int64_t count(Kind kind) const { return std::count(kinds.data, kinds.data + kinds.size, kind); }
};

// `parse.Parsed` with room for R rows, the size of `starts`: arrays are [R] or [columns of the kind, R].
template <class Key>
struct Columns {
  Array<int8_t> labels;
  Array<int32_t> integers;
  Array<bool> integer_missing;
  Array<Key> keys;
  Array<bool> key_missing;
  Array<uint64_t> list_keys;  // of one list column after the other, each from list_begins[column] to the next one's
  Array<int64_t> list_begins;  // [list columns + 1]
  Array<int64_t> list_ends;
  Array<int64_t> starts;
  Array<int64_t> bad_lines;  // numbers of the first malformed lines, then where they begin and end
  Array<int64_t> bad_starts;
  Array<int64_t> bad_ends;
};

const Byte* find_newline(const Byte* begin, const Byte* end) {
  return static_cast<const Byte*>(std::memchr(begin, '\n', end - begin));
}

bool ends_with_newline(Array<const Byte> text) { return text.size == 0 || text[text.size - 1] == '\n'; }

constexpr int64_t kTogether = 32;  // lines at a time; the positions of their cells fit the L1 cache

struct Line {
  int64_t number;
  const Byte* begin;
  const Byte* newline;

  const Byte* end() const { return newline - (newline != begin && newline[-1] == '\r'); }
};

// Returns a mask: bit i is set if byte i of 64 equals `byte`.
uint64_t find_in_64(const Byte* bytes, Byte byte) {
  uint64_t matches = 0;
#ifdef __SSE2__
  for (int i = 0; i < 64; i += 16) {
    const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i));
    matches |= uint64_t(_mm_movemask_epi8(_mm_cmpeq_epi8(sixteen, _mm_set1_epi8(byte)))) << i;
  }
#else
  for (int i = 0; i < 64; ++i) matches |= uint64_t{bytes[i] == byte} << i;
#endif
  return matches;
}

// Writes lines as rows of `columns`.
template <class Key>
class Parser {
 public:
  Parser(Array<const Byte> text, const Schema& schema, const Columns<Key>& columns)
      : schema_(schema),
        columns_(columns),
        rows_(columns.starts.size),
        lists_(schema.count(kList)),
        width_(schema.kinds.size + 1),
        text_(text.data),
        text_end_(text.data + text.size),
        begins_(kTogether * width_) {}

  bool fits() const {
    const int64_t integers = schema_.count(kInteger), singles = schema_.count(kHex) + schema_.count(kCategory);
    return schema_.separators.size == schema_.kinds.size && columns_.labels.size == schema_.count(kLabel) * rows_ &&
           columns_.integers.size == integers * rows_ && columns_.integer_missing.size == integers * rows_ &&
           columns_.keys.size == singles * rows_ && columns_.key_missing.size == singles * rows_ &&
           columns_.list_ends.size == lists_ * rows_ && columns_.list_begins.size == lists_ + 1 && columns_.list_begins[0] == 0 &&
           std::is_sorted(columns_.list_begins.data, columns_.list_begins.data + lists_ + 1) &&
           columns_.list_begins[lists_] == columns_.list_keys.size &&
           columns_.bad_starts.size == columns_.bad_lines.size && columns_.bad_ends.size == columns_.bad_lines.size;
  }

  // Adds up to `kTogether` lines: well-formed ones as rows, the others as malformed lines.
  void parse_lines(const Line* lines, int64_t count) {
    bool is_bad[kTogether] = {};
    for (bool again = true; again;) {  // repeat without lines that have bad cells, so that others take their rows
      bool has_bad_cell[kTogether] = {};
      int64_t line_of_row[kTogether], rows = 0;
      for (int64_t i = 0; i < count; ++i) {
        is_bad[i] = is_bad[i] || !split(lines[i], &begins_[rows * width_]);
        if (!is_bad[i]) line_of_row[rows++] = i;
      }
      read_columns(rows, has_bad_cell);
      again = false;
      for (int64_t row = 0; row < rows; ++row) again |= is_bad[line_of_row[row]] = has_bad_cell[row];
    }
    for (int64_t i = 0; i < count; ++i) {
      if (is_bad[i]) {
        reject(lines[i]);
      } else {
        columns_.starts[row_++] = lines[i].begin - text_;
      }
    }
  }

  int64_t rows() const { return row_; }
  int64_t lists() const { return lists_; }

  // Adds the number of elements that a line has in each list column.
  void count_elements(const Line& line, Array<int64_t> counts) {
    if (!split(line, begins_.data())) return;
    for (int64_t column = 0, list = 0; column < schema_.kinds.size; ++column) {
      if (schema_.kinds[column] != kList) continue;
      const Byte* const begin = begins_[column];
      const Byte* const end = begins_[column + 1] - 1;
      counts[list++] += begin == end ? 0 : 1 + std::count(begin, end, schema_.separators[column]);
    }
  }

 private:
  // Finds where each cell begins, then one past the last cell's end; false if the line is empty or has not one cell per column.
  bool split(const Line& line, const Byte** begins) const {
    const Byte** const last = begins + schema_.kinds.size;
    const Byte* const end = line.end();
    *begins++ = line.begin;
    for (const Byte* cursor = line.begin; cursor < end; cursor += 64) {
      Byte copy[64];
      const bool is_near_end = text_end_ - cursor < 64;
      if (is_near_end) std::memcpy(copy, cursor, text_end_ - cursor);
      uint64_t matches = find_in_64(is_near_end ? copy : cursor, static_cast<Byte>(schema_.separator));
      if (end - cursor < 64) matches &= (uint64_t{1} << (end - cursor)) - 1;
      for (; matches; matches &= matches - 1) {
        if (begins == last) return false;
        *begins++ = cursor + __builtin_ctzll(matches) + 1;
      }
    }
    *begins = end + 1;
    return begins == last && line.begin != end;
  }

  void reject(const Line& line) {
    const int64_t bad = bad_++;
    if (bad >= columns_.bad_lines.size) return;
    columns_.bad_lines[bad] = line.number;
    columns_.bad_starts[bad] = line.begin - text_;
    columns_.bad_ends[bad] = line.newline - text_;
  }

  void read_columns(int64_t count, bool* has_bad_cell) {
    int64_t label = 0, integer = 0, single = 0, list = 0;
    for (int64_t column = 0; column < schema_.kinds.size; ++column) {
      const auto each_cell = [&](const auto& read) {
        const Byte* const* begins = &begins_[column];
        for (int64_t i = 0; i < count; ++i, begins += width_) has_bad_cell[i] |= !read(begins[0], begins[1] - 1, row_ + i);
      };
      switch (schema_.kinds[column]) {
        case kLabel: {
          int8_t* const labels = columns_.labels.data + label++ * rows_;
          each_cell([=](const Byte* begin, const Byte* end, int64_t row) {
            uint64_t number = 0;
            const bool is_good = read_label(begin, end, text_end_, number) && number <= 1;
            labels[row] = static_cast<int8_t>(number);
            return is_good;
          });
          break;
        }
        case kInteger: {
          int32_t* const integers = columns_.integers.data + integer * rows_;
          bool* const missing = columns_.integer_missing.data + integer++ * rows_;
          each_cell([=](const Byte* begin, const Byte* end, int64_t row) {
            uint64_t number = 0;
            const bool is_good = read_integer(begin, end, text_end_, number);
            integers[row] = static_cast<int32_t>(number);
            missing[row] = begin == end;
            return is_good && integers[row] == static_cast<int64_t>(number);
          });
          break;
        }
        case kHex:
        case kCategory: {
          Key* const keys = columns_.keys.data + single * rows_;
          bool* const missing = columns_.key_missing.data + single++ * rows_;
          if (schema_.kinds[column] == kHex) {
            each_cell([=](const Byte* begin, const Byte* end, int64_t row) {
              uint64_t number = 0;
              const bool is_good = read_hex(begin, end, text_end_, number);
              keys[row] = static_cast<Key>(number);
              missing[row] = begin == end;
              return is_good;
            });
          } else {
            each_cell([=](const Byte* begin, const Byte* end, int64_t row) {
              keys[row] = begin == end ? 0 : static_cast<Key>(hash_text(begin, end));
              missing[row] = begin == end;
              return true;
            });
          }
          break;
        }
        case kList: {
          const Byte separator = schema_.separators[column];
          each_cell([=, this](const Byte* begin, const Byte* end, int64_t row) {
            return read_list(begin, end, separator, list, row);
          });
          ++list;
          break;
        }
      }
    }
  }

  // Appends a list's elements to those of earlier rows; false if an element is empty or there is no room.
  bool read_list(const Byte* cursor, const Byte* end, Byte separator, int64_t list, int64_t row) {
    int64_t* const ends = columns_.list_ends.data + list * rows_;
    const int64_t begins = columns_.list_begins[list], room = columns_.list_begins[list + 1] - begins;
    int64_t element = row ? ends[row - 1] : 0;
    bool is_good = true;
    for (const Byte* begin = cursor; cursor != end && is_good; begin = cursor + 1) {
      cursor = std::find(begin, end, separator);
      is_good = cursor != begin && element != room;
      if (is_good) columns_.list_keys[begins + element++] = hash_text(begin, cursor);
    }
    ends[row] = element;
    return is_good;
  }

  const Schema schema_;
  const Columns<Key> columns_;
  const int64_t rows_, lists_, width_;
  const Byte* const text_;
  const Byte* const text_end_;
  std::vector<const Byte*> begins_;  // [lines, columns + 1]
  int64_t row_ = 0, bad_ = 0;
};

template <class Key>
int64_t parse(Array<const Byte> text, const Schema& schema, const Columns<Key>& columns) {
  Parser<Key> parser(text, schema, columns);
  const Byte* const end = text.data + text.size;
  if (!ends_with_newline(text) || !parser.fits()) return kWrongSizes;
  Line lines[kTogether];
  int64_t number = 0;
  for (const Byte* cursor = text.data; cursor != end;) {
    int64_t count = 0;
    for (; cursor != end && count != kTogether; ++count) {
      if (number == columns.starts.size) return kWrongSizes;
      const Byte* newline = find_newline(cursor, end);
      lines[count] = {number++, cursor, newline};
      cursor = newline + 1;
    }
    parser.parse_lines(lines, count);
  }
  return parser.rows();
}

}  // namespace

// Returns the number of lines of a text, and adds those of elements in each list column to `counts`.
EXPORTED int64_t count_cells(Array<const Byte> text, const Schema* schema, Array<int64_t> counts) {
  Parser<uint32_t> parser(text, *schema, {});
  const bool fits = counts.size == parser.lists() && schema->separators.size == schema->kinds.size;
  if (!ends_with_newline(text) || !fits) return kWrongSizes;
  int64_t number = 0;
  for (const Byte* cursor = text.data; cursor != text.data + text.size; ++number) {
    const Line line = {number, cursor, find_newline(cursor, text.data + text.size)};
    if (counts.size) parser.count_elements(line, counts);
    cursor = line.newline + 1;
  }
  return number;
}

// Parses a text of at most as many lines as `columns` has room for, into its first rows, and returns how many these are.
EXPORTED int64_t parse_u32(Array<const Byte> text, const Schema* schema, const Columns<uint32_t>* columns) {
  return parse(text, *schema, *columns);
}
EXPORTED int64_t parse_u64(Array<const Byte> text, const Schema* schema, const Columns<uint64_t>* columns) {
  return parse(text, *schema, *columns);
}

}  // namespace data_pipeline
