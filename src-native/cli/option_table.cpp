#include "option_table.hpp"

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "../yaml/wording.hpp"

namespace pipeedge::cli {
namespace {

[[noreturn]] void wrong(const std::string& option, const std::string& text, const std::string& why) {
  throw UsageError(option + ": '" + yaml::printable(text) + "' " + why);
}

// A number in decimal digits; none if it is written in another way, as infinity is.
std::optional<double> decimal(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool plain = text.find_first_not_of("0123456789.eE+-") == std::string::npos;
  return text.empty() || !plain || *end != '\0' ? std::nullopt : std::optional(value);
}

}  // namespace

double whole_number(const std::string& option, const std::string& text, double least, double most) {
  const bool digits = !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
  const double value = digits ? std::strtod(text.c_str(), nullptr) : -1;
  if (!digits || value < least || value > most) {
    wrong(option, text,
          "is not a whole number from " + std::to_string(static_cast<long long>(least)) + " to " +
              std::to_string(static_cast<long long>(most)));
  }
  return value;
}

int link_bits(const std::string& option, const std::string& text) {
  for (const int bits : {0, 2, 3, 4, 5, 6, 7, 8, 16}) {
    if (text == std::to_string(bits)) return bits;
  }
  wrong(option, text, "is neither 0, 2 to 8, 16 nor auto");
}

double positive_number(const std::string& option, const std::string& text) {
  const std::optional<double> value = decimal(text);
  if (!value || !(*value > 0) || *value > 1e9) wrong(option, text, "is not a number above 0 and up to 1e9");
  return *value;
}

double fraction(const std::string& option, const std::string& text) {
  const std::optional<double> value = decimal(text);
  if (!value || !(*value >= 0) || *value > 1) wrong(option, text, "is not a number from 0 to 1");
  return *value;
}

std::string nonempty(const std::string& option, const std::string& text) {
  if (text.empty()) throw UsageError(option + ": the value is empty");
  return text;
}

std::vector<std::string> names(const std::string& option, const std::string& text) {
  std::vector<std::string> found;
  for (std::size_t from = 0; from <= text.size();) {
    const std::size_t comma = std::min(text.find(',', from), text.size());
    found.push_back(nonempty(option, text.substr(from, comma - from)));
    from = comma + 1;
  }
  return found;
}

std::pair<std::string, std::string> pair_of(const std::string& option, const std::string& text, char separator,
                                            const char* form) {
  const std::size_t at = text.rfind(separator);
  if (at == std::string::npos || at == 0) wrong(option, text, std::string("is not of the form ") + form);
  return {text.substr(0, at), text.substr(at + 1)};
}

void no_such_word(const std::string& option, const std::string& text, const std::vector<std::string>& known) {
  std::string all;
  for (std::size_t w = 0; w < known.size(); ++w) {
    all += (w == 0 ? "" : w + 1 == known.size() ? " nor " : ", ") + known[w];
  }
  wrong(option, text, "is neither " + all);
}

std::string wrapped(const std::string& text, std::size_t indent) {
  constexpr std::size_t kWidth = 54;
  std::string lines;
  std::size_t used = 0;
  for (std::size_t from = 0; from < text.size();) {
    const std::size_t space = std::min(text.find(' ', from), text.size());
    const std::size_t length = space - from;
    if (used > 0 && used + 1 + length > kWidth) {
      lines += "\n" + std::string(indent, ' ');
      used = 0;
    }
    lines += (used > 0 ? " " : "") + text.substr(from, length);
    used += length + (used > 0 ? 1 : 0);
    from = space + 1;
  }
  return lines;
}

}  // namespace pipeedge::cli
