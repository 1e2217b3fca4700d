#include "incumbent.hpp"

#include <algorithm>
#include <utility>

#include "objectives.hpp"

namespace pipeedge {
namespace {

constexpr double kLongest = 1e30;  // seconds; finite, so that the limit counts

}  // namespace

Incumbent::Incumbent(const Problem& problem, const Options& options)
    : problem_(problem), options_(options), clock_(options.time_limit_s), links_(problem) {
  for (const Setting& setting : problem.settings) {
    const auto same = [&](const auto& other) { return other->batch_size == setting.batch_size; };
    if (std::any_of(sizes_.begin(), sizes_.end(), same)) continue;
    sizes_.push_back(std::make_unique<Size>(problem, links_, setting.batch_size, clock_));
    Size& size = *sizes_.back();
    if (options.objective == Objective::kThroughput) size.low = size.instance.least_period() / size.batch_size;
    if (options.objective == Objective::kLatency) size.low = size.instance.fastest(0, problem.layers());
  }
  std::stable_sort(sizes_.begin(), sizes_.end(), [](const auto& a, const auto& b) { return a->low < b->low; });
}

bool Incumbent::on_data_host() const {
  const auto on_data = [&](const Stage& stage) { return stage.host == problem_.data_host; };
  return std::any_of(best_.stages.begin(), best_.stages.end(), on_data);
}

bool Incumbent::proven() const {
  for (int s = 0; s < sizes(); ++s) {
    if (!closed(s)) return false;
  }
  return true;
}

double Incumbent::low() const {
  double low = kInfinity;
  for (const auto& size : sizes_) low = std::min(low, size->low);
  return low;
}

double Incumbent::value_of(const Costs& costs, double batch_size) const {
  switch (options_.objective) {
    case Objective::kThroughput: return costs.period_s / batch_size;
    case Objective::kLatency: return costs.latency_s;
    case Objective::kEnergy: break;
  }
  return *costs.joules / batch_size;
}

bool Incumbent::improve(int s, const Path& path) {
  Plan plan;
  plan.stages = stages_of(size(s).instance, path);
  plan.costs = costs_of(plan.stages);
  plan.value = value_of(plan.costs, size(s).batch_size);
  if (!(plan.value < size(s).known.value)) return false;
  size(s).known = plan;
  if (!(plan.value < best_.value)) return false;
  best_ = std::move(plan);
  best_size_ = s;
  return true;
}

void Incumbent::prefer(const Path& path) {
  best_.stages = stages_of(size(best_size_).instance, path);
  best_.costs = costs_of(best_.stages);
}

void Incumbent::widen_links() {
  if (problem_.widths.size() < 2) return;
  pipeedge::widen_links(problem_, links_, best_.costs.period_s, best_.stages);
  best_.costs = costs_of(best_.stages);
}

void Incumbent::raise_low(int s, double bound) { size(s).low = std::max(size(s).low, bound); }

Limits Incumbent::limits() const {
  Limits limits;
  limits.most[kLoss] = problem_.max_loss;
  limits.most[kSeconds] = problem_.max_latency_s;
  for (std::size_t a = 0; a < problem_.asides.size(); ++a) {
    const Aside& aside = problem_.asides[a];
    limits.most[kAside + a] = std::min(aside.max_s - aside.fixed_s, aside.latency_limit_s);
    // Its stages and links are limited where its seconds are.
    if (aside.limits()) limits.most[kAside + a] = std::min(limits.most[kAside + a], kLongest);
  }
  return limits;
}

KnownPlan Incumbent::known(int s, const Plan& plan, const Score& score) const {
  KnownPlan known;
  bool on_data = false;
  for (const Stage& stage : plan.stages) {
    known.classes.push_back(size(s).instance.class_of(stage.host));
    on_data = on_data || stage.host == problem_.data_host;
  }
  known.amounts[kLoss] = plan.costs.loss;
  known.amounts[kSeconds] = plan.costs.latency_s;
  for (std::size_t a = 0; a < plan.costs.asides.size(); ++a) known.amounts[kAside + a] = plan.costs.asides[a].latency_s;
  known.amounts[kScore] = score.second * plan.costs.latency_s + (on_data ? 0 : score.elsewhere);
  return known;
}

}  // namespace pipeedge
