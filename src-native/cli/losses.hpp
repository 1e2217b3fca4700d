// What the loss of each host would cost, and whether the loss of any one of them can be taken.
//
// After a loss, a run goes on with the best schedule for the hosts that are left. So whether host h can be
// lost does not depend on the schedule: if the layers fit on the others, every schedule survives its loss; if
// they do not, no feasible schedule is without h, and none survives it. A schedule that survives every loss is
// therefore the best schedule, or there is none, and both are proven by solving the problem without each host.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "../core/problem.hpp"
#include "text.hpp"
#include "what_if.hpp"

namespace pipeedge::cli {

// The loss of one host.
struct Loss {
  enum class Effect {
    kNone,                             // no stage is there
    kContinues,                        // the others run all layers
    kEnds,                             // the others cannot
    kUnknown,                          // none was found within the time limit, and none could be ruled out
  };

  int host = 0;                        // index into Problem::hosts
  Effect effect = Effect::kNone;
  bool of_data_host = false;           // ends every run, whatever fits
  WhatIf after;                        // schedule of the others, or why there is none; empty for kNone
};

// Schedules a problem and says why, if there is no schedule.
using Answer = std::function<WhatIf(const Problem&)>;

// One entry for each host, in their order. Hosts that are equivalent are asked about once.
std::vector<Loss> find_losses(const Problem& problem, const Solution& now, const Answer& answer);

// The first host, apart from the data host, whose loss cannot be taken or is undecided; null if there is none.
const Loss* first_fatal(const std::vector<Loss>& losses);
// "without rcc-0, 12.0 MB of memory are missing: ...", for such a host.
std::string fatal_text(const Problem& problem, const Loss& loss);

// One line for each kind of loss. `items_per_s`: throughput without a loss.
std::string losses_text(const Problem& problem, const std::vector<Loss>& losses, Objective objective,
                        double items_per_s);
void write_losses(JsonWriter& json, const Problem& problem, const std::vector<Loss>& losses, double items_per_s);

}  // namespace pipeedge::cli
