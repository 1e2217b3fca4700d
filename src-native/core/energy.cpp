// The objective kEnergy: plans with the fewest joules an item.
//
// With one price for all, energy adds up along a plan, but for one factor: hosts that wait do so for the period,
// which is that of the slowest stage or link.
//
//   joules(plan)  =  sum of (busy_w - idle_w) * seconds  +  period * sum of idle_w
//
// Were the period t, this would be a sum over stages, which the network's score can have. So periods are divided
// into spans. Plans within the end of a span, with the energy that they would have at its beginning, bound all plans
// whose period lies in it:
//
//        low          period of the plan found                        high
//   ------|--------------------|--------------------------|-------------|----->  period
//         joules at `low`  <=  joules of the plan: divide here and in the middle, ask about the parts
//
// A part with no plan below the best one is done; so is one whose plans all have the period at its beginning.
// Parts begin at times that a stage or link takes, of which there are finitely many.
#include <algorithm>
#include <cmath>
#include <utility>

#include "objectives.hpp"

namespace pipeedge {
namespace {

class EnergySearch {
 public:
  explicit EnergySearch(Incumbent& incumbent) : incumbent_(incumbent) {
    for (int s = 0; s < incumbent.sizes(); ++s) {
      const Span span = whole(s);
      if (span.low_s <= loosened(span.high_s)) open_.push_back(span);
    }
    state_bounds();
  }

  // Asks about all spans that are open, with one effort.
  void narrow(const Effort& effort) {
    const auto dearer = [](const Span& a, const Span& b) { return a.bound > b.bound; };
    std::vector<Span> queue = std::exchange(open_, {});
    std::make_heap(queue.begin(), queue.end(), dearer);
    while (!queue.empty()) {
      std::pop_heap(queue.begin(), queue.end(), dearer);
      const Span span = queue.back();
      queue.pop_back();
      if (span.bound >= just_below(incumbent_.best().value)) continue;
      if (incumbent_.clock().expired()) {
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

  // The smallest loss of plans that are no slower and take no more energy.
  void break_ties() {
    const Plan& best = incumbent_.best();
    const Size& size = incumbent_.size(incumbent_.best_size());
    if (!size.instance.loses()) return;
    Limits limits = limits_at(size, best.costs.period_s, best.costs.period_s, *best.costs.joules);
    limits.most[kLoss] = std::min(limits.most[kLoss], best.costs.loss);
    lower(incumbent_, limits, kLoss, size.instance.max_stages());
  }

 private:
  struct Span {
    int size = 0;      // index of its microbatch size
    double low_s = 0;  // a plan's period is between these
    double high_s = 0;
    double bound = 0;  // joules an item that no such plan is below
  };

  // All periods of a microbatch size. No layer takes less time or energy than in its best mode.
  Span whole(int s) const {
    const Instance& instance = incumbent_.size(s).instance;
    double joules = 0;
    for (std::size_t l = 0; l < static_cast<std::size_t>(instance.layers()); ++l) {
      double least = kInfinity;
      for (const Mode& mode : instance.modes()) {
        least = std::min(least, busy_joules(*mode.type, mode.type->bids() ? 0 : mode.type->time_s[l]));
      }
      joules += least;
    }
    const bool bids = std::any_of(instance.modes().begin(), instance.modes().end(),
                                  [](const Mode& mode) { return mode.type->bids(); });
    const double low_s = bids ? instance.data().floor_s() : instance.least_period();
    const double wanted = incumbent_.options().min_items_per_s;
    return {s, low_s, wanted > 0 ? instance.batch_size() / wanted : kInfinity,
            (joules + instance.data().joules(low_s)) / instance.batch_size()};
  }

  // Limits for plans up to a period, which at another one would take so many joules.
  Limits limits_at(const Size& size, double longest_s, double period_s, double joules) const {
    Limits limits = incumbent_.limits();
    limits.period_s = longest_s;
    limits.score.joule = 1;
    limits.score.period_s = period_s;
    limits.most[kScore] = joules - size.instance.data().joules(period_s);
    return limits;
  }

  // Is there a plan within the end of the span that would take so many joules an item at its beginning?
  Verdict ask(const Span& span, double joules, const Effort& effort) const {
    Size& size = incumbent_.size(span.size);
    const Limits limits = limits_at(size, span.high_s, span.low_s, joules * size.batch_size);
    Verdict none;
    none.answer = Answer::kNo;
    return limits.most[kScore] < 0 ? none : size.feasibility.ask(limits, effort, kScore);
  }

  // Returns the parts of a span to ask about next. What this effort cannot decide stays open.
  std::vector<Span> settle(Span span, const Effort& effort) {
    Verdict verdict = ask(span, just_below(incumbent_.best().value), effort);
    if (verdict.answer == Answer::kOpen && incumbent_.best_size() >= 0) {
      const double middle = (span.bound + incumbent_.best().value) / 2;
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
    const double period_s = incumbent_.costs_of(stages_of(incumbent_.size(span.size).instance, verdict.path)).period_s;
    const bool better = incumbent_.improve(span.size, verdict.path);
    if (period_s > loosened(span.low_s)) return parts(span, period_s);
    // At the beginning of the span, its plans have the energy that was asked for.
    return better ? std::vector<Span>{span} : std::vector<Span>{};
  }

  // Divides a span at the period of a plan, and in the middle.
  std::vector<Span> parts(const Span& span, double period_s) const {
    std::vector<double> cuts{period_s};
    if (std::isfinite(span.high_s)) cuts.push_back(std::sqrt(span.low_s * span.high_s));
    std::sort(cuts.begin(), cuts.end());
    std::vector<Span> found;
    Span part = span;
    for (const double cut : cuts) {
      part.high_s = just_below(cut);
      if (part.low_s <= loosened(part.high_s)) found.push_back(part);
      part.low_s = std::max(part.low_s, next_period(span.size, part.high_s));
    }
    part.high_s = span.high_s;
    if (part.low_s <= loosened(part.high_s)) found.push_back(part);
    return found;
  }

  // The shortest period above another one that some stage or link determines; infinite if there is none.
  double next_period(int s, double period_s) const {
    Limits limits;
    limits.period_s = period_s;
    return Network(incumbent_.size(s).instance, limits).next_period();
  }

  void state_bounds() {
    for (int s = 0; s < incumbent_.sizes(); ++s) incumbent_.size(s).low = incumbent_.best().value;
    for (const Span& span : open_) {
      Size& size = incumbent_.size(span.size);
      size.low = std::min(size.low, span.bound);
    }
  }

  Incumbent& incumbent_;
  std::vector<Span> open_;
};

}  // namespace

void minimise_energy(Incumbent& incumbent) {
  EnergySearch search(incumbent);
  for (const Effort& effort : kEfforts) {
    search.narrow(effort);
    if (incumbent.proven() || incumbent.clock().expired()) break;
  }
  if (incumbent.best_size() < 0) return;
  search.break_ties();
  incumbent.widen_links();
}

}  // namespace pipeedge
