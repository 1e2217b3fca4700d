// Lagrangian prices: a bound from pricing hosts instead of limiting their number.
//
// Give each resource r with n_r hosts a price p_r >= 0 per stage. For any schedule within the capacities
//
//     seconds + sum_r p_r * used_r  >=  D(p) = cheapest path, which may reuse hosts at will,
//
// and used_r <= n_r, so  seconds >= D(p) - sum_r p_r n_r. For feasibility, where seconds are 0, a positive
// right side proves that no schedule exists. The best prices are the dual solution of the linear programme
// over mixtures of paths, which column generation finds (mixtures.hpp). The bound holds for any prices: rounding
// in the linear programme can make it weaker, but never wrong.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "clock.hpp"
#include "matching.hpp"
#include "mixtures.hpp"
#include "network.hpp"

namespace pipeedge {

// A price for the arcs of each resource, and the value of all hosts at these prices.
struct Prices {
  std::vector<double> of;         // by resource, including the price of a stage on any resource
  double budget = 0;              // sum_r p_r n_r (+ stage price * stage limit)
  std::vector<double> rest;       // [cut * senders + sender]: cost of the cheapest path from there to the end

  double at(const Network& network, int cut, int sender) const {
    return rest[static_cast<std::size_t>(cut * network.senders() + sender)];
  }
};

struct PricingTask {
  int max_stages = 0;
  double cutoff = kInfinity;      // kLatency: stop when no schedule below it remains
  double precision = 1e-4;        // stop when the relative distance of the bound to the LP's value is this small
  const std::vector<double>* guess = nullptr;  // prices of a similar network, by class
  const Path* known = nullptr;    // kLatency: a schedule in this network to start from
};

// Computes prices.rest from prices.of, and sets `arcs` to the cheapest path. Returns D(p).
double price_paths(const Network& network, Prices& prices, std::vector<int>* arcs);

// Prices that balance the load: those of the mixture of paths with the smallest sum_r exp(sharpness *
// load_r), by the Frank-Wolfe method. The prices of the best bound only involve the busiest resources;
// these rank the choices of a beam search well for all. Stops early if the cuts of a path that it
// meets form a schedule with other hosts, which is returned as `matched`.
Prices spread_prices(const Network& network, double sharpness, int rounds, int max_stages,
                     std::optional<Path>* matched);

// The search for the best prices, which can be interrupted and resumed.
class Pricer {
 public:
  Pricer(const Network& network, const PricingTask& task, const Clock& clock);
  ~Pricer();
  Pricer(const Pricer&) = delete;
  Pricer& operator=(const Pricer&) = delete;

  // Adds up to `rounds` columns. Returns false when no improvement is left.
  bool advance(int rounds);

  const Prices& best() const { return best_; }     // those with the highest bound
  // For kLatency in seconds; for kFeasibility, the load of the busiest resource minus 1.
  double bound() const { return bound_; }
  // Whether it is proven that no schedule exists within the capacities or, for kLatency, below the cutoff.
  bool excluded() const { return excluded_; }
  // The cheapest schedule within the capacities that the search has met.
  const std::optional<Path>& found() const { return found_; }

 private:
  class Rows;
  bool evaluate(std::vector<double> rows);
  void judge();
  bool finished() const { return excluded_ || (feasibility_ && found_.has_value()); }

  const Network& network_;
  const PricingTask task_;
  const Clock& clock_;
  const bool feasibility_;
  std::unique_ptr<Rows> rows_;
  Mixtures mixtures_;
  Prices best_;
  double bound_ = -kInfinity;
  bool excluded_ = false;
  bool converged_ = false;
  std::optional<Matcher> matcher_;
  std::optional<Path> found_;
  double found_cost_ = kInfinity;
  std::vector<double> best_rows_;  // prices of the rows that give best_
  std::vector<int> path_;          // the cheapest path at the last prices
  Smoothing smoothing_;
};

}  // namespace pipeedge
