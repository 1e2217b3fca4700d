// Lagrangian prices: a bound from pricing hosts and amounts instead of limiting them.
//
// Give each resource r with n_r hosts a price p_r >= 0 per stage, and each limited amount a price for each unit. For
// any plan within the capacities and limits
//
//     least + sum_r p_r * used_r  >=  D(p) = cheapest path, which may use hosts, loss and seconds at will,
//
// and used_r <= n_r, so  least >= D(p) - sum_r p_r n_r. If the question is whether there is a plan at all, `least` is
// 0, and a positive right side proves that there is none. The best prices are the dual solution of the linear
// programme over mixtures of paths, which column generation finds (mixtures.hpp). The bound holds for any prices:
// rounding in the linear programme can make it weaker, but never wrong.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "clock.hpp"
#include "matching.hpp"
#include "mixtures.hpp"
#include "network.hpp"

namespace pipeedge {

struct Prices {
  std::vector<double> of_resource;           // of a stage there, including the price of a stage on any resource
  std::array<double, kAmounts> of_active{};  // of a unit of each active amount of the network
  double budget = 0;                         // of all hosts and stages that there are
  std::vector<double> rest;  // [cut * senders + sender]: cost of the cheapest path from there to the end

  double of(const Network& network, const double* amounts) const {
    switch (network.active()) {
      case 0: return 0;
      case 1: return of_active[0] * amounts[0];
      case 2: return of_active[0] * amounts[0] + of_active[1] * amounts[1];
      default: break;
    }
    double sum = of_active[0] * amounts[0] + of_active[1] * amounts[1];
    for (int k = 2; k < network.active(); ++k) {
      sum += of_active[static_cast<std::size_t>(k)] * amounts[k];
    }
    return sum;
  }
  double of_arc(const Network& network, int index) const {
    return of_resource[static_cast<std::size_t>(network.resource(network.arc(index)))] +
           of(network, network.amounts(index));
  }
  double at(const Network& network, int cut, int sender) const {
    return rest[static_cast<std::size_t>(cut) * static_cast<std::size_t>(network.senders()) +
                static_cast<std::size_t>(sender)];
  }
};

// Computes prices.rest from the other prices, and sets `steps` to the cheapest path; empty if there is none.
// Returns D(p).
double price_paths(const Network& network, Prices& prices, std::vector<Step>* steps);

// Prices of one amount alone: they bound what is still to come of it.
Prices amount_prices(const Network& network, Amount amount);

// A plan of the same microbatch size, as the linear programme sees it.
struct KnownPlan {
  std::vector<int> classes;  // of its stages
  Amounts amounts{};
};

// Good prices for another network of the same instance.
struct PriceMemory {
  std::vector<double> of_class;  // empty: nothing is known
  Amounts of_amount{};

  void remember(const Network& network, const Prices& prices);
  // The remembered prices for a network, whose classes the last one had, to make an amount small.
  Prices prices_for(const Network& network, Amount least) const;
};

struct PricingTask {
  int max_stages = 0;
  std::optional<Amount> least;         // to be made small; none: any plan will do
  double cutoff = kInfinity;           // of this amount: stop when no plan below it remains
  double precision = 1e-4;             // stop when the relative distance of the bound to the LP's value is this small
  const PriceMemory* guess = nullptr;  // without `least`
  const KnownPlan* known = nullptr;    // with `least`: a plan in this network to start from
};

// The search for the best prices, which can be interrupted and resumed.
class Pricer {
 public:
  Pricer(const Network& network, const PricingTask& task, const Clock& clock);

  // Adds up to `rounds` columns. Returns false when no improvement is left.
  bool advance(int rounds);

  const Prices& best() const { return best_; }  // those with the highest bound
  // Of the amount to be made small; without one, the load of the busiest row minus 1.
  double bound() const { return bound_; }
  // Whether it is proven that there is no plan within the limits or below the cutoff.
  bool excluded() const { return excluded_; }
  // The best plan within the limits that the search has met.
  const std::optional<Path>& found() const { return found_; }
  double found_least() const { return found_cost_; }  // its amount to be made small

  // Prices that balance the load: those of the mixture of paths with the smallest sum_r exp(sharpness * load_r), by
  // the Frank-Wolfe method. The prices of the best bound only involve the busiest resources; these rank the choices
  // of a search well for all. Stops early with found() if it meets a plan.
  Prices spread(double sharpness, int rounds);

 private:
  std::vector<double> usage(const std::vector<Step>& steps) const;
  double cost(const std::vector<double>& used) const { return task_.least ? used.back() : 0; }
  bool within(const std::vector<double>& used) const;
  Prices prices_of(const std::vector<double>& rows) const;
  bool evaluate(std::vector<double> rows);
  void judge();
  void accept(const std::vector<Step>& steps);
  bool finished() const { return excluded_ || (!task_.least && found_.has_value()); }

  const Network& network_;
  const PricingTask task_;
  const Clock& clock_;
  bool stage_limit_ = false;
  std::vector<std::size_t> limited_;  // active amounts with rows
  // Rows: hosts of a resource; the stage limit, if it is tighter than those; the part of each limited amount.
  std::vector<double> capacity_;
  std::optional<Mixtures> mixtures_;
  Prices best_;
  double bound_ = -kInfinity;
  bool excluded_ = false;
  bool converged_ = false;
  std::optional<Matcher> matcher_;
  std::optional<Path> found_;
  double found_cost_ = kInfinity;
  std::vector<double> best_rows_;  // prices of the rows that give best_
  std::vector<Step> steps_;        // the cheapest path at the last prices
  Smoothing smoothing_;
};

}  // namespace pipeedge
