// The values between which a bottleneck can lie: there are only as many as stages and links.
#pragma once

#include <optional>
#include <vector>

#include "instance.hpp"

namespace pipeedge {

// Every cost of a stage or link in [low, high), clearly below high.
std::vector<double> costs_between(const Instance& instance, double low, double high);

// The median of these costs, for bisection; none where there are none.
std::optional<double> median_cost(const Instance& instance, double low, double high);

}  // namespace pipeedge
