#include "link_bits.hpp"

#include <algorithm>
#include <utility>

#include "clock.hpp"
#include "objectives.hpp"

namespace pipeedge {
namespace {

constexpr int kBits[] = {0, 16, 8, 7, 6, 5, 4, 3, 2};

// The plan with one common width; its links have the number of that width among all.
Solution with_common_width(const Problem& problem, std::size_t width, Options options, const Clock& clock) {
  Problem narrowed = problem;
  narrowed.widths = {problem.widths[width]};
  options.time_limit_s = std::max(0.0, options.time_limit_s - clock.elapsed_s());
  Solution solution = solve(narrowed, options);
  for (Stage& stage : solution.stages) stage.width = static_cast<int>(width);
  return solution;
}

}  // namespace

Problem with_link_bits(Problem problem, int bits) {
  problem.widths = {Width{useful(problem.settings.front(), bits) ? bits : 0, {}}};
  return problem;
}

Problem with_all_link_bits(Problem problem) {
  problem.widths.clear();
  for (const int bits : kBits) {
    if (useful(problem.settings.front(), bits)) problem.widths.push_back({bits, {}});
  }
  return problem;
}

Solution solve_with_auto_bits(const Problem& problem, const Options& options) {
  const Clock clock(options.time_limit_s);
  Solution narrowest = with_common_width(problem, problem.widths.size() - 1, options, clock);
  if (narrowest.stages.empty()) return narrowest;
  // Bisection for the widest common width: widths before `low` are too wide, `high` is sufficient.
  Solution best = narrowest;
  std::size_t low = 0;
  std::size_t high = problem.widths.size() - 1;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    Solution answer = with_common_width(problem, middle, options, clock);
    if (answer.period_s <= loosened(narrowest.period_s)) {
      best = std::move(answer);
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const LinkTable links(problem);
  widen_links(problem, links, std::max(best.period_s, narrowest.period_s), best.stages);
  const Costs costs = evaluate(problem, links, best.stages);
  best.period_s = costs.period_s;
  best.latency_s = costs.latency_s;
  best.objective = costs.period_s / best.batch_size;
  // The lower bound for the narrowest links holds for all widths.
  best.status = narrowest.status;
  best.lower_bound = narrowest.status == Status::kOptimal ? best.objective : narrowest.lower_bound;
  best.elapsed_s = clock.elapsed_s();
  return best;
}

}  // namespace pipeedge
