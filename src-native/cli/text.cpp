#include "text.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace pipeedge::cli {
namespace {

std::string formatted(const char* format, double value) {
  std::array<char, 400> text{};  // the longest double in %f has 309 digits
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

// Width on a terminal, assuming one column per UTF-8 character.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

std::string figure_text(double value) {
  constexpr int kDigits = 4;
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (std::fabs(value) >= 1e18) return value > 0 ? "above 10^18" : "below -10^18";
  if (std::fabs(value) < 1e-12) return "0";
  const std::string rounded = formatted("%.3e", value);
  const int exponent = std::stoi(rounded.substr(rounded.find('e') + 1));
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", std::max(0, kDigits - 1 - exponent), std::stod(rounded));
  std::string figure = text.data();
  if (figure.find('.') != std::string::npos) {
    figure.erase(figure.find_last_not_of('0') + 1);
    if (figure.back() == '.') figure.pop_back();
  }
  const std::size_t sign = figure[0] == '-' ? 1 : 0;
  for (std::size_t at = std::min(figure.find('.'), figure.size()); at > sign + 3;) {
    at -= 3;
    figure.insert(at, ",");
  }
  return figure;
}

std::string seconds_text(double seconds) {
  if (!std::isfinite(seconds)) return "never";
  if (seconds >= 1e6) return figure_text(seconds) + " s";
  if (seconds >= 0.1 || seconds == 0) return formatted("%.3f s", seconds);
  if (seconds >= 1e-4) return formatted("%.3f ms", seconds * 1e3);
  return figure_text(seconds * 1e3) + " ms";
}

std::string microseconds_text(double seconds) {
  return std::fabs(seconds) < 1e6 ? formatted("%.6f", seconds) : figure_text(seconds);
}

std::string energy_text(double joules) { return figure_text(joules) + " J an item"; }

std::string rate_text(double items_per_s) {
  if (!std::isfinite(items_per_s)) return "unbounded items/s";
  return figure_text(items_per_s) + " items/s";
}

std::string megabytes_text(double bytes) { return formatted("%.1f", bytes / (1 << 20)); }

std::string percent_text(double fraction) { return formatted("%.2f %%", fraction * 100); }

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::string_view rest = text.substr(i);
    if (byte == '"' || byte == '\\') {
      out += '\\';
      out += text[i];
    } else if (byte < 0x20 || byte == 0x7F) {
      std::array<char, 8> code{};
      std::snprintf(code.data(), code.size(), "\\u%04x", static_cast<unsigned>(byte));
      out += code.data();
    } else if (rest.substr(0, 2) == "\xC2\x85") {  // next line, line and paragraph separators: YAML folds them
      out += "\\u0085";
      ++i;
    } else if (rest.substr(0, 3) == "\xE2\x80\xA8" || rest.substr(0, 3) == "\xE2\x80\xA9") {
      out += rest[2] == '\xA8' ? "\\u2028" : "\\u2029";
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out + "\"";
}

std::string yaml_name(const std::string& name) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  if (!name.empty() && std::all_of(name.begin(), name.end(), digit)) {
    return name.size() == 1 || (name[0] != '0' && name.size() <= 18) ? name : quoted(name);
  }
  // Starts with a letter, or is an IPv4 address: YAML 1.1 and 1.2 cannot mistake it for a number, date or time.
  const bool usual = std::all_of(name.begin(), name.end(),
                                 [&](char c) { return letter(c) || digit(c) || c == '-' || c == '_' || c == '.'; });
  const bool address = usual && std::count(name.begin(), name.end(), '.') == 3 && digit(name.front()) &&
                       std::all_of(name.begin(), name.end(), [&](char c) { return digit(c) || c == '.'; });
  if (name.empty() || !usual || !(letter(name.front()) || address)) return quoted(name);
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); });
  constexpr std::array<const char*, 9> kReserved = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"};
  const bool reserved =
      std::any_of(kReserved.begin(), kReserved.end(), [&](const char* word) { return lower == word; });
  return reserved ? quoted(name) : name;
}

std::string Table::text(std::size_t room) const {
  std::vector<std::size_t> widths(columns_.size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::size_t total = 2 * (columns_.size() - 1);
  for (const std::size_t each : widths) total += each;
  std::vector<bool> left_out(columns_.size(), false);
  std::string titles;
  for (const std::size_t column : spare_) {
    if (room == 0 || total <= room) break;
    left_out[column] = true;
    total -= widths[column] + 2;
    titles += (titles.empty() ? "" : ", ") + rows_.front()[column];
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (left_out[i]) continue;
      const std::string pad(widths[i] - width(row[i]), ' ');
      line += (i == 0 ? "" : "  ") + (columns_[i] == Align::kRight ? pad + row[i] : row[i] + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return titles.empty() ? out : out + "no room for: " + titles + "\n";
}

void JsonWriter::new_line() { text_ += "\n" + std::string(2 * filled_.size(), ' '); }

void JsonWriter::before_value() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (filled_.empty()) return;
  if (filled_.back()) text_ += ',';
  filled_.back() = true;
  new_line();
}

JsonWriter& JsonWriter::key(std::string_view name) {
  before_value();
  text_ += quoted(name) + ": ";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  if (!std::isfinite(number)) return null();
  before_value();
  text_ += formatted("%.17g", number);
  return *this;
}

JsonWriter& JsonWriter::value(bool flag) {
  before_value();
  text_ += flag ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  before_value();
  text_ += quoted(text);
  return *this;
}

JsonWriter& JsonWriter::whole_number(std::string_view digits) {
  before_value();
  text_ += digits;
  return *this;
}

JsonWriter& JsonWriter::null() {
  before_value();
  text_ += "null";
  return *this;
}

JsonWriter& JsonWriter::open(char bracket) {
  before_value();
  text_ += bracket;
  filled_.push_back(false);
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  const bool filled = filled_.back();
  filled_.pop_back();
  if (filled) new_line();
  text_ += bracket;
  if (filled_.empty()) text_ += "\n";
  return *this;
}

JsonWriter& JsonWriter::pair(int first, int second) {
  before_value();
  text_ += "[" + std::to_string(first) + ", " + std::to_string(second) + "]";
  return *this;
}

JsonWriter& JsonWriter::numbers(const std::vector<double>& values) {
  before_value();
  text_ += '[';
  for (std::size_t i = 0; i < values.size(); ++i) {
    text_ += (i == 0 ? "" : ", ") + (std::isfinite(values[i]) ? formatted("%.17g", values[i]) : "null");
  }
  text_ += ']';
  return *this;
}

}  // namespace pipeedge::cli
