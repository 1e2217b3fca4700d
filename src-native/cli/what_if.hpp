// Changes to a cluster, for "what if" questions. Pure.
#pragma once

#include "../core/problem.hpp"
#include "options.hpp"

namespace pipeedge::cli {

// Returns `problem` with the change applied, which may have no hosts. Throws UsageError if the change names
// an unknown type or host, or removes the data host.
Problem changed(const Problem& problem, const Change& change);

}  // namespace pipeedge::cli
