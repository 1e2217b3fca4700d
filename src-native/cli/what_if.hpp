// Changes to a cluster, for "what if" questions. Pure.
#pragma once

#include "../core/problem.hpp"
#include "options.hpp"

namespace pipeedge::cli {

// `problem` with the change made. Throws UsageError where it names a type or host that is not there,
// or removes the data host. It may leave no host at all.
Problem changed(const Problem& problem, const Change& change);

}  // namespace pipeedge::cli
