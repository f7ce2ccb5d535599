// Parsing of JSON lines into the cells of chosen columns: the fast form of `json_lines.read_by_definition`, for common lines.
//
// A line is left to Python, which interprets it or explains what is wrong, if it is not JSON or has rare contents: null in a list,
// an object instead of text, NaN, half of a surrogate pair, deep nesting.

#include <cstring>
#include <vector>

#include "texts.h"

namespace data_pipeline {
namespace {

constexpr int kDeepest = 32;

// Columns by name, those of equal names next to each other; `separators` divide lists that are written as text.
struct JsonSchema {
  Array<const Byte> names;  // concatenated
  Array<const int64_t> name_ends;
  Array<const bool> is_list;
  Array<const Byte> separators;
};

// Cells of n lines and C columns: each column's concatenated bytes, and where each cell's bytes end; a missing cell is empty. In a
// list column, `ends` counts elements, whose bytes end at `element_ends`, [C, elements].
struct JsonCells {
  Array<Byte> bytes;   // [C, bytes of the text]
  Array<int64_t> ends;  // [C, n]
  Array<int64_t> element_ends;
  Array<bool> is_parsed;  // [n]; only parsed lines are rows of cells
};

class JsonParser {
 public:
  JsonParser(const JsonSchema& schema, const JsonCells& cells, bool is_utf8)
      : schema_(schema),
        cells_(cells),
        columns_(schema.name_ends.size),
        lines_(cells.is_parsed.size),
        capacity_(columns_ ? cells.bytes.size / columns_ : 0),
        elements_(columns_ ? cells.element_ends.size / columns_ : 0),
        is_utf8_(is_utf8) {}

  bool fits(int64_t text_bytes) const {
    const int64_t* const ends = schema_.name_ends.data;
    const bool is_ascending = !columns_ || (ends[0] >= 0 && std::is_sorted(ends, ends + columns_));
    const int64_t names = columns_ ? ends[columns_ - 1] : 0;
    return is_ascending && schema_.is_list.size == columns_ && schema_.separators.size == columns_ && schema_.names.size == names &&
           cells_.bytes.size == columns_ * text_bytes && cells_.ends.size == columns_ * lines_ &&
           cells_.element_ends.size == columns_ * elements_;
  }

  // Parses a line; its newline stops every loop. Returns false, leaving the row to the next line, if Python must parse it.
  bool parse_line(const Byte* cursor, int64_t row) {
    for (int64_t column = 0; column < columns_; ++column) clear(column, row);
    skip_space(cursor);
    if (*cursor++ != '{') return false;
    skip_space(cursor);
    if (*cursor == '}') return ends_after(cursor);
    while (true) {
      if (*cursor++ != '"') return false;
      key_.clear();
      if (!parse_string(cursor, [this](Byte byte) { key_.push_back(byte); return true; })) return false;
      skip_space(cursor);
      if (*cursor++ != ':') return false;
      skip_space(cursor);
      if (!parse_member(cursor, row)) return false;
      skip_space(cursor);
      if (*cursor == '}') return ends_after(cursor);
      if (*cursor++ != ',') return false;
      skip_space(cursor);
    }
  }

 private:
  // Parses the value of the columns with the key's name, if any. They are adjacent, and keys mostly come in the columns' order.
  bool parse_member(const Byte*& cursor, int64_t row) {
    int64_t tried = 0;
    while (tried < columns_ && !is_named(next_)) {
      next_ = next_ + 1 < columns_ ? next_ + 1 : 0;
      ++tried;
    }
    if (tried == columns_) return skip_value(cursor, 0);
    while (next_ && is_named(next_ - 1)) --next_;
    for (const Byte* const begin = cursor; next_ < columns_ && is_named(next_); ++next_) {
      cursor = begin;
      clear(next_, row);  // the last of equal keys counts
      if (!parse_cell(cursor, next_, row)) return false;
    }
    if (next_ == columns_) next_ = 0;
    return true;
  }

  bool is_named(int64_t column) const {
    const int64_t start = column ? schema_.name_ends[column - 1] : 0;
    const size_t length = schema_.name_ends[column] - start;
    return length == key_.size() && std::memcmp(key_.data(), schema_.names.data + start, length) == 0;
  }

  void clear(int64_t column, int64_t row) {
    int64_t& end = cells_.ends[column * lines_ + row];
    end = row ? (&end)[-1] : 0;
  }

  bool parse_cell(const Byte*& cursor, int64_t column, int64_t row) {
    int64_t& end = cells_.ends[column * lines_ + row];
    if (*cursor == 'n') return skip_word(cursor, "null");
    Byte* const bytes = cells_.bytes.data + column * capacity_;
    if (!schema_.is_list[column]) {
      return parse_scalar(cursor, [&](Byte byte) { bytes[end++] = byte; return true; });
    }
    int64_t* const ends = cells_.element_ends.data + column * elements_;
    int64_t size = end ? ends[end - 1] : 0;
    const auto finish = [&] {
      if (end == elements_) return false;
      ends[end++] = size;
      return true;
    };
    if (*cursor != '[') {  // a text of separated elements; none if empty
      const int64_t begin = size, first = end;
      const bool is_good = parse_scalar(cursor, [&](Byte byte) {
        if (byte == schema_.separators[column]) return finish();
        bytes[size++] = byte;
        return true;
      });
      return is_good && ((size == begin && end == first) || finish());
    }
    skip_space(++cursor);
    if (*cursor == ']') return ++cursor, true;
    while (true) {
      if (!parse_scalar(cursor, [&](Byte byte) { bytes[size++] = byte; return true; }) || !finish()) return false;
      skip_space(cursor);
      if (*cursor == ']') return ++cursor, true;
      if (*cursor++ != ',') return false;
      skip_space(cursor);
    }
  }

  // Parses a text, a number, which stays as written, or true or false as 1 or 0.
  template <class Put>
  bool parse_scalar(const Byte*& cursor, const Put& put) {
    if (*cursor == '"') return parse_string(++cursor, put);
    if (*cursor == 't') return skip_word(cursor, "true") && put('1');
    if (*cursor == 'f') return skip_word(cursor, "false") && put('0');
    const Byte* digit = cursor;
    if (!skip_number(cursor)) return false;
    while (digit != cursor) {
      if (!put(*digit++)) return false;
    }
    return true;
  }

  // Parses what follows a quote, including the closing quote. Non-ASCII bytes pass unchanged if the text is known to be UTF-8.
  template <class Put>
  bool parse_string(const Byte*& cursor, const Put& put) {
    for (; *cursor != '"'; ++cursor) {
      if (*cursor < 0x20 || (*cursor >= 0x80 && !is_utf8_)) return false;
      if (*cursor != '\\') {
        if (!put(*cursor)) return false;
        continue;
      }
      ++cursor;
      if (*cursor == 'u') {
        if (!parse_code_point(cursor, put)) return false;
        continue;
      }
      const char* const escape = *cursor ? std::strchr("\"\"\\\\//b\bf\fn\nr\rt\t", *cursor) : nullptr;
      if (!escape || *cursor < ' ' || !put(escape[1])) return false;
    }
    ++cursor;
    return true;
  }

  // Parses uXXXX, and the second half of a surrogate pair; `cursor` is left at the last digit.
  template <class Put>
  static bool parse_code_point(const Byte*& cursor, const Put& put) {
    uint32_t code = 0;
    if (!parse_hex(cursor, code) || (code >= 0xDC00 && code < 0xE000)) return false;
    if (code >= 0xD800 && code < 0xDC00) {
      uint32_t low = 0;
      if (cursor[1] != '\\' || cursor[2] != 'u' || !parse_hex(cursor += 2, low) || low < 0xDC00 || low >= 0xE000) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code < 0x80) return put(code);
    if (code < 0x800) return put(0xC0 | code >> 6) && put(0x80 | (code & 0x3F));
    if (code < 0x10000) return put(0xE0 | code >> 12) && put(0x80 | (code >> 6 & 0x3F)) && put(0x80 | (code & 0x3F));
    return put(0xF0 | code >> 18) && put(0x80 | (code >> 12 & 0x3F)) && put(0x80 | (code >> 6 & 0x3F)) && put(0x80 | (code & 0x3F));
  }

  static bool parse_hex(const Byte*& cursor, uint32_t& code) {
    for (int digit = 0; digit < 4; ++digit) {
      const Byte byte = *++cursor, letter = byte | 0x20;
      if ('0' <= byte && byte <= '9') {
        code = code << 4 | (byte - '0');
      } else if ('a' <= letter && letter <= 'f') {
        code = code << 4 | (letter - 'a' + 10);
      } else {
        return false;
      }
    }
    return true;
  }

  bool skip_value(const Byte*& cursor, int depth) {
    const auto ignore = [](Byte) { return true; };
    if (*cursor == 'n') return skip_word(cursor, "null");
    if (*cursor != '{' && *cursor != '[') return parse_scalar(cursor, ignore);
    if (depth == kDeepest) return false;
    const bool is_object = *cursor++ == '{';
    const Byte close = is_object ? '}' : ']';
    skip_space(cursor);
    if (*cursor == close) return ++cursor, true;
    while (true) {
      if (is_object) {
        if (*cursor++ != '"' || !parse_string(cursor, ignore)) return false;
        skip_space(cursor);
        if (*cursor++ != ':') return false;
        skip_space(cursor);
      }
      if (!skip_value(cursor, depth + 1)) return false;
      skip_space(cursor);
      if (*cursor == close) return ++cursor, true;
      if (*cursor++ != ',') return false;
      skip_space(cursor);
    }
  }

  static bool skip_number(const Byte*& cursor) {
    const auto skip_digits = [&cursor] {
      const Byte* const begin = cursor;
      while ('0' <= *cursor && *cursor <= '9') ++cursor;
      return cursor != begin;
    };
    cursor += *cursor == '-';
    if (*cursor == '0') {
      ++cursor;
    } else if (!skip_digits()) {
      return false;
    }
    if (*cursor == '.' && !skip_digits_after(cursor, skip_digits)) return false;
    if (*cursor == 'e' || *cursor == 'E') {
      cursor += cursor[1] == '+' || cursor[1] == '-';
      if (!skip_digits_after(cursor, skip_digits)) return false;
    }
    return true;
  }

  template <class Skip>
  static bool skip_digits_after(const Byte*& cursor, const Skip& skip_digits) {
    ++cursor;
    return skip_digits();
  }

  static bool skip_word(const Byte*& cursor, const char* word) {
    for (; *word; ++word, ++cursor) {
      if (*cursor != static_cast<Byte>(*word)) return false;
    }
    return true;
  }

  static void skip_space(const Byte*& cursor) {
    while (*cursor == ' ' || *cursor == '\t' || *cursor == '\r') ++cursor;
  }

  // Whether only space follows the object's end, up to the newline.
  static bool ends_after(const Byte* cursor) {
    skip_space(++cursor);
    return *cursor == '\n';
  }

  const JsonSchema schema_;
  const JsonCells cells_;
  const int64_t columns_, lines_, capacity_, elements_;
  const bool is_utf8_;
  int64_t next_ = 0;  // the column that the next key most likely names
  std::vector<Byte> key_;
};

}  // namespace

// Parses a text of exactly as many lines as `cells` has room for, and returns the number of rows; `is_utf8`: whether the text is UTF-8.
EXPORTED int64_t parse_json(Array<const Byte> text, const JsonSchema* schema, const JsonCells* cells, int64_t is_utf8) {
  JsonParser parser(*schema, *cells, is_utf8 != 0);
  if ((text.size && text[text.size - 1] != '\n') || !parser.fits(text.size)) return kWrongSizes;
  int64_t row = 0, line = 0;
  for (const Byte *cursor = text.data, *end = cursor + text.size; cursor != end; ++line) {
    if (line == cells->is_parsed.size) return kWrongSizes;
    cells->is_parsed[line] = parser.parse_line(cursor, row);
    row += cells->is_parsed[line];
    cursor = static_cast<const Byte*>(std::memchr(cursor, '\n', end - cursor)) + 1;
  }
  return line == cells->is_parsed.size ? row : kWrongSizes;
}

}  // namespace data_pipeline
