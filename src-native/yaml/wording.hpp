// Numbers and names in messages.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pipeedge::yaml {

std::string plural(std::size_t count, const char* one);  // "1 host", "2 hosts"
std::string number_text(double value);                   // a whole number of at most kLargestNumber

// Up to `limit` names without quotes, separated by commas: "a, b, c and 4 more"; "none" if empty.
std::string listing(const std::vector<std::string>& names, std::size_t limit = 6);

// The name nearest to `wanted` by edit distance, if it is near enough to be a typing error; else empty.
std::string nearest(const std::string& wanted, const std::vector<std::string>& names);

}  // namespace pipeedge::yaml
