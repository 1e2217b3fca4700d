// Prices and the label search bound and find latencies directly; the bottleneck is limited only to have few
// stages to choose from at first, and to break ties.
#include "latency.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "cost_values.hpp"
#include "effort.hpp"
#include "feasibility.hpp"
#include "prices.hpp"
#include "search.hpp"

namespace pipeedge {
namespace {

constexpr Effort kGlance = {6, 200'000'000, 1e-2, 0};

class LatencySearch {
 public:
  LatencySearch(const Instance& instance, const Clock& clock, Incumbent& best)
      : instance_(instance), clock_(clock), best_(best) {}

  void run() {
    // With the bottleneck limited there are few stages to choose from. Each limit yields a schedule that
    // rules out most of the stages which the next one would add.
    for (double limit = best_.costs().bottleneck_s; limit < best_.high() && !best_.proven(); limit *= 3) {
      const Network network(instance_, limit, Purpose::kLatency, best_.high());
      Prices prices;
      quicken(network, kGlance, 30, prices);
      if (clock_.expired()) return;
    }
    for (const Effort& effort : kEfforts) {
      const Network network(instance_, kInfinity, Purpose::kLatency, best_.high());
      Prices prices;
      best_.raise_low(quicken(network, effort, max_rounds(network), prices));
      if (best_.proven() && !clock_.expired()) break_ties(network, prices);
      if (best_.proven() || clock_.expired()) return;
    }
  }

 private:
  // Looks for schedules quicker than the best so far; returns a lower bound of the network's latencies.
  double quicken(const Network& network, const Effort& effort, int rounds, Prices& prices) {
    PricingTask task;
    task.max_stages = instance_.max_stages();
    task.cutoff = best_.high();
    task.precision = effort.precision;
    task.known = &best_.path();
    Pricer pricer(network, task, clock_);
    pricer.advance(rounds);
    prices = pricer.best();
    if (pricer.found()) best_.improve(*pricer.found());
    if (pricer.excluded()) return best_.high();
    SearchTask search_task;
    search_task.max_stages = instance_.max_stages();
    search_task.max_work = effort.work;
    for (const int width : {std::min(kNarrow, effort.width), effort.width}) {
      search_task.cutoff = best_.high();
      search_task.width = width;
      SearchResult result = search(network, {prices}, search_task, clock_);
      if (result.found) best_.improve(std::move(*result.found));
      if (result.complete) return best_.high();
      if (clock_.expired() || width == effort.width) break;
    }
    return pricer.bound();
  }

  void break_ties(const Network& widest, const Prices& prices) {
    memory_.remember(widest, prices);
    const double bottleneck = minimise_bottleneck();
    const Network network(instance_, bottleneck, Purpose::kLatency, quick_enough());
    while (best_.size() > 1 && !clock_.expired() && as_quick(network, best_.size() - 1, quick_enough())) {
    }
    if (instance_.data_class() == -1 || best_.on_data_host() || clock_.expired()) return;
    // With the reluctance, no schedule without a stage on the data host is within the limit, and one with such a
    // stage is only if its latency is, however many stages it has. The reluctance need hardly exceed the tolerance;
    // a larger one would loosen the bounds, because their paths may use the data host repeatedly.
    const double limit = quick_enough();
    const double reluctance = 2 * (limit - best_.high());
    as_quick(Network(instance_, bottleneck, Purpose::kLatency, limit, reluctance), best_.size(), limit);
  }

  // The lowest bottleneck of a schedule that is as quick.
  double minimise_bottleneck() {
    double low = 0;
    double high = best_.costs().bottleneck_s;
    while (high > loosened(low) && !clock_.expired()) {
      const std::optional<double> middle = median_cost(instance_, low, high);
      if (!middle) break;
      const Network network(instance_, *middle, Purpose::kLatency, quick_enough());
      if (as_quick(network, instance_.max_stages(), quick_enough())) {
        high = best_.costs().bottleneck_s;
      } else {
        low = network.next_bottleneck();
      }
    }
    return high;
  }

  // A schedule exactly as quick as the best counts, also where everything takes no time.
  double quick_enough() const {
    return best_.high() + 4 * kRelativeTolerance * best_.high() + std::numeric_limits<double>::min();
  }

  // Looks for a schedule within a latency in a narrower network.
  bool as_quick(const Network& network, int stages, double latency) {
    SearchTask task;
    task.max_stages = stages;
    task.cutoff = latency;
    task.width = kTieEffort.width;
    task.max_work = kTieEffort.work;
    SearchResult found = search(network, {memory_.prices_for(network)}, task, clock_);
    if (found.found) best_.prefer(std::move(*found.found));
    return found.found.has_value();
  }

  const Instance& instance_;
  const Clock& clock_;
  Incumbent& best_;
  PriceMemory memory_;
};

}  // namespace

void minimise_latency(const Instance& instance, const Clock& clock, Incumbent& best) {
  LatencySearch(instance, clock, best).run();
}

}  // namespace pipeedge
