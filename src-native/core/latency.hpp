// The objective kLatency: the least latency, then the least bottleneck, then the fewest hosts, then a stage on
// the data host.
#pragma once

#include "clock.hpp"
#include "incumbent.hpp"

namespace pipeedge {

// Improves a schedule and its bounds until it is proven or the clock ends it.
void minimise_latency(const Instance& instance, const Clock& clock, Incumbent& best);

}  // namespace pipeedge
