// Changes to a cluster, for "what if" questions. Pure.
#pragma once

#include <string>

#include "../core/problem.hpp"
#include "options.hpp"

namespace pipeedge::cli {

// Returns `problem` with the change applied, which may have no hosts. Throws UsageError if the change names
// an unknown type or host, or removes the data host.
Problem changed(const Problem& problem, const Change& change);

// `problem` without one of its hosts, by index, and without its links.
Problem without_host(const Problem& problem, int host);

// The figure after one change or several. `solution` is empty if there is no schedule; `why` gives the reason.
struct WhatIf {
  std::string text;                    // "--add-host RCC=2"
  bool feasible = false;
  Solution solution;
  double items_per_s = 0;
  std::string why;
};

}  // namespace pipeedge::cli
