#include "option_table.hpp"

#include <algorithm>
#include <cstdlib>

#include "../yaml/wording.hpp"

namespace pipeedge::cli {

double whole_number(const std::string& option, const std::string& text, double least, double most) {
  const bool digits = !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
  const double value = digits ? std::strtod(text.c_str(), nullptr) : -1;
  if (!digits || value < least || value > most) {
    throw UsageError(option + ": '" + yaml::printable(text) + "' is not a whole number from " +
                     std::to_string(static_cast<long long>(least)) + " to " +
                     std::to_string(static_cast<long long>(most)));
  }
  return value;
}

int link_bits(const std::string& option, const std::string& text) {
  for (const int bits : {0, 2, 3, 4, 5, 6, 7, 8, 16}) {
    if (text == std::to_string(bits)) return bits;
  }
  throw UsageError(option + ": '" + yaml::printable(text) + "' is neither 0, 2 to 8, 16 nor auto");
}

double positive_number(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool plain = text.find_first_not_of("0123456789.eE+-") == std::string::npos;
  if (text.empty() || !plain || *end != '\0' || !(value > 0) || value > 1e9) {
    throw UsageError(option + ": '" + yaml::printable(text) + "' is not a number above 0 and up to 1e9");
  }
  return value;
}

std::string nonempty(const std::string& name, const std::string& value) {
  if (value.empty()) throw UsageError(name + ": the value is empty");
  return value;
}

std::vector<std::string> names(const std::string& option, const std::string& value) {
  std::vector<std::string> found;
  for (std::size_t from = 0; from <= value.size();) {
    const std::size_t comma = std::min(value.find(',', from), value.size());
    found.push_back(nonempty(option, value.substr(from, comma - from)));
    from = comma + 1;
  }
  return found;
}

}  // namespace pipeedge::cli
