// What else there is: the next best in place of each choice of a plan, and what the loss of each host would cost.
//
// After a loss, a run goes on with the best plan for the hosts that are left. So whether host h can be lost does not
// depend on the plan: if the layers fit on the others, every plan survives its loss; if they do not, no feasible plan
// is without h, and none survives it. A plan that survives every loss is therefore the best plan, or there is none, and
// both are proven by solving the problem without each host.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "problem.hpp"

namespace pipeedge {

// How a problem is to be solved: for all questions in the same way, such as with automatic bits.
using Solver = std::function<Solution(const Problem&)>;

// A choice of a plan, and the next best in its place.
struct NextBest {
  enum class Choice { kBatchSize, kDtype, kStageDtype, kLinkBits, kHost };

  Choice choice = Choice::kHost;
  int stage = 0;      // kStageDtype, and kLinkBits for the link after it
  int host = 0;       // kHost
  std::string dtype;  // the number type chosen: kDtype and kStageDtype
  bool feasible = false;
  double batch_size = 0;         // kBatchSize: the next best
  int instead = 0;               // the next best: kStageDtype: setting; kLinkBits: width
  double objective = kInfinity;  // as Solution::objective
  double loss = 0;

  // Whether all other choices are made anew, rather than kept.
  bool planned_anew() const { return choice != Choice::kStageDtype && choice != Choice::kLinkBits; }
};

// Hosts, microbatch size and number types of the plan are planned anew without what was chosen; a stage's number
// type and a link's bits are changed with all others as they are.
std::vector<NextBest> next_best(const Problem& problem, const Solution& solution, const Options& options);

// How long the texts of a decoder pause after a loss: somebody has to notice and to plan, what hosts lack of their new
// layers has to be loaded, and what caches lack has to be computed again.
struct Pause {
  static constexpr double kStopS = 0.15;  // a process that ends is noticed at once; stopping, planning, links

  double load_s = 0;
  double all_s = 0;      // computing all tokens of all texts in all layers
  double kept_s = 0;     // ... in the layers up to the last one that another host has now
  double outputs_s = 0;  // ... from the first one on, if the host in front of the lost one has kept its outputs
  double copied_s = 0;   // ... of the pages alone that are not full, if the others and the weights were copied

  double seconds(double again_s) const { return kStopS + load_s + again_s; }
  double with_copies_s() const { return std::min(seconds(kept_s), kStopS + copied_s); }
};

// The loss of one host.
struct Loss {
  enum class Effect {
    kNone,       // no stage is there
    kContinues,  // the others run all layers
    kEnds,       // the others cannot
    kUnknown,    // none was found within the time limit, and none could be ruled out
  };

  int host = 0;
  Effect effect = Effect::kNone;
  bool of_data_host = false;   // ends every run, whatever fits
  Solution after;              // plan of the others; empty for kNone and the data host
  std::optional<Pause> pause;  // of a decoder that continues
};

// One entry for each host, in their order. Hosts that are equivalent are asked about once.
std::vector<Loss> find_losses(const Problem& problem, const Solution& now, const Solver& solver,
                              const Options& options);

// The first host, apart from the data host, whose loss cannot be taken or is undecided; null if there is none.
const Loss* first_fatal(const std::vector<Loss>& losses);

}  // namespace pipeedge
