// Numbers, names, tables and JSON as text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace pipeedge::cli {

// Four significant digits, separators between thousands, no exponent: "12,110", "0.04648".
std::string figure_text(double value);
std::string seconds_text(double seconds);       // "1.549 s", "9.234 ms", "never"
std::string microseconds_text(double seconds);  // "1.548760": for columns of seconds
std::string rate_text(double items_per_s);      // "5.165 items/s"
std::string energy_text(double joules);         // "3.214 J an item"
std::string megabytes_text(double bytes);       // "151.2", in units of 2^20 bytes
std::string percent_text(double fraction);      // "1.30 %"

// In double quotes, with escapes that JSON and YAML share.
std::string quoted(std::string_view text);

// As a YAML key or value that reads back as this name, without quotes if possible. Whole numbers are not
// quoted, because hosts may be named by rank.
std::string yaml_name(const std::string& name);

// Columns as wide as their widest cell, with two spaces between; the first row is the header. Where there is no
// room for all, those in `spare` are left out, the first one first.
class Table {
 public:
  enum class Align { kLeft, kRight };
  explicit Table(std::vector<Align> columns, std::vector<std::size_t> spare = {})
      : columns_(std::move(columns)), spare_(std::move(spare)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // At most `room` characters wide, if that is not 0, and as narrow as it can be if there is less room.
  std::string text(std::size_t room = 0) const;

 private:
  std::vector<Align> columns_;
  std::vector<std::size_t> spare_;
  std::vector<std::vector<std::string>> rows_;
};

// Writes one JSON value, indented. Numbers that JSON cannot represent become null.
class JsonWriter {
 public:
  JsonWriter& key(std::string_view name);
  JsonWriter& value(double number);
  JsonWriter& value(int number) { return value(static_cast<double>(number)); }
  JsonWriter& value(bool flag);
  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& whole_number(std::string_view digits);  // of any size
  JsonWriter& null();
  JsonWriter& open(char bracket);  // '{' or '['
  JsonWriter& close(char bracket);
  // A list of two whole numbers on one line.
  JsonWriter& pair(int first, int second);
  // A list of numbers on one line.
  JsonWriter& numbers(const std::vector<double>& values);

  const std::string& text() const { return text_; }

 private:
  void before_value();
  void new_line();

  std::string text_;
  std::vector<bool> filled_;  // for each open bracket: whether it has contents
  bool after_key_ = false;
};

}  // namespace pipeedge::cli
