// The objective kLatency: prices and the label search bound and find latencies directly; the period is limited only to
// have few stages to choose from at first, and to break ties.
#include <algorithm>
#include <limits>
#include <utility>

#include "objectives.hpp"
#include "search.hpp"

namespace pipeedge {
namespace {

class LatencySearch {
 public:
  LatencySearch(Incumbent& incumbent, int s) : incumbent_(incumbent), s_(s), size_(incumbent.size(s)) {}

  // With the period limited there are few stages to choose from. Each limit yields a plan that rules out most of the
  // stages which the next one would add.
  void glance() {
    for (double limit = size_.known.costs.period_s; limit < best() && !done(); limit *= 3) {
      const Network network = within(limit);
      find(network, kGlance, 30);
    }
  }

  // Looks for quicker plans, and for a bound.
  void narrow(const Effort& effort) {
    if (size_.known.stages.empty() && !find_known(effort)) return;
    const Network network = within(kInfinity);
    Least found = find(network, effort, max_rounds(network));
    incumbent_.raise_low(s_, found.exact ? best() : std::min(found.bound, best()));
    if (!found.prices.of_resource.empty()) memory_.remember(network, found.prices);
  }

  bool done() const { return incumbent_.closed(s_) || incumbent_.clock().expired(); }

  // Among the plans as quick: the least loss, the shortest period, the fewest hosts, and a stage on the data host.
  void break_ties() {
    const Plan& plan = incumbent_.best();
    Limits limits = incumbent_.limits();
    limits.most[kSeconds] = best() + 2 * kRelativeTolerance * best();
    if (size_.instance.loses()) {
      lower(incumbent_, limits, kLoss, size_.instance.max_stages());
      limits.most[kLoss] = plan.costs.loss;
    }
    limits.period_s = shortest_period(limits);
    const Network network(size_.instance, limits);
    while (plan.size() > 1 && !incumbent_.clock().expired() && prefer_any(network, plan.size() - 1, kSeconds)) {}
    if (size_.instance.data_class() == -1 || incumbent_.on_data_host() || incumbent_.clock().expired()) return;
    // With the reluctance, no plan without a stage on the data host is within the limit, and one with such a stage is
    // only if its latency is, however many stages it has. The reluctance need hardly exceed the tolerance; a larger
    // one would loosen the bounds, because their paths may use the data host repeatedly.
    limits.score.second = 1;
    limits.score.elsewhere = 8 * kRelativeTolerance * best() + std::numeric_limits<double>::min();
    limits.most[kScore] = limits.most[kSeconds];
    limits.most[kSeconds] = kInfinity;
    prefer_any(Network(size_.instance, limits), plan.size(), kScore);
  }

 private:
  double best() const { return incumbent_.best().value; }

  Limits limits(double period_s) const {
    Limits limits = incumbent_.limits();
    limits.most[kSeconds] = std::min(limits.most[kSeconds], just_below(best()));
    limits.period_s = period_s;
    return limits;
  }
  Network within(double period_s) const { return {size_.instance, limits(period_s), kSeconds}; }

  // A first plan of this microbatch size that is quicker than the best of all, to start from.
  bool find_known(const Effort& effort) {
    const Verdict verdict = size_.feasibility.ask(limits(kInfinity), effort);
    if (verdict.answer == Answer::kYes) incumbent_.improve(s_, verdict.path);
    if (verdict.answer == Answer::kNo) incumbent_.raise_low(s_, best());
    return verdict.answer == Answer::kYes;
  }

  Least find(const Network& network, const Effort& effort, int rounds) {
    const KnownPlan known = incumbent_.known(s_, size_.known);
    Least found = find_least(network, kSeconds, known, just_below(best()), size_.instance.max_stages(), effort,
                             incumbent_.clock(), rounds);
    if (found.better) incumbent_.improve(s_, *found.better);
    return found;
  }

  // The shortest period of a plan within the limits.
  double shortest_period(Limits limits) {
    double low = 0;
    double high = incumbent_.best().costs.period_s;
    if (incumbent_.problem().returns()) return high;  // which is a part of the latency
    while (high > loosened(low) && !incumbent_.clock().expired()) {
      const std::optional<double> middle = middle_period(size_.instance, low, high);
      if (!middle) break;
      limits.period_s = *middle;
      const Network network(size_.instance, limits);
      if (prefer_any(network, size_.instance.max_stages(), kSeconds)) {
        high = incumbent_.best().costs.period_s;
      } else {
        low = network.next_period();
      }
    }
    return high;
  }

  // Looks for a plan within the limits of a network, by the prices that led to the quickest.
  bool prefer_any(const Network& network, int max_stages, Amount amount) {
    SearchTask task;
    task.max_stages = max_stages;
    task.width = kTieEffort.width;
    task.max_work = kTieEffort.work;
    const Prices prices =
        memory_.of_class.empty() ? amount_prices(network, amount) : memory_.prices_for(network, amount);
    const SearchResult found = search(network, {prices}, task, incumbent_.clock());
    if (found.found) incumbent_.prefer(*found.found);
    return found.found.has_value();
  }

  Incumbent& incumbent_;
  const int s_;
  Size& size_;
  PriceMemory memory_;
};

}  // namespace

void minimise_latency(Incumbent& incumbent) {
  std::vector<LatencySearch> searches;
  for (int s = 0; s < incumbent.sizes(); ++s) {
    searches.emplace_back(incumbent, s);
    if (incumbent.best_size() < 0 && find_any(incumbent, s) == Answer::kYes) searches.back().glance();
  }
  for (const Effort& effort : kEfforts) {
    for (LatencySearch& one : searches) {
      if (incumbent.best_size() >= 0 && !one.done()) one.narrow(effort);
    }
    if (incumbent.proven() || incumbent.clock().expired()) break;
  }
  if (incumbent.best_size() >= 0 && incumbent.proven() && !incumbent.clock().expired()) {
    searches[static_cast<std::size_t>(incumbent.best_size())].break_ties();
  }
}

}  // namespace pipeedge
