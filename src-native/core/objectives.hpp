// How each objective is searched for. All improve the best plan and its bounds until it is proven or the clock ends it.
#pragma once

#include <optional>
#include <vector>

#include "incumbent.hpp"

namespace pipeedge {

// Finds some plan of a microbatch size, or proves that there is none.
Answer find_any(Incumbent& incumbent, int s);

// A time of a stage or link in [low, high) that halves those there are; none if there is none.
std::optional<double> middle_period(const Instance& instance, double low, double high);

void maximise_throughput(Incumbent& incumbent);
void minimise_latency(Incumbent& incumbent);
void minimise_energy(Incumbent& incumbent);

// Makes an amount of the best plan as small as a limited effort can, within limits that the plan keeps.
void lower(Incumbent& incumbent, const Limits& limits, Amount amount, int max_stages);

// Gives each link of a plan the most bits with which its period stays within this one and nothing else but the latency
// grows.
void widen_links(const Problem& problem, const LinkTable& links, double period_s, std::vector<Stage>& stages);

}  // namespace pipeedge
