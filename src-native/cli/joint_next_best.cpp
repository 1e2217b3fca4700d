#include <algorithm>
#include <set>
#include <utility>

#include "joint_report.hpp"
#include "text.hpp"
#include "../yaml/tree.hpp"

namespace pipeedge::cli {
namespace {

constexpr double kSecondsEach = 1;     // for each question that is planned anew

std::size_t at(int i) { return static_cast<std::size_t>(i); }

double objective_of(const JointCosts& costs, double batch_size, Objective objective) {
  switch (objective) {
    case Objective::kLatency: return costs.latency_s;
    case Objective::kEnergy: return *costs.joules / batch_size;
    case Objective::kThroughput: break;
  }
  return costs.period_s / batch_size;
}

// Without the settings of which `gone` holds.
template <typename Gone>
JointProblem without_settings(JointProblem problem, Gone gone) {
  auto& settings = problem.settings;
  settings.erase(std::remove_if(settings.begin(), settings.end(), gone), settings.end());
  return problem;
}

// A host that is gone takes no stage; as the data host, its links still count.
JointProblem without_host(JointProblem problem, const std::string& name) {
  for (Setting& setting : problem.settings) {
    Problem& own = setting.problem;
    for (Host& host : own.hosts) {
      if (host.name != name) continue;
      DeviceType type = own.types[at(host.type)];
      const std::size_t size = type.time_s.size() + 1;
      type.stage_s.assign(size * size, kInfinity);
      host.type = static_cast<int>(own.types.size());
      own.types.push_back(std::move(type));
      if (!setting.loss.empty()) setting.loss.emplace_back();
    }
  }
  return problem;
}

class Alternatives {
 public:
  Alternatives(const JointProblem& problem, const JointSolution& solution, const Options& options)
      : problem_(problem), solution_(solution), options_(options), names_(host_names(problem)) {
    options_.time_limit_s = std::min(options.time_limit_s, kSecondsEach);
  }

  std::vector<NextBest> all() {
    batch_size();
    dtypes();
    for (std::size_t s = 0; s < solution_.stages.size(); ++s) stage_dtype(s);
    for (std::size_t s = 0; s + 1 < solution_.stages.size(); ++s) link_bits(s);
    for (const JointStage& stage : solution_.stages) host(stage);
    return std::move(found_);
  }

 private:
  const Setting& setting(const JointStage& stage) const { return problem_.settings[at(stage.setting)]; }

  void plan_anew(const JointProblem& problem, std::string choice, const std::string& instead) {
    NextBest next{std::move(choice), "", false, kInfinity, 0, true};
    if (!problem.settings.empty()) {
      const JointSolution other = solve(problem, options_);
      next.feasible = !other.stages.empty();
      next.objective = other.objective;
      next.loss = other.loss;
      if (next.feasible) next.instead = instead.empty() ? figure_text(other.batch_size) : instead;
    }
    found_.push_back(std::move(next));
  }

  void batch_size() {
    const double size = solution_.batch_size;
    const auto same = [&](const Setting& one) { return one.problem.batch_size == size; };
    if (std::all_of(problem_.settings.begin(), problem_.settings.end(), same)) return;
    plan_anew(without_settings(problem_, same), "microbatches of " + figure_text(size), "");
  }

  void dtypes() {
    std::set<std::string> all;
    std::set<std::string> chosen;
    for (const Setting& one : problem_.settings) all.insert(one.dtype);
    for (const JointStage& stage : solution_.stages) chosen.insert(setting(stage).dtype);
    if (all.size() < 2) return;
    for (const std::string& dtype : chosen) {
      plan_anew(without_settings(problem_, [&](const Setting& one) { return one.dtype == dtype; }),
                "number type " + dtype, "without it");
    }
  }

  // The best of the plans with one stage or link changed.
  void keep_best(NextBest& best, const std::vector<JointStage>& stages, const std::string& instead) const {
    const JointCosts costs = evaluate(problem_, stages);
    const double objective = objective_of(costs, solution_.batch_size, options_.objective);
    for (const JointStageCost& cost : costs.stages) {
      if (cost.seconds.mem_bytes > cost.seconds.mem_available_bytes * (1 + 1e-9)) return;
    }
    if (costs.loss > problem_.max_loss * (1 + 1e-9) || costs.latency_s > problem_.max_latency_s) return;
    if (solution_.batch_size < options_.min_items_per_s * costs.period_s * (1 - 1e-9)) return;
    if (!(objective < kInfinity) || !(costs.loss < kInfinity)) return;
    if (best.feasible && std::make_pair(objective, costs.loss) >= std::make_pair(best.objective, best.loss)) return;
    best.feasible = true;
    best.instead = instead;
    best.objective = objective;
    best.loss = costs.loss;
  }

  void stage_dtype(std::size_t s) {
    const JointStage& stage = solution_.stages[s];
    NextBest best{"stage " + std::to_string(s) + " in " + setting(stage).dtype, "", false, kInfinity, 0, false};
    bool others = false;
    for (int other = 0; other < static_cast<int>(problem_.settings.size()); ++other) {
      const Setting& one = problem_.settings[at(other)];
      if (other == stage.setting || one.problem.batch_size != solution_.batch_size) continue;
      const auto& hosts = one.problem.hosts;
      const auto there = [&](const Host& host) { return host.name == names_[at(stage.host)]; };
      if (std::none_of(hosts.begin(), hosts.end(), there)) continue;
      others = true;
      std::vector<JointStage> stages = solution_.stages;
      stages[s].setting = other;
      keep_best(best, stages, one.dtype);
    }
    if (others) found_.push_back(std::move(best));
  }

  void link_bits(std::size_t s) {
    const JointStage& stage = solution_.stages[s];
    const int bits = problem_.widths[at(stage.width)].bits;
    const auto words = [](int b) { return b == 0 ? std::string("uncompressed") : std::to_string(b) + " bits"; };
    NextBest best{"link after stage " + std::to_string(s) + ": " + words(bits), "", false, kInfinity, 0, false};
    if (problem_.widths.size() < 2) return;
    for (int other = 0; other < static_cast<int>(problem_.widths.size()); ++other) {
      const int width = problem_.widths[at(other)].bits;
      if (other == stage.width || width >= 8 * setting(stage).problem.element_bytes) continue;
      std::vector<JointStage> stages = solution_.stages;
      stages[s].width = other;
      keep_best(best, stages, words(width));
    }
    found_.push_back(std::move(best));
  }

  void host(const JointStage& stage) {
    const std::string& name = names_[at(stage.host)];
    plan_anew(without_host(problem_, name), "host " + yaml::printable(name), "without it");
  }

  const JointProblem& problem_;
  const JointSolution& solution_;
  Options options_;
  const std::vector<std::string> names_;
  std::vector<NextBest> found_;
};

}  // namespace

std::vector<NextBest> next_best(const JointProblem& problem, const JointSolution& solution, const Options& options) {
  return Alternatives(problem, solution, options).all();
}

}  // namespace pipeedge::cli
