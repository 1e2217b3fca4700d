// Plans with the fewest joules an item.
//
// With one price for all, energy adds up along a plan, but for one factor: hosts that wait do so for the period,
// which is that of the slowest stage or link.
//
//   joules(plan)  =  sum of (busy_w - idle_w) * seconds  +  period * sum of idle_w
//
// Were the period t, this would be a sum over stages, which the network's score can have. So periods are divided
// into spans. Plans within the end of a span, with the energy that they would have at its beginning, bound all plans
// whose period lies in it:
//
//        low          period of the plan found                        high
//   ------|--------------------|--------------------------|-------------|----->  period
//         joules at `low`  <=  joules of the plan: divide here and in the middle, ask about the parts
//
// A part with no plan below the best one is done; so is one whose plans all have the period at its beginning.
// Parts begin at times that a stage or link takes, of which there are finitely many.
#pragma once

#include <vector>

#include "joint_feasibility.hpp"

namespace pipeedge {

class JointEnergy {
 public:
  // `sizes`, `best`: what is known of each microbatch size, and the best plan so far; both are kept up to date.
  JointEnergy(const JointProblem& problem, const Options& options, const Clock& clock, std::vector<JointSize>& sizes,
              JointBest& best);

  // Asks about all spans that are open, with one effort.
  void narrow(const Effort& effort);

 private:
  struct Span {
    int size = 0;                      // index of its microbatch size
    double low_s = 0;                  // a plan's period is between these
    double high_s = 0;
    double bound = 0;                  // joules an item that no such plan is below
  };

  const JointInstance& instance(int size) const;
  Span whole(int size) const;
  JointVerdict ask(const Span& span, double joules, const Effort& effort) const;
  std::vector<Span> settle(Span span, const Effort& effort);
  std::vector<Span> parts(const Span& span, double period_s) const;
  bool improve(int size, const std::vector<JointStage>& stages, const JointCosts& costs);
  void state_bounds();

  const JointProblem& problem_;
  const Options& options_;
  const Clock& clock_;
  std::vector<JointSize>& sizes_;
  JointBest& best_;
  std::vector<Span> open_;
};

}  // namespace pipeedge
