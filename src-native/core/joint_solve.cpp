// Which limits to ask about: for each microbatch size bisection on the objective, against the best plan of all.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "clock.hpp"
#include "effort.hpp"
#include "joint.hpp"
#include "joint_energy.hpp"
#include "joint_feasibility.hpp"
#include "joint_instance.hpp"
#include "joint_network.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

constexpr double kClose = 1.005;       // bounds that are closer: ask just below the best plan
constexpr int kTieRounds = 6;

class JointSolver {
 public:
  JointSolver(const JointProblem& problem, const Options& options)
      : problem_(problem), options_(options), clock_(options.time_limit_s), wiring_(problem) {
    for (const Setting& setting : problem.settings) {
      const double size = setting.problem.batch_size;
      const auto same = [&](const JointSize& other) { return other.batch_size == size; };
      if (std::any_of(sizes_.begin(), sizes_.end(), same)) continue;
      sizes_.push_back({size, std::make_unique<JointFeasibility>(problem, wiring_, size, clock_), 0});
      sizes_.back().low = least_possible(sizes_.back());
    }
    std::stable_sort(sizes_.begin(), sizes_.end(), [](const JointSize& a, const JointSize& b) { return a.low < b.low; });
  }

  JointSolution run() {
    std::optional<JointEnergy> energy;
    if (options_.objective == Objective::kEnergy) energy.emplace(problem_, options_, clock_, sizes_, best_);
    for (const Effort& effort : kJointEfforts) {
      if (energy) energy->narrow(effort);
      for (int s = 0; !energy && s < static_cast<int>(sizes_.size()); ++s) {
        if (!closed(s) && !clock_.expired()) narrow(s, effort);
      }
      if (proven() || clock_.expired()) break;
    }
    const bool proven_before_ties = proven();
    if (best_.size >= 0) break_ties();
    return solution(proven_before_ties);
  }

 private:
  bool throughput() const { return options_.objective == Objective::kThroughput; }
  // Objective of a plan, or of a period at a microbatch size.
  double unit(int s) const { return throughput() ? 1 / sizes_[at(s)].batch_size : 1; }
  double value_of(const JointCosts& costs, int s) const {
    if (options_.objective == Objective::kEnergy) return *costs.joules / sizes_[at(s)].batch_size;
    return throughput() ? costs.period_s * unit(s) : costs.latency_s;
  }

  // Limits for plans with an objective of at most `value`.
  JointLimits limits_at(int s, double value) const {
    JointLimits limits;
    limits.most[kLoss] = problem_.max_loss;
    limits.most[kSeconds] = throughput() ? problem_.max_latency_s : std::min(value, problem_.max_latency_s);
    if (throughput()) limits.period_s = value / unit(s);
    return limits;
  }

  // Each layer in its fastest mode.
  double least_possible(const JointSize& size) const {
    const JointInstance& instance = size.feasibility->instance();
    double longest = instance.data().work.floor_s();
    double sum = 0;
    for (int l = 0; l < instance.layers(); ++l) {
      double least = kInfinity;
      for (const Mode& mode : instance.modes()) {
        const DeviceType& type = instance.costs(mode).types[at(mode.type)];
        least = std::min(least, type.bids() ? 0 : type.time_s[at(l)]);
      }
      longest = std::max(longest, least);
      sum += least;
    }
    return throughput() ? longest / size.batch_size : sum;
  }

  bool closed(int s) const { return sizes_[at(s)].low >= just_below(best_.value); }
  bool proven() const {
    for (int s = 0; s < static_cast<int>(sizes_.size()); ++s) {
      if (!closed(s)) return false;
    }
    return true;
  }

  void improve(int s, std::vector<JointStage> stages) {
    JointCosts costs = evaluate(problem_, stages);
    const double value = value_of(costs, s);
    if (!(value < best_.value)) return;
    best_ = {std::move(stages), std::move(costs), value, s};
  }

  Answer ask(int s, double value, const Effort& effort) {
    JointSize& size = sizes_[at(s)];
    const std::optional<Amount> least = throughput() ? std::nullopt : std::optional<Amount>(kSeconds);
    JointVerdict verdict = size.feasibility->ask(limits_at(s, value), {}, least, effort);
    if (verdict.answer == Answer::kYes) {
      improve(s, std::move(verdict.stages));
    } else if (verdict.answer == Answer::kNo) {
      const double next = throughput() ? verdict.next_period * unit(s)
                          : value >= problem_.max_latency_s ? kInfinity : value;
      size.low = std::max(size.low, next);
    }
    return verdict.answer;
  }

  // Finds some plan of a size, or proves that there is none.
  bool find_any(int s, const Effort& effort) {
    const double begin = std::max(sizes_[at(s)].low, 1e-12);
    for (double value = 2 * begin; value < 1e4 * begin; value *= 2) {
      const Answer answer = ask(s, value, effort);
      if (answer == Answer::kYes) return true;
      if (clock_.expired() || std::isinf(sizes_[at(s)].low)) return false;
    }
    return ask(s, kInfinity, effort) == Answer::kYes;
  }

  // Bisection with one effort.
  void narrow(int s, const Effort& effort) {
    if (best_.size < 0 && !find_any(s, effort)) return;
    // Whether this size can do better at all comes first, if the best plan has another one.
    bool challenge = best_.size != s;
    double open_low = kInfinity;       // what this effort could not decide: [open_low, open_high]
    double open_high = -kInfinity;
    bool above = true;
    while (!closed(s) && !clock_.expired()) {
      const double high = just_below(best_.value);
      std::optional<double> target;
      if (challenge) {
        target = high;
        challenge = false;
      } else if (open_low > open_high) {
        const double low = sizes_[at(s)].low;
        target = high <= low * kClose ? high : middle(low, high, 0);
      } else {
        for (int side = 0; side < 2 && !target; ++side, above = !above) {
          target = above ? middle(open_high, high, effort.resolution)
                         : middle(sizes_[at(s)].low, open_low, effort.resolution);
        }
      }
      if (!target) return;
      if (ask(s, *target, effort) == Answer::kOpen) {
        open_low = std::min(open_low, *target);
        open_high = std::max(open_high, *target);
      }
      if (open_low > open_high) continue;
      // What has been decided since is no longer open.
      open_low = std::max(open_low, sizes_[at(s)].low);
      open_high = std::min(open_high, just_below(best_.value));
      if (open_low > open_high) open_low = kInfinity, open_high = -kInfinity;
    }
  }

  // A value between two, to ask about next; none if they are closer than the resolution.
  static std::optional<double> middle(double low, double high, double resolution) {
    if (!(high > low * (1 + std::max(resolution, 10 * kRelativeTolerance)))) return std::nullopt;
    return low > 0 ? std::sqrt(low * high) : high / 2;
  }

  // Among plans as good: the smallest loss, then fewest hosts, one on the data host, and the smallest latency.
  void break_ties() {
    if (options_.objective == Objective::kEnergy) return break_energy_ties();
    JointLimits limits = limits_at(best_.size, best_.value);
    limits.most[kLoss] = std::min(limits.most[kLoss], best_.costs.loss);
    lower(limits, {}, kLoss, best_.costs.loss);
    limits.most[kLoss] = best_.costs.loss;
    const double stages = static_cast<double>(problem_.layers());
    const double latency = best_.costs.latency_s;
    const Score score{1, 1 / (2 * stages), latency > 0 ? 1 / (8 * stages * stages * latency) : 0};
    lower(limits, score, kScore, score_of(score));
    if (throughput()) widen();
  }

  // The smallest loss of plans that are no slower and take no more energy.
  void break_energy_ties() {
    JointLimits limits;
    limits.most[kSeconds] = problem_.max_latency_s;
    limits.period_s = best_.costs.period_s;
    const DataHost& data = sizes_[at(best_.size)].feasibility->instance().data();
    limits.most[kScore] = *best_.costs.joules - data.joules(limits.period_s);
    Score score;
    score.joule = 1;
    score.period_s = limits.period_s;
    lower(limits, score, kLoss, best_.costs.loss);
    widen();
  }

  // Gives each link the most bits with which the plan stays as good.
  void widen() {
    std::vector<int> widths;
    for (int w = 0; w < static_cast<int>(problem_.widths.size()); ++w) widths.push_back(w);
    const auto bits = [&](int w) {
      const int own = problem_.widths[at(w)].bits;
      return own == 0 ? 64 : own;
    };
    std::stable_sort(widths.begin(), widths.end(), [&](int a, int b) { return bits(a) > bits(b); });
    for (std::size_t s = 0; s + 1 < best_.stages.size(); ++s) {
      for (const int wider : widths) {
        const JointStage& stage = best_.stages[s];
        if (wider == stage.width) break;
        if (!useful(problem_.settings[at(stage.setting)].problem, problem_.widths[at(wider)].bits)) continue;
        std::vector<JointStage> stages = best_.stages;
        stages[s].width = wider;
        JointCosts costs = evaluate(problem_, stages);
        if (costs.period_s > with_tolerance(best_.costs.period_s) || costs.loss > best_.costs.loss ||
            costs.latency_s > problem_.max_latency_s) {
          continue;
        }
        best_.stages = std::move(stages);
        best_.costs = std::move(costs);
        break;
      }
    }
  }

  double score_of(const Score& score) const {
    double sum = score.second * best_.costs.latency_s;
    for (const JointStage& stage : best_.stages) {
      sum += score.stage + (stage.host == wiring_.data_host() ? 0 : score.away);
    }
    return sum;
  }

  // Makes an amount of the best plan smaller, as far as a limited effort goes. `now`: what it has.
  void lower(JointLimits limits, const Score& score, Amount amount, double now) {
    double low = 0;
    JointFeasibility& feasibility = *sizes_[at(best_.size)].feasibility;
    for (int round = 0; round < kTieRounds && now > low * kClose && now > 0 && !clock_.expired(); ++round) {
      limits.most[amount] = round == 0 ? just_below(now) : round == 1 ? low : (low + now) / 2;
      JointVerdict verdict = feasibility.ask(limits, score, amount, kJointEfforts[0]);
      if (verdict.answer != Answer::kYes) {
        if (round == 0 && verdict.answer == Answer::kNo) return;
        low = limits.most[amount];
        continue;
      }
      JointCosts costs = evaluate(problem_, verdict.stages);
      best_.stages = std::move(verdict.stages);
      best_.costs = std::move(costs);
      now = amount == kLoss ? best_.costs.loss : score_of(score);
    }
  }

  JointSolution solution(bool proven) const {
    JointSolution found;
    found.elapsed_s = clock_.elapsed_s();
    for (const JointSize& size : sizes_) {
      found.lower_bound = &size == &sizes_.front() ? size.low : std::min(found.lower_bound, size.low);
    }
    if (best_.size < 0) {
      found.status = std::isinf(found.lower_bound) ? Status::kInfeasible : Status::kUnknown;
      return found;
    }
    found.status = proven ? Status::kOptimal : Status::kBounded;
    found.batch_size = sizes_[at(best_.size)].batch_size;
    found.stages = best_.stages;
    found.period_s = best_.costs.period_s;
    found.latency_s = best_.costs.latency_s;
    found.loss = best_.costs.loss;
    found.objective = value_of(best_.costs, best_.size);
    found.lower_bound = proven ? found.objective : std::min(found.lower_bound, found.objective);
    return found;
  }

  const JointProblem& problem_;
  const Options options_;
  const Clock clock_;
  const Wiring wiring_;
  std::vector<JointSize> sizes_;
  JointBest best_;
};

}  // namespace

JointSolution solve(const JointProblem& problem, const Options& options) {
  validate(problem);
  if (options.objective == Objective::kEnergy && !unknown_watts(problem).empty()) {
    throw std::invalid_argument("the watts of the host " + unknown_watts(problem).front() + " are not known");
  }
  return JointSolver(problem, options).run();
}

}  // namespace pipeedge
