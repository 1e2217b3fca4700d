// The plan that follows one that runs, or one that has failed.
//
//   running   a: 1-12   b: 13-25  c: 26-38  d: 39-48
//   best      a: 1-14   c: 15-21  d: 22-33  b: 34-48     as fast, but b, c and d load all layers anew
//   in order  a: 1-14   b: 15-27  c: 28-34  d: 35-48
//
// While a plan takes over, a host holds the layers of both; weights that both have are held once. Any of the plans with
// the best objective may be found; in one with the hosts in their order, less has to be loaded, and less lies between
// the last result of one plan and the first of the other. A host that joins makes that way longer: at the end, it gets
// the first new microbatch only when all others have computed the old plan; in the middle, it computes meanwhile.
//
//   a  oooonnn                   a  oooonnn                    o  last microbatch of the running plan
//   b      oooonnn               d         nnn                 n  first one of the new plan
//   c          oooonnn           b      oooo  nnn
//   d                 nnn        c          oooo nnn           the period is 4
//                     |----| 6                     |--| 4
//
// After a failure nothing runs, and only what hosts have loaded counts: those that are equivalent are exchanged so that
// the fewest bytes are loaded. Hosts of a decoder keep their order, too: what a host lacks of its layers has to be
// computed again, and so have all layers in front of those.
#pragma once

#include <string>
#include <vector>

#include "costs.hpp"
#include "problem.hpp"

namespace pipeedge {

// Layers that a host has loaded.
struct LoadedStage {
  static constexpr int kGone = -1;

  int host = kGone;  // kGone: a host that may not be used any longer
  int first = 0;     // half-open, from 0
  int last = 0;
  std::string dtype;  // empty: that of any plan
  int width = 0;      // of the link to the next stage
};

// The plan before. If it runs, its stages are in order.
struct Before {
  std::vector<LoadedStage> stages;
  bool runs = false;

  bool known() const { return !stages.empty(); }
};

// The seconds of each stage on a host that was profiled in a setting, [first * (layers + 1) + last]: infinite where it
// lacks the memory. What arrives is in the number type of the setting.
std::vector<double> stage_table(const Problem& problem, int host, int setting);

// The problem whose plans can be loaded beside the one that runs: a host takes only stages for which it has memory.
Problem beside(const Problem& problem, const Before& before);

// Adds what each stage takes beside the plan before it, and what has to be loaded.
void add_before(const Problem& problem, const Before& before, const std::vector<Stage>& stages, Costs& costs);

// A plan about as good as `found`, the best of beside(problem, before): with equivalent hosts exchanged so that the
// fewest bytes are loaded; if the plan before it runs, that one if it is as good, or else one that keeps the order of
// its hosts, as after the failure of a decoder.
std::vector<Stage> follow(const Problem& problem, const Before& before, const Options& options,
                          const std::vector<Stage>& found);

}  // namespace pipeedge
