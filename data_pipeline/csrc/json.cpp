// Lines of JSON objects to the cells of wanted columns: the fast form of `json_lines.read_by_definition`, for lines without surprises.
//
// A line is left to Python, which then says what it means or what is wrong with it, if it is no JSON or if it holds what few logs
// do: null in a list, an object where a text is due, NaN, half of a surrogate pair, deep nesting.

#include <cstring>
#include <vector>

#include "texts.h"

namespace data_pipeline {
namespace {

constexpr int kDeepest = 32;

// Columns, each with its name, those of equal names together; lists also with what separates elements in a text.
struct JsonSchema {
  Array<const Byte> names;  // end to end
  Array<const int64_t> name_ends;
  Array<const bool> is_list;
  Array<const Byte> separators;
};

// Cells of n lines and C columns: the bytes of each column end to end, and where those of each cell end; a missing one is empty. Of a
// list column `ends` counts elements, whose bytes end at `element_ends`, [C, elements].
struct JsonCells {
  Array<Byte> bytes;   // [C, bytes of the text]
  Array<int64_t> ends;  // [C, n]
  Array<int64_t> element_ends;
  Array<bool> is_parsed;  // [n]; rows of cells are lines that are
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
    const int64_t names = columns_ ? schema_.name_ends[columns_ - 1] : 0;
    return schema_.is_list.size == columns_ && schema_.separators.size == columns_ && schema_.names.size == names &&
           cells_.bytes.size == columns_ * text_bytes && cells_.ends.size == columns_ * lines_ &&
           cells_.element_ends.size == columns_ * elements_;
  }

  // Parses a line of at least its newline, where every loop stops; false leaves the row to the next line.
  bool parse_line(const Byte* at, int64_t row) {
    for (int64_t column = 0; column < columns_; ++column) clear(column, row);
    skip_space(at);
    if (*at++ != '{') return false;
    skip_space(at);
    if (*at == '}') return ends_after(at);
    while (true) {
      if (*at++ != '"') return false;
      key_.clear();
      if (!parse_string(at, [this](Byte byte) { key_.push_back(byte); return true; })) return false;
      skip_space(at);
      if (*at++ != ':') return false;
      skip_space(at);
      if (!parse_member(at, row)) return false;
      skip_space(at);
      if (*at == '}') return ends_after(at);
      if (*at++ != ',') return false;
      skip_space(at);
    }
  }

 private:
  // The value of every column of the key's name, or of none. Columns of one name follow each other, and most keys their columns' order.
  bool parse_member(const Byte*& at, int64_t row) {
    int64_t tried = 0;
    while (tried < columns_ && !is_named(next_)) {
      next_ = next_ + 1 < columns_ ? next_ + 1 : 0;
      ++tried;
    }
    if (tried == columns_) return skip_value(at, 0);
    while (next_ && is_named(next_ - 1)) --next_;
    for (const Byte* const begin = at; next_ < columns_ && is_named(next_); ++next_) {
      at = begin;
      clear(next_, row);  // of equal keys the last one counts
      if (!parse_cell(at, next_, row)) return false;
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

  bool parse_cell(const Byte*& at, int64_t column, int64_t row) {
    int64_t& end = cells_.ends[column * lines_ + row];
    if (*at == 'n') return skip_word(at, "null");
    Byte* const bytes = cells_.bytes.data + column * capacity_;
    if (!schema_.is_list[column]) {
      return parse_scalar(at, [&](Byte byte) { bytes[end++] = byte; return true; });
    }
    int64_t* const ends = cells_.element_ends.data + column * elements_;
    int64_t size = end ? ends[end - 1] : 0;
    const auto finish = [&] {
      if (end == elements_) return false;
      ends[end++] = size;
      return true;
    };
    if (*at != '[') {  // elements between separators, none in an empty text
      const int64_t begin = size, first = end;
      const bool is_good = parse_scalar(at, [&](Byte byte) {
        if (byte == schema_.separators[column]) return finish();
        bytes[size++] = byte;
        return true;
      });
      return is_good && ((size == begin && end == first) || finish());
    }
    skip_space(++at);
    if (*at == ']') return ++at, true;
    while (true) {
      if (!parse_scalar(at, [&](Byte byte) { bytes[size++] = byte; return true; }) || !finish()) return false;
      skip_space(at);
      if (*at == ']') return ++at, true;
      if (*at++ != ',') return false;
      skip_space(at);
    }
  }

  // A text, or a number as it is written, or 1 or 0 for true or false.
  template <class Put>
  bool parse_scalar(const Byte*& at, const Put& put) {
    if (*at == '"') return parse_string(++at, put);
    if (*at == 't') return skip_word(at, "true") && put('1');
    if (*at == 'f') return skip_word(at, "false") && put('0');
    const Byte* digit = at;
    if (!skip_number(at)) return false;
    while (digit != at) {
      if (!put(*digit++)) return false;
    }
    return true;
  }

  // What follows a quote, and the quote after it. Bytes beyond ASCII pass as they are where the text is known to be UTF-8.
  template <class Put>
  bool parse_string(const Byte*& at, const Put& put) {
    for (; *at != '"'; ++at) {
      if (*at < 0x20 || (*at >= 0x80 && !is_utf8_)) return false;
      if (*at != '\\') {
        if (!put(*at)) return false;
        continue;
      }
      ++at;
      if (*at == 'u') {
        if (!parse_code_point(at, put)) return false;
        continue;
      }
      const char* const escape = *at ? std::strchr("\"\"\\\\//b\bf\fn\nr\rt\t", *at) : nullptr;
      if (!escape || *at < ' ' || !put(escape[1])) return false;
    }
    ++at;
    return true;
  }

  // uXXXX, and the second half of a pair; `at` is left at its last digit.
  template <class Put>
  static bool parse_code_point(const Byte*& at, const Put& put) {
    uint32_t code = 0;
    if (!parse_hex(at, code) || (code >= 0xDC00 && code < 0xE000)) return false;
    if (code >= 0xD800 && code < 0xDC00) {
      uint32_t low = 0;
      if (at[1] != '\\' || at[2] != 'u' || !parse_hex(at += 2, low) || low < 0xDC00 || low >= 0xE000) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code < 0x80) return put(code);
    if (code < 0x800) return put(0xC0 | code >> 6) && put(0x80 | (code & 0x3F));
    if (code < 0x10000) return put(0xE0 | code >> 12) && put(0x80 | (code >> 6 & 0x3F)) && put(0x80 | (code & 0x3F));
    return put(0xF0 | code >> 18) && put(0x80 | (code >> 12 & 0x3F)) && put(0x80 | (code >> 6 & 0x3F)) && put(0x80 | (code & 0x3F));
  }

  static bool parse_hex(const Byte*& at, uint32_t& code) {
    for (int digit = 0; digit < 4; ++digit) {
      const Byte byte = *++at, letter = byte | 0x20;
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

  bool skip_value(const Byte*& at, int depth) {
    const auto ignore = [](Byte) { return true; };
    if (*at == 'n') return skip_word(at, "null");
    if (*at != '{' && *at != '[') return parse_scalar(at, ignore);
    if (depth == kDeepest) return false;
    const bool is_object = *at++ == '{';
    const Byte close = is_object ? '}' : ']';
    skip_space(at);
    if (*at == close) return ++at, true;
    while (true) {
      if (is_object) {
        if (*at++ != '"' || !parse_string(at, ignore)) return false;
        skip_space(at);
        if (*at++ != ':') return false;
        skip_space(at);
      }
      if (!skip_value(at, depth + 1)) return false;
      skip_space(at);
      if (*at == close) return ++at, true;
      if (*at++ != ',') return false;
      skip_space(at);
    }
  }

  static bool skip_number(const Byte*& at) {
    const auto skip_digits = [&at] {
      const Byte* const begin = at;
      while ('0' <= *at && *at <= '9') ++at;
      return at != begin;
    };
    at += *at == '-';
    if (*at == '0') {
      ++at;
    } else if (!skip_digits()) {
      return false;
    }
    if (*at == '.' && !skip_digits_after(at, skip_digits)) return false;
    if (*at == 'e' || *at == 'E') {
      at += at[1] == '+' || at[1] == '-';
      if (!skip_digits_after(at, skip_digits)) return false;
    }
    return true;
  }

  template <class Skip>
  static bool skip_digits_after(const Byte*& at, const Skip& skip_digits) {
    ++at;
    return skip_digits();
  }

  static bool skip_word(const Byte*& at, const char* word) {
    for (; *word; ++word, ++at) {
      if (*at != static_cast<Byte>(*word)) return false;
    }
    return true;
  }

  static void skip_space(const Byte*& at) {
    while (*at == ' ' || *at == '\t' || *at == '\r') ++at;
  }

  // Behind the object's end there is the line's.
  static bool ends_after(const Byte* at) {
    skip_space(++at);
    return *at == '\n';
  }

  const JsonSchema schema_;
  const JsonCells cells_;
  const int64_t columns_, lines_, capacity_, elements_;
  const bool is_utf8_;
  int64_t next_ = 0;  // the column that the next key most likely names
  std::vector<Byte> key_;
};

}  // namespace

// The rows of a text's lines, as many as `cells` has room for; `is_utf8`: the text is.
EXPORTED int64_t parse_json(Array<const Byte> text, const JsonSchema* schema, const JsonCells* cells, int64_t is_utf8) {
  JsonParser parser(*schema, *cells, is_utf8 != 0);
  if ((text.size && text[text.size - 1] != '\n') || !parser.fits(text.size)) return kWrongSizes;
  int64_t row = 0, line = 0;
  for (const Byte *at = text.data, *end = at + text.size; at != end; ++line) {
    if (line == cells->is_parsed.size) return kWrongSizes;
    cells->is_parsed[line] = parser.parse_line(at, row);
    row += cells->is_parsed[line];
    at = static_cast<const Byte*>(std::memchr(at, '\n', end - at)) + 1;
  }
  return row;
}

}  // namespace data_pipeline
