// The objective kThroughput: bisection on the period, in which a plan lowers the upper bound to what it really takes,
// and a "no" raises the lower one to the next time that a stage or link can take.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "objectives.hpp"

namespace pipeedge {
namespace {

// The periods that one effort could not decide about, [low, high]; none where low > high.
struct OpenInterval {
  double low = kInfinity;
  double high = -kInfinity;

  bool empty() const { return low > high; }
  void clear() { *this = {}; }
  void add(double period) {
    low = std::min(low, period);
    high = std::max(high, period);
  }
  // Leaves out what has been decided since.
  void trim(double decided_low, double decided_high) {
    low = std::max(low, decided_low);
    if (high >= decided_high || empty()) clear();
  }
};

// What plans with a period keep: the latency is at most that of the microbatches under way.
Limits period_limits(const Incumbent& incumbent, const Size& size, double period_s) {
  Limits limits = incumbent.limits();
  limits.period_s = period_s;
  if (incumbent.problem().returns()) {
    const double microbatches = incumbent.problem().most_items / size.batch_size;
    limits.most[kSeconds] = std::min(limits.most[kSeconds], period_s * microbatches);
  }
  return limits;
}

class PeriodSearch {
 public:
  PeriodSearch(Incumbent& incumbent, int s) : incumbent_(incumbent), s_(s), size_(incumbent.size(s)) {}

  // Bisection with one effort.
  void narrow(const Effort& effort) {
    OpenInterval open;
    bool above = true;  // ask above the open interval and below it in turn
    // Whether this size can do better at all comes first, if the best plan has another one.
    bool challenge = incumbent_.best_size() != s_;
    while (!incumbent_.closed(s_) && !incumbent_.clock().expired()) {
      std::optional<double> target;
      if (std::exchange(challenge, false)) {
        target = just_below(high());
      } else if (open.empty()) {
        target = between(low(), high(), 0);
        if (!target) {  // no time lies below the upper bound: it is the optimum
          incumbent_.raise_low(s_, incumbent_.best().value);
          return;
        }
      } else {
        for (int side = 0; side < 2 && !target; ++side, above = !above) {
          target = above ? between(std::nextafter(loosened(open.high), kInfinity), high(), effort.resolution)
                         : between(low(), open.low, effort.resolution);
        }
        if (!target) return;
      }
      const Limits limits = period_limits(incumbent_, size_, *target);
      const Verdict verdict = size_.feasibility.ask(limits, effort);
      switch (verdict.answer) {
        case Answer::kYes: incumbent_.improve(s_, verdict.path); break;
        case Answer::kNo: incumbent_.raise_low(s_, next_period(verdict, *target) / size_.batch_size); break;
        case Answer::kOpen: open.add(*target); break;
      }
      open.trim(low(), high());
    }
  }

 private:
  double low() const { return size_.low * size_.batch_size; }
  double high() const { return incumbent_.best().value * size_.batch_size; }

  // A period in [low, high) that splits the values in question; none when there is no such value
  // or the two are closer than the resolution.
  std::optional<double> between(double low, double high, double resolution) const {
    if (!(high > loosened(low)) || high - low <= resolution * high) return std::nullopt;
    if (high > 1.01 * low) return low > high * 1e-6 ? std::sqrt(low) * std::sqrt(high) : high / 8;
    // Where a period may be a part of a latency, which is a sum, any value may be the optimum.
    if (incumbent_.problem().returns())
      return std::exchange(halves_, !halves_) ? low + (high - low) / 2 : just_below(high);
    return middle_period(size_.instance, low - kRelativeTolerance * low, high);
  }

  // No plan with a period below this is left after a "no".
  double next_period(const Verdict& verdict, double asked) const {
    return incumbent_.problem().returns() ? std::min(verdict.next_period, loosened(asked)) : verdict.next_period;
  }

  Incumbent& incumbent_;
  const int s_;
  Size& size_;
  mutable bool halves_ = false;
};

const Effort& tie_effort(const Instance& instance) { return instance.loses() ? kLossyTieEffort : kTieEffort; }

// Among the plans within limits that the best one keeps, the fewest hosts.
void minimise_stages(Incumbent& incumbent, const Limits& limits) {
  Size& size = incumbent.size(incumbent.best_size());
  const Network network(size.instance, limits);
  int fewest = network.min_stages(0);
  incumbent.set_fewest_stages(fewest);
  while (fewest < incumbent.best().size() && !incumbent.clock().expired()) {
    const int target = (fewest + incumbent.best().size() - 1) / 2;
    const Verdict verdict = size.feasibility.ask(network, target, tie_effort(size.instance));
    if (verdict.answer == Answer::kYes) {
      incumbent.prefer(verdict.path);
    } else {
      fewest = target + 1;
      if (verdict.answer == Answer::kNo) incumbent.set_fewest_stages(fewest);
    }
  }
}

void break_ties(Incumbent& incumbent) {
  const Instance& instance = incumbent.size(incumbent.best_size()).instance;
  const Plan& best = incumbent.best();
  Limits limits = period_limits(incumbent, incumbent.size(incumbent.best_size()), best.value * instance.batch_size());
  if (instance.loses()) lower(incumbent, limits, kLoss, instance.max_stages());
  limits.most[kLoss] = std::min(limits.most[kLoss], best.costs.loss);
  minimise_stages(incumbent, limits);
  lower(incumbent, limits, kSeconds, best.size());
  if (instance.data_class() == -1 || incumbent.on_data_host() || incumbent.clock().expired()) return;
  // To have no stage on the data host costs more than any difference in latency, as no stage or link takes longer
  // than the period.
  const double period = best.costs.period_s;
  limits.score.second = 1;
  limits.score.elsewhere = period > 0 ? (2.0 * best.size() + 2) * period : 1;
  lower(incumbent, limits, kScore, best.size());
}

}  // namespace

std::optional<double> middle_period(const Instance& instance, double low, double high) {
  std::vector<double> values = instance.periods_between(low, high);
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Answer find_any(Incumbent& incumbent, int s) {
  Size& size = incumbent.size(s);
  const bool throughput = incumbent.options().objective == Objective::kThroughput;
  double low = size.instance.least_period();
  Limits limits = incumbent.limits();
  Verdict verdict;
  const auto ask = [&](double period_s, const Effort& effort) {
    limits.period_s = period_s;
    verdict = size.feasibility.ask(limits, effort);
    if (verdict.answer == Answer::kYes) incumbent.improve(s, verdict.path);
    if (verdict.answer == Answer::kNo) low = std::max(low, verdict.next_period);
  };
  // Networks of a short period are small, so those are asked before the one that holds every stage there is.
  for (double period = 4 * low; period < 1000 * low && verdict.answer != Answer::kYes; period *= 4) {
    ask(period, kEfforts[0]);
    if (std::isinf(low) || incumbent.clock().expired()) break;
  }
  for (const Effort& effort : kEfforts) {
    if (verdict.answer == Answer::kYes || std::isinf(low) || incumbent.clock().expired()) break;
    ask(kInfinity, effort);
    if (verdict.answer == Answer::kNo) low = kInfinity;
  }
  if (std::isinf(low)) incumbent.raise_low(s, kInfinity);
  if (throughput) incumbent.raise_low(s, low / size.batch_size);
  return std::isinf(low) ? Answer::kNo : verdict.answer == Answer::kYes ? Answer::kYes : Answer::kOpen;
}

void maximise_throughput(Incumbent& incumbent) {
  for (int s = 0; s < incumbent.sizes() && incumbent.best_size() < 0; ++s) find_any(incumbent, s);
  for (const Effort& effort : kEfforts) {
    for (int s = 0; s < incumbent.sizes() && incumbent.best_size() >= 0; ++s) PeriodSearch(incumbent, s).narrow(effort);
    if (incumbent.proven() || incumbent.clock().expired()) break;
  }
  if (incumbent.best_size() < 0) return;
  if (incumbent.proven()) break_ties(incumbent);
  incumbent.widen_links();
}

void lower(Incumbent& incumbent, const Limits& limits, Amount amount, int max_stages) {
  if (incumbent.clock().expired()) return;
  const int s = incumbent.best_size();
  const KnownPlan known = incumbent.known(s, incumbent.best(), limits.score);
  Limits within = limits;
  within.most[amount] = std::min(limits.most[amount], known.amounts[amount]);
  const Network network(incumbent.size(s).instance, within, amount);
  const Least found = find_least(network, amount, known, just_below(known.amounts[amount]), max_stages,
                                 tie_effort(incumbent.size(s).instance), incumbent.clock(), max_rounds(network));
  if (found.better) incumbent.prefer(*found.better);
}

void widen_links(const Problem& problem, const LinkTable& links, double period_s, std::vector<Stage>& stages) {
  const auto bits = [&](int w) { return problem.widths[static_cast<std::size_t>(w)].bits; };
  std::vector<int> widths;
  for (int w = 0; w < static_cast<int>(problem.widths.size()); ++w) widths.push_back(w);
  std::stable_sort(widths.begin(), widths.end(), [&](int a, int b) {
    return bits(a) != bits(b) && (bits(a) == 0 || (bits(b) != 0 && bits(a) > bits(b)));
  });
  Costs now = evaluate(problem, links, stages);
  for (std::size_t s = 0; s + 1 < stages.size(); ++s) {
    const int before = stages[s].width;
    for (const int wider : widths) {
      if (wider == before) break;
      if (!useful(problem.setting(stages[s].setting), bits(wider))) continue;
      stages[s].width = wider;
      Costs costs = evaluate(problem, links, stages);
      if (costs.period_s <= loosened(period_s) && costs.loss <= now.loss && costs.latency_s <= problem.max_latency_s &&
          keeps_asides(problem, costs)) {
        now = std::move(costs);
        break;
      }
      stages[s].width = before;
    }
  }
}

}  // namespace pipeedge
