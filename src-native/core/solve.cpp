#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "objectives.hpp"

namespace pipeedge {

Solution solve(const Problem& problem, const Options& options) {
  validate(problem);
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

}  // namespace pipeedge
