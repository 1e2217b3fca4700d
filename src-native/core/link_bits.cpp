#include "link_bits.hpp"

#include <algorithm>
#include <utility>

#include "clock.hpp"
#include "instance.hpp"
#include "links.hpp"

namespace pipeedge {
namespace {

constexpr int kWidths[] = {0, 16, 8, 7, 6, 5, 4, 3, 2};

// Returns the widest bits of each link with which it stays within the bottleneck.
void widen(Problem& problem, const Solution& solution, double bottleneck, const std::vector<int>& widths) {
  const LinkTable links(problem);
  for (std::size_t s = 0; s + 1 < solution.stages.size(); ++s) {
    const Stage& stage = solution.stages[s];
    int& bits = problem.cut_bits[static_cast<std::size_t>(stage.last)];
    const int before = bits;
    for (const int wider : widths) {
      if (wider == before) break;
      bits = wider;
      const double seconds = links.seconds(stage.host, solution.stages[s + 1].host, link_bytes(problem, stage.last));
      if (seconds <= loosened(bottleneck)) break;
      bits = before;
    }
  }
}

}  // namespace

std::vector<int> link_widths(const Problem& problem) {
  std::vector<int> widths;
  for (const int bits : kWidths) {
    if (bits < 8 * problem.element_bytes) widths.push_back(bits);
  }
  return widths;
}

Problem with_link_bits(Problem problem, int bits) {
  const std::size_t layers = problem.model.mem_bytes.size();
  problem.cut_bits.assign(layers + 1, bits < 8 * problem.element_bytes ? bits : 0);
  problem.cut_bits.front() = problem.cut_bits.back() = 0;
  return problem;
}

AutoBits solve_with_auto_bits(const Problem& problem, const Options& options) {
  const Clock clock(options.time_limit_s);
  const auto solved = [&](int bits) {
    Options rest = options;
    rest.time_limit_s = std::max(0.0, options.time_limit_s - clock.elapsed_s());
    AutoBits answer{with_link_bits(problem, bits), {}};
    answer.solution = solve(answer.problem, rest);
    return answer;
  };
  const std::vector<int> widths = link_widths(problem);
  AutoBits best = solved(widths.back());
  if (best.solution.stages.empty()) return best;
  const Solution narrowest = best.solution;
  // Bisection for the widest common width: widths before `low` are too wide, `high` is sufficient.
  std::size_t low = 0;
  std::size_t high = widths.size() - 1;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    AutoBits answer = solved(widths[middle]);
    if (answer.solution.bottleneck_s <= loosened(narrowest.bottleneck_s)) {
      best = std::move(answer);
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  widen(best.problem, best.solution, std::max(best.solution.bottleneck_s, narrowest.bottleneck_s), widths);
  // The lower bound for the narrowest links holds for all widths.
  const std::vector<StageCost> costs = evaluate(best.problem, best.solution.stages);
  Solution& solution = best.solution;
  solution.bottleneck_s = bottleneck_seconds(best.problem, solution.stages, costs);
  solution.latency_s = latency_seconds(costs);
  solution.objective = solution.bottleneck_s;
  solution.status = narrowest.status;
  solution.lower_bound = narrowest.status == Status::kOptimal ? solution.objective : narrowest.lower_bound;
  solution.elapsed_s = clock.elapsed_s();
  return best;
}

}  // namespace pipeedge
