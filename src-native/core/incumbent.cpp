#include "incumbent.hpp"

#include <algorithm>
#include <utility>

namespace pipeedge {

std::vector<Stage> stages_of(const Instance& instance, const Path& path) {
  std::vector<Stage> stages;
  std::vector<std::size_t> next(static_cast<std::size_t>(instance.classes()), 0);
  for (const Step& step : path) {
    std::size_t& used = next[static_cast<std::size_t>(step.cls)];
    stages.push_back({instance.hosts(step.cls)[used++], step.first, step.last});
  }
  return stages;
}

Costs costs_of(const Instance& instance, const Path& path) {
  const std::vector<Stage> stages = stages_of(instance, path);
  const std::vector<StageCost> costs = evaluate(instance.problem(), stages);
  return {bottleneck_seconds(instance.problem(), stages, costs), latency_seconds(costs)};
}

bool uses_data_host(const Instance& instance, const Path& path) {
  return std::any_of(path.begin(), path.end(),
                     [&](const Step& step) { return step.cls == instance.data_class(); });
}

void Incumbent::improve(Path path) {
  const double found = costs_of(instance_, path).of(objective_);
  if (found < high_) {
    high_ = found;
    path_ = std::move(path);
  }
}

void Incumbent::raise_low(double bound) { low_ = std::max(low_, std::min(high_, bound)); }

}  // namespace pipeedge
