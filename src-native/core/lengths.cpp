#include "lengths.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>

namespace pipeedge {

double at_length(const std::vector<double>& lengths, const std::vector<double>& values, double wanted, Growth growth) {
  if (lengths.empty() || lengths.size() != values.size()) {
    throw std::invalid_argument("lengths and values must be as many, and at least one");
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (!(lengths[i] >= 1) || (i > 0 && !(lengths[i] > lengths[i - 1]))) {
      throw std::invalid_argument("lengths must be at least 1 and ascend");
    }
  }
  if (!(wanted >= 1)) throw std::invalid_argument("the length wanted must be at least 1");
  const auto at = std::lower_bound(lengths.begin(), lengths.end(), wanted);
  if (at != lengths.end() && *at == wanted) return values[static_cast<std::size_t>(at - lengths.begin())];
  if (lengths.size() == 1) return values.front();

  const auto right =
      std::clamp<std::ptrdiff_t>(at - lengths.begin(), 1, static_cast<std::ptrdiff_t>(lengths.size()) - 1);
  const auto high = static_cast<std::size_t>(right);
  const std::size_t low = high - 1;
  const bool square = growth == Growth::kSquare;
  const auto per = [&](std::size_t i) { return square ? values[i] / lengths[i] : values[i]; };
  const double part = (wanted - lengths[low]) / (lengths[high] - lengths[low]);
  const double found = (per(low) + part * (per(high) - per(low))) * (square ? wanted : 1);
  if (wanted < lengths.front()) {
    const double part_of_shortest = wanted / lengths.front();
    const double least = values.front() * part_of_shortest * (square ? part_of_shortest : 1);
    return std::clamp(found, least, values.front());
  }
  if (wanted > lengths.back()) return std::max(found, values.back());
  return found;
}

}  // namespace pipeedge
