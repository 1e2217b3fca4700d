#include "cost_values.hpp"

#include <algorithm>
#include <cstddef>

namespace pipeedge {

std::vector<double> costs_between(const Instance& instance, double low, double high) {
  std::vector<double> values;
  const auto note = [&](double value) {
    if (value >= low && loosened(value) < high) values.push_back(value);
  };
  const int layers = instance.layers();
  for (int cls = 0; cls < instance.classes(); ++cls) {
    for (int first = 0; first < layers; ++first) {
      GrowingStage stage = instance.stage_from(cls, first);
      while (stage.last() < layers) {
        stage.add_layer();
        if (!(stage.layers_s() < high) || instance.overfull(cls, stage)) break;
        if (instance.fits(cls, stage)) note(instance.busy_seconds(cls, stage));
      }
      note(instance.link_in(cls, first));
      note(instance.link_out(cls, first + 1));
    }
  }
  if (instance.pairwise()) {
    for (int cut = 1; cut < layers; ++cut) {
      for (int from = 0; from < instance.classes(); ++from) {
        for (int to = 0; to < instance.classes(); ++to) note(instance.link(from, to, cut));
      }
    }
  }
  return values;
}

std::optional<double> median_cost(const Instance& instance, double low, double high) {
  std::vector<double> values = costs_between(instance, low, high);
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace pipeedge
