// Which bottlenecks to ask about: bisection, in which a "yes" lowers the upper bound to what the schedule
// really takes, and a "no" raises the lower one to the next value that a stage or link can cost.
#include "throughput.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "cost_values.hpp"
#include "prices.hpp"
#include "search.hpp"

namespace pipeedge {
namespace {

// The bottlenecks that one effort could not decide about, [low, high]; none where low > high.
struct OpenInterval {
  double low = kInfinity;
  double high = -kInfinity;

  bool empty() const { return low > high; }
  void clear() { *this = {}; }
  void add(double bottleneck) {
    low = std::min(low, bottleneck);
    high = std::max(high, bottleneck);
  }
  // Leaves out what has been decided since.
  void trim(const Incumbent& best) {
    low = std::max(low, best.low());
    if (high >= best.high() || empty()) clear();
  }
};

class BottleneckSearch {
 public:
  BottleneckSearch(const Instance& instance, const Clock& clock, Feasibility& feasibility, Incumbent& best)
      : instance_(instance), clock_(clock), feasibility_(feasibility), best_(best) {}

  void run() {
    for (const Effort& effort : kEfforts) {
      narrow(effort);
      if (best_.proven() || clock_.expired()) return;
    }
  }

 private:
  // Bisection with one effort.
  void narrow(const Effort& effort) {
    OpenInterval open;
    bool above = true;            // ask above the open interval and below it in turn
    while (!best_.proven() && !clock_.expired()) {
      std::optional<double> target;
      if (open.empty()) {
        target = between(best_.low(), best_.high(), 0);
        if (!target) {            // no cost lies below the upper bound: it is the optimum
          best_.close();
          return;
        }
      } else {
        for (int side = 0; side < 2 && !target; ++side, above = !above) {
          target = above ? between(std::nextafter(loosened(open.high), kInfinity), best_.high(), effort.resolution)
                         : between(best_.low(), open.low, effort.resolution);
        }
        if (!target) return;
      }
      Verdict verdict = feasibility_.ask(*target, instance_.max_stages(), effort);
      switch (verdict.answer) {
        case Answer::kYes: best_.improve(std::move(verdict.path)); break;
        case Answer::kNo: best_.raise_low(verdict.next_bottleneck); break;
        case Answer::kOpen: open.add(*target); break;
      }
      open.trim(best_);
    }
  }

  // A bottleneck in [low, high) that splits the values in question; none when there is no such value
  // or the two are closer than the resolution.
  std::optional<double> between(double low, double high, double resolution) const {
    if (!(high > loosened(low)) || high - low <= resolution * high) return std::nullopt;
    if (high > 1.01 * low) return low > high * 1e-6 ? std::sqrt(low) * std::sqrt(high) : high / 8;
    return median_cost(instance_, low, high);
  }

  const Instance& instance_;
  const Clock& clock_;
  Feasibility& feasibility_;
  Incumbent& best_;
};

// Among the schedules with the best bottleneck, the fewest hosts.
void minimise_stages(const Instance& instance, const Clock& clock, Feasibility& feasibility, Incumbent& best) {
  const Network network(instance, best.high(), Purpose::kFeasibility);
  int fewest = network.min_stages(0);
  while (fewest < best.size() && !clock.expired()) {
    const int target = (fewest + best.size() - 1) / 2;
    Verdict verdict = feasibility.ask(network, target, kTieEffort);
    if (verdict.answer == Answer::kYes) {
      best.prefer(std::move(verdict.path));
    } else {
      fewest = target + 1;
    }
  }
}

// Among the schedules with the best bottleneck and as many stages, the least latency. `reluctance`: seconds by
// which every schedule without a stage on the data host is made to seem longer.
class LatencyTie {
 public:
  LatencyTie(const Instance& instance, const Clock& clock, Incumbent& best, double reluctance)
      : instance_(instance), clock_(clock), best_(best), reluctance_(reluctance) {}

  void run() {
    PricingTask task;
    task.max_stages = best_.size();
    task.cutoff = latency_of(best_.path());
    const Network network(instance_, best_.high(), Purpose::kLatency, task.cutoff, reluctance_);
    task.precision = kTieEffort.precision;
    task.known = &best_.path();
    Pricer pricer(network, task, clock_);
    pricer.advance(max_rounds(network));
    if (pricer.found() && latency_of(*pricer.found()) < task.cutoff) best_.prefer(*pricer.found());
    if (!pricer.excluded()) widen(network, pricer.best(), task.max_stages);
  }

 private:
  // Narrow first: each schedule found brings the cutoff down for the wider search after it.
  void widen(const Network& network, const Prices& prices, int max_stages) {
    SearchTask task;
    task.max_stages = max_stages;
    task.max_work = kTieEffort.work;
    for (task.width = 10; task.width <= kTieEffort.width && !clock_.expired(); task.width *= 5) {
      task.cutoff = latency_of(best_.path());
      SearchResult found = search(network, {prices}, task, clock_);
      if (found.found) best_.prefer(std::move(*found.found));
      if (found.complete) break;
    }
  }

  double latency_of(const Path& path) const {
    return costs_of(instance_, path).latency_s + (uses_data_host(instance_, path) ? 0 : reluctance_);
  }

  const Instance& instance_;
  const Clock& clock_;
  Incumbent& best_;
  const double reluctance_;
};

// Among schedules as good and of as many stages, one with a stage on the data host: to have none costs more than
// any difference in latency, as no stage or link takes longer than the bottleneck.
void prefer_data_host(const Instance& instance, const Clock& clock, Incumbent& best) {
  if (instance.data_class() == -1 || best.on_data_host() || clock.expired()) return;
  const double reluctance = best.high() > 0 ? (2.0 * best.size() + 2) * best.high() : 1;
  LatencyTie(instance, clock, best, reluctance).run();
}

}  // namespace

void maximise_throughput(const Instance& instance, const Clock& clock, Feasibility& feasibility, Incumbent& best) {
  BottleneckSearch(instance, clock, feasibility, best).run();
  if (!best.proven()) return;
  minimise_stages(instance, clock, feasibility, best);
  LatencyTie(instance, clock, best, 0).run();
  prefer_data_host(instance, clock, best);
}

}  // namespace pipeedge
