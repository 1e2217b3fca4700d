// The whole search: a first schedule, then the objective in question.
#include <algorithm>
#include <cmath>
#include <utility>

#include "clock.hpp"
#include "effort.hpp"
#include "feasibility.hpp"
#include "incumbent.hpp"
#include "instance.hpp"
#include "latency.hpp"
#include "problem.hpp"
#include "throughput.hpp"

namespace pipeedge {
namespace {

// No layer runs faster than on its fastest class.
double slowest_layer(const Instance& instance) {
  double bound = instance.data_floor();
  for (int l = 0; l < instance.layers(); ++l) bound = std::max(bound, instance.least(l));
  return bound;
}

// A first schedule. Networks of a low bottleneck are small, so those are asked before the one that holds
// every stage there is.
Answer find_any(const Instance& instance, Objective objective, const Clock& clock, Feasibility& feasibility,
                Incumbent& best) {
  double low = slowest_layer(instance);
  Answer answer = Answer::kOpen;
  for (double bottleneck = 4 * low; bottleneck < 1000 * low && answer != Answer::kYes; bottleneck *= 4) {
    Verdict verdict = feasibility.ask(bottleneck, instance.max_stages(), kEfforts[0]);
    answer = verdict.answer;
    if (answer == Answer::kYes) best.improve(std::move(verdict.path));
    if (answer == Answer::kNo) low = std::max(low, verdict.next_bottleneck);
    if (std::isinf(low)) return Answer::kNo;
    if (clock.expired()) break;
  }
  best.set_low(objective == Objective::kThroughput ? low : instance.fastest(0, instance.layers()));
  if (answer == Answer::kYes || clock.expired()) return answer == Answer::kNo ? Answer::kOpen : answer;
  for (const Effort& effort : kEfforts) {
    Verdict verdict = feasibility.ask(kInfinity, instance.max_stages(), effort);
    if (verdict.answer == Answer::kYes) best.improve(std::move(verdict.path));
    if (verdict.answer != Answer::kOpen || clock.expired()) return verdict.answer;
  }
  return Answer::kOpen;
}

}  // namespace

Solution solve(const Problem& problem, const Options& options) {
  validate(problem);
  const Instance instance(problem);
  const Clock clock(options.time_limit_s);
  Feasibility feasibility(instance, clock);
  Incumbent best(instance, options.objective);
  Solution solution;
  const Answer any = find_any(instance, options.objective, clock, feasibility, best);
  if (any == Answer::kYes) {
    if (options.objective == Objective::kThroughput) {
      maximise_throughput(instance, clock, feasibility, best);
    } else {
      minimise_latency(instance, clock, best);
    }
    const Costs costs = best.costs();
    solution.status = best.proven() ? Status::kOptimal : Status::kBounded;
    solution.stages = stages_of(instance, best.path());
    solution.bottleneck_s = costs.bottleneck_s;
    solution.latency_s = costs.latency_s;
    solution.objective = costs.of(options.objective);
    solution.lower_bound = best.proven() ? solution.objective : std::min(best.low(), solution.objective);
  } else {
    solution.status = any == Answer::kNo ? Status::kInfeasible : Status::kUnknown;
    solution.lower_bound = any == Answer::kNo ? kInfinity : best.low();
  }
  solution.elapsed_s = clock.elapsed_s();
  return solution;
}

}  // namespace pipeedge
