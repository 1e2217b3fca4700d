#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "objectives.hpp"

namespace pipeedge {
namespace {

Solution search(const Problem& problem, const Options& options) {
  if (options.objective == Objective::kEnergy) {
    for (const int host : hosts_without_watts(problem)) {
      throw std::invalid_argument("the watts of the host " + problem.hosts[static_cast<std::size_t>(host)] +
                                  " are not known");
    }
  }
  Incumbent incumbent(problem, options);
  switch (options.objective) {
    case Objective::kThroughput: maximise_throughput(incumbent); break;
    case Objective::kLatency: minimise_latency(incumbent); break;
    case Objective::kEnergy: minimise_energy(incumbent); break;
  }
  Solution solution;
  solution.lower_bound = incumbent.low();
  if (incumbent.best_size() < 0) {
    solution.status = std::isinf(solution.lower_bound) ? Status::kInfeasible : Status::kUnknown;
  } else {
    const Plan& best = incumbent.best();
    solution.status = incumbent.proven() ? Status::kOptimal : Status::kBounded;
    solution.batch_size = incumbent.size(incumbent.best_size()).batch_size;
    solution.stages = best.stages;
    solution.period_s = best.costs.period_s;
    solution.latency_s = best.costs.latency_s;
    solution.loss = best.costs.loss;
    solution.fewest_stages = incumbent.fewest_stages();
    solution.objective = best.value;
    solution.lower_bound = incumbent.proven() ? best.value : std::min(solution.lower_bound, best.value);
  }
  solution.elapsed_s = incumbent.clock().elapsed_s();
  return solution;
}

// A part of the plans: those in which one of Problem::either keeps its limits, and the longest stage or link of an aside
// that is repeated takes so long.
struct Part {
  Problem problem;
  double low = 0;  // no plan of it is better
};

std::vector<Part> parts_of(const Problem& problem) {
  std::vector<Part> parts;
  const bool any =
      std::any_of(problem.either.begin(), problem.either.end(), [](const Aside& a) { return !a.limits(); });
  if (problem.either.empty() || any) {
    parts.push_back({problem, 0});
    parts.back().problem.either.clear();
    return parts;
  }
  for (const Aside& aside : problem.either) {
    Part part{problem, 0};
    part.problem.either.clear();
    part.problem.asides.push_back(aside);
    parts.push_back(std::move(part));
  }
  return parts;
}

// Divides a part whose best plan takes too long for an aside: at a longest stage or link that is less than the plan's,
// and more than it may be with the plan's latency. So in either half that plan is left out.
void divide(const Part& part, std::size_t aside, const AsideCost& cost, double low, std::vector<Part>& parts) {
  const Aside& whole = part.problem.asides[aside];
  const double allowed_s = std::max(0.0, (whole.max_s - whole.fixed_s - cost.latency_s) / whole.repeats);
  const double longest_s = (allowed_s + cost.longest_s) / 2;
  Part shorter{part.problem, low}, longer{part.problem, low};
  Aside& below = shorter.problem.asides[aside];
  below.longest_limit_s = std::min(below.longest_limit_s, longest_s - 4 * kRelativeTolerance * longest_s);
  Aside& above = longer.problem.asides[aside];
  above.latency_limit_s = std::min(above.latency_limit_s, above.max_s - above.fixed_s - above.repeats * longest_s);
  parts.push_back(std::move(shorter));
  if (above.latency_limit_s > 0) parts.push_back(std::move(longer));
}

}  // namespace

Solution solve(const Problem& problem, const Options& options) {
  validate(problem);
  const auto repeated = [](const Aside& aside) { return aside.repeats > 0 && aside.max_s < kInfinity; };
  if (problem.either.empty() && std::none_of(problem.asides.begin(), problem.asides.end(), repeated)) {
    return search(problem, options);
  }
  const Clock clock(options.time_limit_s);
  std::vector<Part> parts = parts_of(problem);
  Solution best;
  best.status = Status::kInfeasible;
  best.lower_bound = kInfinity;
  double open = kInfinity;  // no plan of the parts that were not searched to the end is better
  while (!parts.empty()) {
    const auto least =
        std::min_element(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.low < b.low; });
    const Part part = std::move(*least);
    parts.erase(least);
    if (part.low >= just_below(best.objective)) break;  // and so are all others
    Options rest = options;
    rest.time_limit_s = std::max(0.0, options.time_limit_s - clock.elapsed_s());
    const Solution found = search(part.problem, rest);
    if (found.status == Status::kInfeasible) continue;
    if (found.status != Status::kOptimal) open = std::min(open, found.lower_bound);
    if (found.stages.empty()) continue;
    const Costs costs = evaluate(part.problem, found.stages);
    std::size_t late = 0;
    while (late < costs.asides.size() && costs.asides[late].total_s <= loosened(part.problem.asides[late].max_s))
      ++late;
    if (late < costs.asides.size()) {
      divide(part, late, costs.asides[late], found.lower_bound, parts);
    } else if (found.objective < just_below(best.objective) || best.stages.empty()) {
      best = found;
    }
    if (clock.expired()) {
      for (const Part& other : parts) open = std::min(open, other.low);
      break;
    }
  }
  if (open < just_below(best.objective)) {
    best.status = best.stages.empty() ? Status::kUnknown : Status::kBounded;
    best.lower_bound = open;
    best.fewest_stages = 0;
  } else if (!best.stages.empty()) {
    best.status = Status::kOptimal;
    best.lower_bound = best.objective;
  }
  best.elapsed_s = clock.elapsed_s();
  return best;
}

}  // namespace pipeedge
