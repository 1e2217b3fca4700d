// One question: is there a joint plan within these limits?
//
// It is put to the prices first (joint_prices.hpp), which may prove "no" or come across a plan, then to the label
// search (joint_search.hpp), which answers exactly unless it had to drop labels. What stays open may be asked again
// with more effort.
#pragma once

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "clock.hpp"
#include "effort.hpp"
#include "feasibility.hpp"
#include "joint.hpp"
#include "joint_instance.hpp"
#include "joint_network.hpp"
#include "joint_prices.hpp"

namespace pipeedge {

constexpr Effort kJointEfforts[] = {
    {60, 2'000'000, 1e-3, 1e-2},
    {500, 60'000'000, 1e-4, 4e-3},
    {4'000, 1'000'000'000, 1e-5, 5e-4},
    {30'000, 20'000'000'000, 1e-6, 0},
    {200'000, 400'000'000'000, 1e-7, 0},
};

struct JointVerdict {
  Answer answer = Answer::kOpen;
  std::vector<JointStage> stages;
  double next_period = kInfinity;      // after kNo: the period is at least this
};

// Answers for one microbatch size.
class JointFeasibility {
 public:
  JointFeasibility(const JointProblem& problem, const Wiring& wiring, double batch_size, const Clock& clock)
      : instance_(problem, wiring, batch_size), clock_(clock) {}

  const JointInstance& instance() const { return instance_; }

  // `least`: an amount to be made as small as possible, as far as the effort goes; none: any plan will do.
  JointVerdict ask(const JointLimits& limits, const Score& score, std::optional<Amount> least, const Effort& effort);
  // The shortest period above another one that some stage or link determines; infinite if there is none.
  double next_period(double period_s) const;

 private:
  void explore(const JointNetwork& network, JointPricer& pricer, std::optional<Amount> least, bool narrow,
               const Effort& effort, JointVerdict& verdict) const;

  const JointInstance instance_;
  const Clock& clock_;
  std::optional<JointPrices> guess_;
};

// The best plan so far.
struct JointBest {
  std::vector<JointStage> stages;
  JointCosts costs;
  double value = kInfinity;            // the objective
  int size = -1;                       // index of its microbatch size
};

// One microbatch size, with what is known of it.
struct JointSize {
  double batch_size = 0;
  std::unique_ptr<JointFeasibility> feasibility;
  double low = 0;                      // no plan has a smaller objective
};

// A value that is less than another one, and not equal to it.
inline double just_below(double value) {
  return std::isinf(value) ? value : value - 2 * kRelativeTolerance * std::abs(value);
}

}  // namespace pipeedge
