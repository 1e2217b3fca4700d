// The strategy: which bottlenecks to ask about, and how hard to try.
//
//   0 ... lo | proven: no schedule is faster | ? | hi = the best schedule found ...
//
// Each question "is there a schedule with bottleneck <= T?" is put to the prices first (prices.hpp),
// which may prove "no" or come across a "yes", then to the label search (search.hpp), which answers
// exactly unless it had to drop labels. A "yes" lowers hi to what the schedule really takes, a "no"
// raises lo to the next value that a stage or link can cost. What stays open is asked again with a
// wider search. Effort is counted in work, not in seconds, so that equal problems get equal answers;
// the clock only ends it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "clock.hpp"
#include "instance.hpp"
#include "network.hpp"
#include "prices.hpp"
#include "problem.hpp"
#include "search.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

struct Effort {
  int width;
  std::int64_t work;
  double precision;               // of the prices
  double resolution;              // bottlenecks closer than this, relatively, are not told apart
};

// From a first impression to all that a patient user would wait for.
constexpr Effort kEfforts[] = {
    {60, 4'000'000, 1e-3, 3e-3},
    {500, 60'000'000, 3e-4, 5e-4},
    {4'000, 1'000'000'000, 1e-4, 5e-5},
    {30'000, 20'000'000'000, 1e-5, 0},
    {200'000, 400'000'000'000, 1e-6, 0},
};
constexpr int kNarrow = 12;       // width of a search that is only a first try
constexpr int kSpreadRounds = 60;
constexpr Effort kGlance = {6, 200'000'000, 1e-2, 0};
constexpr Effort kTieEffort = {2'000, 25'000'000, 1e-6, 0};

enum class Answer { kYes, kNo, kOpen };

struct Verdict {
  Answer answer = Answer::kOpen;
  Path path;
  double next_bottleneck = kInfinity;  // after kNo: the optimum is at least this
};

struct Costs {
  double bottleneck_s = 0;
  double latency_s = 0;
};

Costs measure(const Instance& instance, const Path& path) {
  Costs costs;
  costs.bottleneck_s = instance.data_floor();
  for (std::size_t s = 0; s < path.size(); ++s) {
    const Step& step = path[s];
    double layers_s = 0;
    for (int l = step.first; l < step.last; ++l) layers_s += instance.type(step.cls).time_s[at(l)];
    const double compute = instance.stage_seconds(step.cls, step.first, step.last, layers_s);
    const double in = s == 0 ? instance.link_from_data(step.cls)
                             : instance.link(path[s - 1].cls, step.cls, step.first);
    const double out = s + 1 == path.size() ? instance.link_to_data(step.cls) : 0;
    const double busy = instance.busy_seconds(step.cls, step.first, step.last, layers_s);
    costs.bottleneck_s = std::max({costs.bottleneck_s, busy, in, out});
    costs.latency_s += in + compute + out;
  }
  return costs;
}

class Solver {
 public:
  Solver(const Problem& problem, const Options& options)
      : instance_(problem), options_(options), clock_(options.time_limit_s) {}

  Solution run() {
    Solution solution;
    const Answer any = find_any();
    if (any == Answer::kYes) {
      if (options_.objective == Objective::kThroughput) {
        minimise_bottleneck();
        if (proven()) {
          minimise_stages();
          minimise_latency(kTieEffort, hi_, 0);
          prefer_data_host();
        }
      } else {
        minimise_whole_latency();
      }
      solution.status = proven() ? Status::kOptimal : Status::kBounded;
      solution.stages = stages();
      const Costs costs = measure(instance_, best_);
      solution.bottleneck_s = costs.bottleneck_s;
      solution.latency_s = costs.latency_s;
      solution.objective =
          options_.objective == Objective::kThroughput ? costs.bottleneck_s : costs.latency_s;
      solution.lower_bound = proven() ? solution.objective : std::min(lo_, solution.objective);
    } else {
      solution.status = any == Answer::kNo ? Status::kInfeasible : Status::kUnknown;
      solution.lower_bound = any == Answer::kNo ? kInfinity : lo_;
    }
    solution.elapsed_s = clock_.elapsed_s();
    return solution;
  }

 private:
  // lo_ and hi_ bound the objective; equal up to rounding, the schedule is the optimum.
  bool proven() const { return hi_ <= loosened(lo_); }
  int max_stages() const {
    return std::min(instance_.layers(), static_cast<int>(instance_.problem().hosts.size()));
  }

  // Is there a schedule with at most this bottleneck and number of stages?
  Verdict ask(double bottleneck, int stages, const Effort& effort) {
    const Network network(instance_, bottleneck, Purpose::kFeasibility);
    return ask(network, stages, effort);
  }

  Verdict ask(const Network& network, int stages, const Effort& effort) {
    Verdict verdict;
    verdict.next_bottleneck = network.next_bottleneck();
    PricingTask task;
    task.max_stages = stages;
    task.precision = effort.precision;
    task.guess = guess_.empty() ? nullptr : &guess_;
    Pricer pricer(network, task, clock_);
    // Between rounds of pricing, a narrow search: easy questions need no good prices. Once the prices
    // are as good as they get, wide ones, ordered by prices of several kinds.
    bool more = true;
    for (int rounds = 10, spent = 0; more; rounds *= 2) {
      more = pricer.advance(rounds) && spent < max_rounds(network);
      spent += rounds;
      if (pricer.excluded()) verdict.answer = Answer::kNo;
      if (pricer.found()) accept(*pricer.found(), verdict);
      if (verdict.answer == Answer::kOpen) explore(network, pricer.best(), stages, more, effort, verdict);
      if (verdict.answer != Answer::kOpen) break;
    }
    if (std::isfinite(pricer.bound())) remember(network, pricer.best());
    return verdict;
  }

  void explore(const Network& network, const Prices& bounding, int stages, bool narrow, const Effort& effort,
               Verdict& verdict) {
    SearchTask task;
    task.max_stages = stages;
    task.width = narrow ? kNarrow : effort.width;
    task.max_work = effort.work;
    std::vector<Prices> prices{bounding};
    for (const double sharpness : {0.0, 6.0, 12.0, 24.0, 48.0}) {
      if (sharpness > 0) {
        std::optional<Path> matched;
        prices = {spread_prices(network, sharpness, kSpreadRounds, stages, &matched), bounding};
        if (matched) {
          accept(std::move(*matched), verdict);
          return;
        }
      }
      SearchResult result = search(network, prices, task, clock_);
      if (result.found) {
        accept(std::move(*result.found), verdict);
      } else if (result.complete) {
        verdict.answer = Answer::kNo;
      }
      if (verdict.answer != Answer::kOpen || narrow || clock_.expired()) return;
    }
  }

  static int max_rounds(const Network& network) { return 200 + 5 * network.resources(); }

  static void accept(Path path, Verdict& verdict) {
    verdict.answer = Answer::kYes;
    verdict.path = std::move(path);
  }

  void remember(const Network& network, const Prices& prices) {
    guess_.assign(at(instance_.classes()), 0);
    for (int cut = 0; cut < network.layers(); ++cut) {
      for (const Arc* arc = network.begin(cut); arc != network.end(cut); ++arc) {
        guess_[at(arc->cls)] = prices.of[at(arc->resource)];
      }
    }
  }

  // A first schedule. Networks of a low bottleneck are small, so those are asked before the one that
  // holds every stage there is.
  Answer find_any() {
    double low = slowest_layer();
    Answer answer = Answer::kOpen;
    for (double bottleneck = 4 * low; bottleneck < 1000 * low && answer != Answer::kYes; bottleneck *= 4) {
      Verdict verdict = ask(bottleneck, max_stages(), kEfforts[0]);
      answer = verdict.answer;
      if (answer == Answer::kYes) improve(std::move(verdict.path));
      if (answer == Answer::kNo) low = std::max(low, verdict.next_bottleneck);
      if (std::isinf(low)) return Answer::kNo;
      if (clock_.expired()) break;
    }
    lo_ = options_.objective == Objective::kThroughput ? low : instance_.fastest(0, instance_.layers());
    if (answer == Answer::kYes || clock_.expired()) return answer == Answer::kNo ? Answer::kOpen : answer;
    for (const Effort& effort : kEfforts) {
      Verdict verdict = ask(kInfinity, max_stages(), effort);
      if (verdict.answer == Answer::kYes) improve(std::move(verdict.path));
      if (verdict.answer != Answer::kOpen || clock_.expired()) return verdict.answer;
    }
    return Answer::kOpen;
  }

  void improve(Path path) {
    const Costs costs = measure(instance_, path);
    const double objective =
        options_.objective == Objective::kThroughput ? costs.bottleneck_s : costs.latency_s;
    if (objective < hi_) {
      hi_ = objective;
      best_ = std::move(path);
    }
  }

  // --- throughput -----------------------------------------------------------------------------

  void minimise_bottleneck() {
    for (const Effort& effort : kEfforts) {
      narrow(effort);
      if (proven() || clock_.expired()) return;
    }
  }

  // No layer runs faster than on its fastest class.
  double slowest_layer() const {
    double bound = instance_.data_floor();
    for (int l = 0; l < instance_.layers(); ++l) {
      bound = std::max(bound, instance_.least(l));
    }
    return bound;
  }

  // Bisection with one effort. [open_low, open_high] are the bottlenecks it could not decide about.
  void narrow(const Effort& effort) {
    double open_low = kInfinity;
    double open_high = -kInfinity;
    bool above = true;            // ask above the open interval and below it in turn
    while (!proven() && !clock_.expired()) {
      const bool open = open_high >= open_low;
      std::optional<double> target;
      if (!open) {
        target = between(lo_, hi_, 0);
        if (!target) {            // no cost lies below hi: it is the optimum
          lo_ = hi_;
          return;
        }
      } else {
        for (int side = 0; side < 2 && !target; ++side, above = !above) {
          target = above ? between(std::nextafter(loosened(open_high), kInfinity), hi_, effort.resolution)
                         : between(lo_, open_low, effort.resolution);
        }
        if (!target) return;
      }
      const double bottleneck = *target;
      Verdict verdict = ask(bottleneck, max_stages(), effort);
      switch (verdict.answer) {
        case Answer::kYes:
          improve(std::move(verdict.path));
          break;
        case Answer::kNo:
          lo_ = std::max(lo_, std::min(hi_, verdict.next_bottleneck));
          break;
        case Answer::kOpen:
          open_low = std::min(open_low, bottleneck);
          open_high = std::max(open_high, bottleneck);
          break;
      }
      if (open_low < lo_) open_low = lo_;
      if (open_high >= hi_ || open_low > open_high) {
        open_low = kInfinity;
        open_high = -kInfinity;
      }
    }
  }

  // A bottleneck in [low, high) that splits the values in question; none when there is no such value
  // or the two are closer than the resolution.
  std::optional<double> between(double low, double high, double resolution) const {
    if (!(high > loosened(low)) || high - low <= resolution * high) return std::nullopt;
    if (high > 1.01 * low) return low > high * 1e-6 ? std::sqrt(low) * std::sqrt(high) : high / 8;
    std::vector<double> values = costs_between(low, high);
    if (values.empty()) return std::nullopt;
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  // Every cost of a stage or link in [low, high), clearly below high.
  std::vector<double> costs_between(double low, double high) const {
    std::vector<double> values;
    const auto note = [&](double value) {
      if (value >= low && loosened(value) < high) values.push_back(value);
    };
    for (int cls = 0; cls < instance_.classes(); ++cls) {
      const DeviceType& type = instance_.type(cls);
      const std::vector<double>& mem = weights_on(instance_.problem(), type);
      for (int first = 0; first < instance_.layers(); ++first) {
        double layers_s = 0;
        double weights = 0;
        double activation = 0;
        for (int last = first + 1; last <= instance_.layers(); ++last) {
          layers_s += type.time_s[at(last - 1)];
          weights += mem[at(last - 1)];
          activation = std::max(activation, instance_.activation(cls, last - 1));
          if (!(layers_s < high) || weights + activation > loosened(type.mem_bytes)) break;
          if (instance_.fits(cls, weights + activation, first, last)) {
            note(instance_.busy_seconds(cls, first, last, layers_s));
          }
        }
        note(instance_.link_in(cls, first));
        note(instance_.link_out(cls, first + 1));
      }
    }
    if (instance_.pairwise()) {
      for (int cut = 1; cut < instance_.layers(); ++cut) {
        for (int from = 0; from < instance_.classes(); ++from) {
          for (int to = 0; to < instance_.classes(); ++to) note(instance_.link(from, to, cut));
        }
      }
    }
    return values;
  }

  // Among the schedules with the best bottleneck, the fewest hosts.
  void minimise_stages() {
    const Network network(instance_, hi_, Purpose::kFeasibility);
    int fewest = network.min_stages(0);
    while (fewest < static_cast<int>(best_.size()) && !clock_.expired()) {
      const int target = (fewest + static_cast<int>(best_.size()) - 1) / 2;
      Verdict verdict = ask(network, target, kTieEffort);
      if (verdict.answer == Answer::kYes) {
        best_ = std::move(verdict.path);
      } else {
        fewest = target + 1;
      }
    }
  }

  // --- latency --------------------------------------------------------------------------------

  bool uses_data_host(const Path& path) const {
    return std::any_of(path.begin(), path.end(),
                       [&](const Step& step) { return step.cls == instance_.data_class(); });
  }

  // The latency, and `reluctance` for every stage that is not on the data host.
  double reluctant_latency(const Path& path, double reluctance) const {
    const auto elsewhere = path.size() - (uses_data_host(path) ? 1 : 0);
    return measure(instance_, path).latency_s + reluctance * static_cast<double>(elsewhere);
  }

  // Among schedules as good and of as many stages, one with a stage on the data host: there every other stage
  // costs more than any latency can make up for.
  void prefer_data_host() {
    if (instance_.data_class() == -1 || uses_data_host(best_) || clock_.expired()) return;
    const double stages = static_cast<double>(best_.size());
    minimise_latency(kTieEffort, hi_, hi_ > 0 ? (2 * stages + 2) * hi_ : 1);
  }

  // Among the schedules with at most this bottleneck and the stages of the best, the least latency.
  void minimise_latency(const Effort& effort, double bottleneck, double reluctance) {
    const auto latency_of = [&](const Path& path) { return reluctant_latency(path, reluctance); };
    PricingTask task;
    task.max_stages = static_cast<int>(best_.size());
    task.cutoff = latency_of(best_);
    const Network network(instance_, bottleneck, Purpose::kLatency, task.cutoff, reluctance);
    task.precision = effort.precision;
    task.known = &best_;
    Pricer pricer(network, task, clock_);
    pricer.advance(max_rounds(network));
    double cutoff = task.cutoff;
    if (pricer.found()) {
      const double latency = latency_of(*pricer.found());
      if (latency < cutoff) {
        best_ = *pricer.found();
        cutoff = latency;
      }
    }
    if (pricer.excluded()) return;
    // Narrow first: each schedule found brings the cutoff down for the wider search after it.
    SearchTask search_task;
    search_task.max_stages = task.max_stages;
    SearchResult found;
    for (search_task.width = 10; search_task.width <= effort.width && !clock_.expired(); search_task.width *= 5) {
      search_task.cutoff = latency_of(best_);
      search_task.max_work = effort.work;
      found = search(network, {pricer.best()}, search_task, clock_);
      if (found.found) best_ = *found.found;
      if (found.complete) break;
    }
  }

  void minimise_whole_latency() {
    // With the bottleneck limited there are few stages to choose from. Each limit yields a schedule that
    // rules out most of the stages which the next one would add.
    for (double limit = measure(instance_, best_).bottleneck_s; limit < hi_ && !proven(); limit *= 3) {
      const Network network(instance_, limit, Purpose::kLatency, hi_);
      Prices prices;
      quicken(network, kGlance, 30, prices);
      if (clock_.expired()) return;
    }
    for (const Effort& effort : kEfforts) {
      const Network network(instance_, kInfinity, Purpose::kLatency, hi_);
      Prices prices;
      const double bound = quicken(network, effort, max_rounds(network), prices);
      lo_ = std::max(lo_, std::min(hi_, bound));
      if (proven()) {
        if (!clock_.expired()) break_latency_ties(network, prices);
        return;
      }
      if (clock_.expired()) return;
    }
  }

  // Looks for schedules quicker than the best so far; returns a lower bound of the network's latencies.
  double quicken(const Network& network, const Effort& effort, int rounds, Prices& prices) {
    PricingTask task;
    task.max_stages = max_stages();
    task.cutoff = hi_;
    task.precision = effort.precision;
    task.known = &best_;
    Pricer pricer(network, task, clock_);
    pricer.advance(rounds);
    prices = pricer.best();
    if (pricer.found()) improve(*pricer.found());
    if (pricer.excluded()) return hi_;
    SearchTask search_task;
    search_task.max_stages = max_stages();
    search_task.max_work = effort.work;
    for (const int width : {std::min(kNarrow, effort.width), effort.width}) {
      search_task.cutoff = hi_;
      search_task.width = width;
      SearchResult result = search(network, {prices}, search_task, clock_);
      if (result.found) improve(std::move(*result.found));
      if (result.complete) return hi_;
      if (clock_.expired() || width == effort.width) break;
    }
    return pricer.bound();
  }

  // Among the schedules of least latency, the lowest bottleneck, then the fewest hosts.
  void break_latency_ties(const Network& widest, const Prices& prices) {
    remember(widest, prices);
    double low = 0;
    double high = measure(instance_, best_).bottleneck_s;
    while (high > loosened(low) && !clock_.expired()) {
      std::vector<double> values = costs_between(low, high);
      if (values.empty()) break;
      const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
      std::nth_element(values.begin(), middle, values.end());
      const Network network(instance_, *middle, Purpose::kLatency, quick_enough());
      if (as_quick(network, max_stages(), quick_enough())) {
        high = measure(instance_, best_).bottleneck_s;
      } else {
        low = network.next_bottleneck();
      }
    }
    const Network network(instance_, high, Purpose::kLatency, quick_enough());
    while (best_.size() > 1 && !clock_.expired() &&
           as_quick(network, static_cast<int>(best_.size()) - 1, quick_enough())) {
    }
    if (instance_.data_class() == -1 || uses_data_host(best_) || clock_.expired()) return;
    // One stage less that is not on the data host is worth more than what counts as equally quick.
    const double reluctance = hi_ > 0 ? 1e-3 * hi_ : 1;
    const double limit = quick_enough() + reluctance * static_cast<double>(best_.size() - 1);
    as_quick(Network(instance_, high, Purpose::kLatency, limit, reluctance), static_cast<int>(best_.size()), limit);
  }

  // A schedule exactly as quick as the best counts, also where everything takes no time.
  double quick_enough() const {
    return hi_ + 4 * kRelativeTolerance * hi_ + std::numeric_limits<double>::min();
  }

  // Looks for a schedule within a latency in a narrower network.
  bool as_quick(const Network& network, int stages, double latency) {
    Prices prices;
    for (int r = 0; r < network.resources(); ++r) {
      const double price = guess_[at(network.first_class(r))];
      prices.of.push_back(price);
      prices.budget += price * std::min(network.capacity(r), network.layers());
    }
    price_paths(network, prices, nullptr);
    SearchTask task;
    task.max_stages = stages;
    task.cutoff = latency;
    task.width = kTieEffort.width;
    task.max_work = kTieEffort.work;
    const SearchResult found = search(network, {prices}, task, clock_);
    if (found.found) best_ = *found.found;
    return found.found.has_value();
  }

  // Hosts of a class in the order of the devices file.
  std::vector<Stage> stages() const {
    std::vector<Stage> stages;
    std::vector<std::size_t> next(at(instance_.classes()), 0);
    for (const Step& step : best_) {
      stages.push_back({instance_.hosts(step.cls)[next[at(step.cls)]++], step.first, step.last});
    }
    return stages;
  }

  const Instance instance_;
  const Options& options_;
  const Clock clock_;
  double lo_ = 0;
  double hi_ = kInfinity;
  Path best_;
  std::vector<double> guess_;     // by class: prices that were good for the last question
};

}  // namespace

Solution solve(const Problem& problem, const Options& options) {
  validate(problem);
  return Solver(problem, options).run();
}

}  // namespace pipeedge
