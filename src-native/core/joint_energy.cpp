#include "joint_energy.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

JointEnergy::JointEnergy(const JointProblem& problem, const Options& options, const Clock& clock,
                         std::vector<JointSize>& sizes, JointBest& best)
    : problem_(problem), options_(options), clock_(clock), sizes_(sizes), best_(best) {
  for (int s = 0; s < static_cast<int>(sizes.size()); ++s) {
    const Span span = whole(s);
    if (span.low_s <= with_tolerance(span.high_s)) open_.push_back(span);
  }
  state_bounds();
}

const JointInstance& JointEnergy::instance(int size) const { return sizes_[at(size)].feasibility->instance(); }

// All periods of a microbatch size. No layer takes less time or energy than in its best mode.
JointEnergy::Span JointEnergy::whole(int size) const {
  const JointInstance& instance = this->instance(size);
  const double batch_size = instance.batch_size();
  double longest_s = instance.data().work.floor_s();
  double joules = 0;
  for (int l = 0; l < instance.layers(); ++l) {
    double least_s = kInfinity;
    double least_joules = kInfinity;
    for (const Mode& mode : instance.modes()) {
      const DeviceType& type = instance.costs(mode).types[at(mode.type)];
      const double seconds = type.bids() ? 0 : type.time_s[at(l)];
      least_s = std::min(least_s, seconds);
      least_joules = std::min(least_joules, busy_joules(type, seconds));
    }
    longest_s = std::max(longest_s, least_s);
    joules += least_joules;
  }
  const double wanted = options_.min_items_per_s;
  return {size, longest_s, wanted > 0 ? batch_size / wanted : kInfinity,
          (joules + instance.data().joules(longest_s)) / batch_size};
}

// Is there a plan within the end of the span that would take so many joules an item at its beginning?
JointVerdict JointEnergy::ask(const Span& span, double joules, const Effort& effort) const {
  const JointInstance& instance = this->instance(span.size);
  JointLimits limits;
  limits.period_s = span.high_s;
  limits.most[kLoss] = problem_.max_loss;
  limits.most[kSeconds] = problem_.max_latency_s;
  limits.most[kScore] = joules * instance.batch_size() - instance.data().joules(span.low_s);
  Score score;
  score.joule = 1;
  score.period_s = span.low_s;
  if (limits.most[kScore] < 0) {
    JointVerdict none;
    none.answer = Answer::kNo;
    return none;
  }
  return sizes_[at(span.size)].feasibility->ask(limits, score, kScore, effort);
}

void JointEnergy::narrow(const Effort& effort) {
  const auto dearer = [](const Span& a, const Span& b) { return a.bound > b.bound; };
  std::vector<Span> queue = std::exchange(open_, {});
  std::make_heap(queue.begin(), queue.end(), dearer);
  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), dearer);
    const Span span = queue.back();
    queue.pop_back();
    if (span.bound >= just_below(best_.value)) continue;
    if (clock_.expired()) {
      open_.push_back(span);
      continue;
    }
    for (const Span& part : settle(span, effort)) {
      queue.push_back(part);
      std::push_heap(queue.begin(), queue.end(), dearer);
    }
  }
  state_bounds();
}

// Returns the parts of a span to ask about next. What this effort cannot decide stays open.
std::vector<JointEnergy::Span> JointEnergy::settle(Span span, const Effort& effort) {
  JointVerdict verdict = ask(span, just_below(best_.value), effort);
  if (verdict.answer == Answer::kOpen && best_.size >= 0) {
    const double middle = (span.bound + best_.value) / 2;
    verdict = ask(span, middle, effort);
    if (verdict.answer == Answer::kNo) {
      span.bound = middle;
      verdict.answer = Answer::kOpen;
    }
  }
  if (verdict.answer == Answer::kNo) return {};
  if (verdict.answer == Answer::kOpen) {
    open_.push_back(span);
    return {};
  }
  const JointCosts costs = evaluate(problem_, verdict.stages);
  const bool better = improve(span.size, verdict.stages, costs);
  if (costs.period_s > with_tolerance(span.low_s)) return parts(span, costs.period_s);
  // At the beginning of the span, its plans have the energy that was asked for.
  return better ? std::vector<Span>{span} : std::vector<Span>{};
}

// Divides a span at the period of a plan, and in the middle.
std::vector<JointEnergy::Span> JointEnergy::parts(const Span& span, double period_s) const {
  std::vector<double> cuts{period_s};
  if (std::isfinite(span.high_s)) cuts.push_back(std::sqrt(span.low_s * span.high_s));
  std::sort(cuts.begin(), cuts.end());
  std::vector<Span> found;
  Span part = span;
  for (const double cut : cuts) {
    part.high_s = just_below(cut);
    if (part.low_s <= with_tolerance(part.high_s)) found.push_back(part);
    part.low_s = std::max(part.low_s, sizes_[at(span.size)].feasibility->next_period(part.high_s));
  }
  part.high_s = span.high_s;
  if (part.low_s <= with_tolerance(part.high_s)) found.push_back(part);
  return found;
}

bool JointEnergy::improve(int size, const std::vector<JointStage>& stages, const JointCosts& costs) {
  const double value = *costs.joules / instance(size).batch_size();
  if (!(value < best_.value)) return false;
  best_ = {stages, costs, value, size};
  return true;
}

void JointEnergy::state_bounds() {
  for (JointSize& size : sizes_) size.low = best_.value;
  for (const Span& span : open_) sizes_[at(span.size)].low = std::min(sizes_[at(span.size)].low, span.bound);
}

}  // namespace pipeedge
