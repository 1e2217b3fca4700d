// Lagrangian prices: a bound from paying for hosts instead of counting them.
//
// Give each resource r with n_r hosts a price p_r >= 0 a stage. For any schedule within the capacities
//
//     seconds + sum_r p_r * used_r  >=  D(p) = cheapest path, however often it uses a host,
//
// and used_r <= n_r, so  seconds >= D(p) - sum_r p_r n_r. With no seconds to count (feasibility) a
// positive right side proves that no schedule exists. The best prices are the dual of the linear
// programme that mixes paths; they are found by column generation (Dantzig and Wolfe 1960), its
// prices smoothed towards the best seen so far (Wentges 1997). Whatever the prices, the bound holds:
// rounding in the linear programme can make it weaker, never wrong.
#pragma once

#include <optional>
#include <vector>

#include "clock.hpp"
#include "network.hpp"

namespace pipeedge {

// One price an arc of each resource, and what all hosts together are worth at these prices.
struct Prices {
  std::vector<double> of;         // by resource, the price of a stage (of any resource) included
  double budget = 0;              // sum_r p_r n_r (+ stage price * stage limit)
  std::vector<double> rest;       // [cut * senders + sender]: cheapest way from there to the end

  double at(const Network& network, int cut, int sender) const {
    return rest[static_cast<std::size_t>(cut * network.senders() + sender)];
  }
};

struct Pricing {
  Prices best;                    // with the highest bound
  double bound = 0;               // seconds (kLatency) or, for kFeasibility, > 0: no schedule exists
  bool excluded = false;          // proven: nothing within the capacities, or nothing below `cutoff`
  std::optional<std::vector<int>> arcs;  // a path within the capacities that turned up on the way
  double arcs_cost = kInfinity;
};

struct PricingTask {
  int max_stages = 0;
  double cutoff = kInfinity;      // kLatency: stop once nothing below it remains
  double precision = 1e-4;        // stop when the bound is this close, relatively, to the LP's value
  int max_rounds = 1000;
  const std::vector<double>* guess = nullptr;  // by class: prices of a similar network
  const Path* known = nullptr;    // kLatency: a schedule in this network, needed to begin
};

// Fills prices.rest for prices.of. Returns D(p); `arcs` is set to the cheapest path.
double price_paths(const Network& network, Prices& prices, std::vector<int>* arcs);

Pricing find_prices(const Network& network, const PricingTask& task, const Clock& clock);

}  // namespace pipeedge
