// The objective kThroughput: the least bottleneck, then the fewest hosts, then a stage on the data host, then
// the least latency.
#pragma once

#include "clock.hpp"
#include "feasibility.hpp"
#include "incumbent.hpp"

namespace pipeedge {

// Improves a schedule and its bounds until it is proven or the clock ends it.
void maximise_throughput(const Instance& instance, const Clock& clock, Feasibility& feasibility, Incumbent& best);

}  // namespace pipeedge
