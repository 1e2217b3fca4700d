#include "alternatives.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "conditions.hpp"
#include "costs.hpp"
#include "instance.hpp"
#include "takeover.hpp"

namespace pipeedge {
namespace {

constexpr double kSecondsEach = 1;  // for each question that is planned anew

std::size_t at(int i) { return static_cast<std::size_t>(i); }

double objective_of(const Costs& costs, double batch_size, Objective objective) {
  switch (objective) {
    case Objective::kLatency: return costs.latency_s;
    case Objective::kEnergy: return *costs.joules / batch_size;
    case Objective::kThroughput: break;
  }
  return costs.period_s / batch_size;
}

// Without the settings of which `gone` holds.
template <typename Gone>
Problem without_settings(Problem problem, Gone gone) {
  auto& settings = problem.settings;
  settings.erase(std::remove_if(settings.begin(), settings.end(), gone), settings.end());
  return problem;
}

class Alternatives {
 public:
  Alternatives(const Problem& problem, const Solution& solution, const Options& options)
      : problem_(problem), links_(problem), solution_(solution), options_(options) {
    options_.time_limit_s = std::min(options.time_limit_s, kSecondsEach);
  }

  std::vector<NextBest> all() {
    batch_size();
    dtypes();
    for (int s = 0; s < static_cast<int>(solution_.stages.size()); ++s) stage_dtype(s);
    for (int s = 0; s + 1 < static_cast<int>(solution_.stages.size()); ++s) link_bits(s);
    for (const Stage& stage : solution_.stages) host(stage.host);
    return std::move(found_);
  }

 private:
  using Choice = NextBest::Choice;

  NextBest next(Choice choice) const {
    NextBest next;
    next.choice = choice;
    return next;
  }
  const Stage& stage(int s) const { return solution_.stages[at(s)]; }

  void plan_anew(const Problem& problem, NextBest next) {
    if (!problem.settings.empty() && !problem.hosts.empty()) {
      const Solution other = solve(problem, options_);
      next.feasible = !other.stages.empty();
      next.objective = other.objective;
      next.loss = other.loss;
      next.batch_size = other.batch_size;
    }
    found_.push_back(std::move(next));
  }

  void batch_size() {
    const auto same = [&](const Setting& one) { return one.batch_size == solution_.batch_size; };
    if (std::all_of(problem_.settings.begin(), problem_.settings.end(), same)) return;
    plan_anew(without_settings(problem_, same), next(Choice::kBatchSize));
  }

  void dtypes() {
    std::set<std::string> all;
    std::set<std::string> chosen;
    for (const Setting& one : problem_.settings) all.insert(one.dtype);
    for (const Stage& stage : solution_.stages) chosen.insert(problem_.setting(stage.setting).dtype);
    if (all.size() < 2) return;
    for (const std::string& dtype : chosen) {
      NextBest without = next(Choice::kDtype);
      without.dtype = dtype;
      plan_anew(without_settings(problem_, [&](const Setting& one) { return one.dtype == dtype; }), std::move(without));
    }
  }

  // The best of the plans with one stage or link changed.
  void keep_best(NextBest& best, const std::vector<Stage>& stages, int instead) const {
    const Costs costs = evaluate(problem_, links_, stages);
    const double objective = objective_of(costs, solution_.batch_size, options_.objective);
    if (!costs.fits() || costs.loss > loosened(problem_.max_loss) || costs.latency_s > problem_.max_latency_s ||
        !keeps_asides(problem_, costs)) {
      return;
    }
    if (loosened(solution_.batch_size) < options_.min_items_per_s * costs.period_s) return;
    if (!(objective < kInfinity) || !(costs.loss < kInfinity)) return;
    if (best.feasible && std::make_pair(objective, costs.loss) >= std::make_pair(best.objective, best.loss)) return;
    best.feasible = true;
    best.instead = instead;
    best.objective = objective;
    best.loss = costs.loss;
  }

  void stage_dtype(int s) {
    NextBest best = next(Choice::kStageDtype);
    best.stage = s;
    best.dtype = problem_.setting(stage(s).setting).dtype;
    bool others = false;
    for (int other = 0; other < static_cast<int>(problem_.settings.size()); ++other) {
      const Setting& one = problem_.setting(other);
      if (other == stage(s).setting || one.batch_size != solution_.batch_size) continue;
      if (one.type(stage(s).host) == nullptr) continue;
      others = true;
      std::vector<Stage> stages = solution_.stages;
      stages[at(s)].setting = other;
      keep_best(best, stages, other);
    }
    if (others) found_.push_back(std::move(best));
  }

  void link_bits(int s) {
    if (problem_.widths.size() < 2) return;
    NextBest best = next(Choice::kLinkBits);
    best.stage = s;
    for (int other = 0; other < static_cast<int>(problem_.widths.size()); ++other) {
      const Width& width = problem_.widths[at(other)];
      if (other == stage(s).width || !useful(problem_.setting(stage(s).setting), width.bits)) continue;
      std::vector<Stage> stages = solution_.stages;
      stages[at(s)].width = other;
      keep_best(best, stages, other);
    }
    found_.push_back(std::move(best));
  }

  void host(int host) {
    NextBest without = next(Choice::kHost);
    without.host = host;
    plan_anew(without_stages_on(problem_, host), std::move(without));
  }

  const Problem& problem_;
  const LinkTable links_;
  const Solution& solution_;
  Options options_;
  std::vector<NextBest> found_;
};

}  // namespace

std::vector<NextBest> next_best(const Problem& problem, const Solution& solution, const Options& options) {
  return Alternatives(problem, solution, options).all();
}

namespace {

// What hosts have loaded, once one of them is lost.
Before loaded_without(const Problem& problem, const Solution& now, int host) {
  Before before;
  for (const Stage& stage : now.stages) {
    const int left = stage.host > host ? stage.host - 1 : stage.host;
    before.stages.push_back({stage.host == host ? LoadedStage::kGone : left, stage.first, stage.last,
                             problem.setting(stage.setting).dtype, stage.width});
  }
  return before;
}

// The layers that their hosts did not have before, and those between; as layers [0, 0) if there are none.
struct MovedLayers {
  int first = 0;
  int last = 0;
  int after_outputs = 0;  // the first one to compute if hosts have kept the outputs of their stages
};

MovedLayers layers_moved(const Problem& problem, const Before& before, const std::vector<Stage>& after) {
  MovedLayers moved;
  for (const Stage& stage : after) {
    for (int layer = stage.first; layer < stage.last; ++layer) {
      const auto had = [&](const LoadedStage& one) {
        return one.host == stage.host && one.first <= layer && layer < one.last &&
               one.dtype == problem.setting(stage.setting).dtype;
      };
      if (std::any_of(before.stages.begin(), before.stages.end(), had)) continue;
      if (moved.last == 0) moved.first = layer;
      moved.last = layer + 1;
    }
  }
  // All layers in front of the first one are where they were, and so are their outputs.
  for (const LoadedStage& one : before.stages) {
    if (one.last <= moved.first) moved.after_outputs = std::max(moved.after_outputs, one.last);
  }
  return moved;
}

Pause pause_of(const Problem& problem, const Before& before, const std::vector<Stage>& after) {
  Pause pause;
  const LinkTable links(problem);
  Costs costs = evaluate(problem, links, after);
  add_before(problem, before, after, costs);
  for (std::size_t s = 0; s < after.size(); ++s) {
    const DeviceType& type = *problem.setting(after[s].setting).type(after[s].host);
    pause.load_s = std::max(pause.load_s, costs.stages[s].load_bytes * type.load_s_per_byte);
  }
  const Aside& again = problem.again[std::min(after.size(), problem.again.size()) - 1];
  // The tokens of full pages, in some layers, or those that are in none, which no host has.
  const double rows = again.settings.front().batch_size, tokens = (again.repeats + 1) * rows;
  const double partial = std::min(problem.partial_tokens, tokens);
  const auto computing = [&](double count, int first, int last) {
    Aside aside = again;
    aside.repeats = std::max(0.0, count / rows - 1);
    return aside_cost(problem, links, after, aside, first, last);
  };
  const AsideCost all = computing(tokens, 0, problem.layers());
  pause.all_s = pause.kept_s = pause.outputs_s = all.total_s;
  pause.copied_s = kInfinity;
  if (!problem.keeps_caches) return pause;
  const MovedLayers moved = layers_moved(problem, before, after);
  const double partial_s = partial / rows * all.longest_s;
  const auto full_from = [&](int first) { return computing(tokens - partial, first, moved.last).total_s; };
  pause.kept_s = std::min(pause.all_s, full_from(0) + partial_s);
  pause.outputs_s = std::min(pause.all_s, full_from(moved.after_outputs) + partial_s);
  pause.copied_s = computing(partial, 0, problem.layers()).total_s;
  return pause;
}

}  // namespace

std::vector<Loss> find_losses(const Problem& problem, const Solution& now, const Solver& solver,
                              const Options& options) {
  std::vector<Loss> losses(problem.hosts.size());
  std::vector<char> used(problem.hosts.size(), 0);
  for (const Stage& stage : now.stages) used[at(stage.host)] = 1;
  const Instance instance(problem, LinkTable(problem), now.batch_size);
  // With several microbatch sizes, hosts that are alike at one of them may differ at another.
  const bool alike = instance.settings() == static_cast<int>(problem.settings.size());
  std::vector<std::optional<Solution>> after(at(instance.classes()));  // without one host of the class
  for (int host = 0; host < problem.host_count(); ++host) {
    Loss& loss = losses[at(host)];
    loss.host = host;
    loss.of_data_host = host == problem.data_host;
    if (loss.of_data_host) loss.effect = Loss::Effect::kEnds;
    if (loss.of_data_host || used[at(host)] == 0) continue;
    std::optional<Solution>& rest = after[at(instance.class_of(host))];
    if (!rest || !alike) {
      Solution none;
      none.status = Status::kInfeasible;
      rest = problem.hosts.size() == 1 ? none : solver(without_host(problem, host));
    }
    loss.after = *rest;
    loss.effect = !loss.after.stages.empty()                 ? Loss::Effect::kContinues
                  : loss.after.status == Status::kInfeasible ? Loss::Effect::kEnds
                                                             : Loss::Effect::kUnknown;
    if (problem.again.empty() || loss.after.stages.empty()) continue;
    const Problem others = without_host(problem, host);
    const Before before = loaded_without(problem, now, host);
    loss.after.stages = follow(others, before, options, loss.after.stages);
    const Costs costs = evaluate(others, loss.after.stages);
    loss.after.period_s = costs.period_s;
    loss.after.latency_s = costs.latency_s;
    loss.after.objective = objective_of(costs, loss.after.batch_size, options.objective);
    loss.pause = pause_of(others, before, loss.after.stages);
  }
  return losses;
}

const Loss* first_fatal(const std::vector<Loss>& losses) {
  for (const Loss::Effect effect : {Loss::Effect::kEnds, Loss::Effect::kUnknown}) {
    const auto found = std::find_if(losses.begin(), losses.end(),
                                    [&](const Loss& loss) { return loss.effect == effect && !loss.of_data_host; });
    if (found != losses.end()) return &*found;
  }
  return nullptr;
}

}  // namespace pipeedge
