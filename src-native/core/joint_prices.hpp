// Prices that prove that no plan keeps its limits, or guide the search for one.
//
// Rows are the classes of hosts (right side: their number n_r) and the amounts with a limit (the limit itself).
// With a price p_r >= 0 for each unit of a row, every plan within all limits has
//
//     sum_r p_r * used_r  <=  sum_r p_r * n_r  =: budget
//
// and at least the price of the cheapest path, which may use hosts, loss and seconds at will. If that is above
// the budget, there is no plan. The best prices come from the linear programme over mixtures of paths that
// minimises the load of the fullest row (mixtures.hpp). Rounding can make a bound weaker, but never wrong.
#pragma once

#include <optional>
#include <vector>

#include "clock.hpp"
#include "joint_network.hpp"
#include "mixtures.hpp"

namespace pipeedge {

struct JointPrices {
  std::vector<double> of_class;
  Amounts of_amount{};
  double budget = 0;
  std::vector<double> rest;            // [cut * senders + sender]: price of the cheapest path from there to the end

  double of(const JointArc& arc) const {
    return of(arc.amount) + of_class[static_cast<std::size_t>(arc.cls)];
  }
  double of(const Amounts& amount) const {
    return of_amount[0] * amount[0] + of_amount[1] * amount[1] + of_amount[2] * amount[2];
  }
};

// Computes prices.rest from the other prices, and sets `path` to the cheapest path; empty if there is none.
// Returns its price.
double price_paths(const JointNetwork& network, JointPrices& prices, JointPath* path);

// Prices of one amount alone: they bound what is still to come of it.
JointPrices amount_prices(const JointNetwork& network, Amount amount);

class JointPricer {
 public:
  // `guess`: prices that were good for a similar network, or null.
  JointPricer(const JointNetwork& network, const JointPrices* guess, const Clock& clock);

  // Adds up to `rounds` columns. Returns false when no improvement is left.
  bool advance(int rounds, double precision);

  const JointPrices& best() const { return best_; }
  // Whether it is proven that there is no plan within the limits.
  bool excluded() const { return excluded_; }
  // A plan within the limits that the search has met.
  const std::optional<JointPath>& found() const { return found_; }
  // Prices that balance the load of all rows, for ranking the choices of a search (Frank-Wolfe method).
  JointPrices spread(double sharpness, int rounds);

 private:
  std::vector<double> usage(const JointPath& path) const;
  std::vector<double> load_of(const JointPath& path) const;
  bool within(const std::vector<double>& used) const;
  JointPrices prices_of(const std::vector<double>& rows) const;
  bool evaluate(std::vector<double> rows);
  void judge();

  const JointNetwork& network_;
  const Clock& clock_;
  std::vector<Amount> limited_;        // amounts with rows, after those of the classes
  std::vector<double> capacity_;       // by row
  std::optional<Mixtures> mixtures_;
  JointPrices best_;
  std::vector<double> best_rows_;
  double bound_ = -kInfinity;
  Smoothing smoothing_;
  bool excluded_ = false;
  bool converged_ = false;
  JointPath path_;                     // the cheapest path at the last prices
  std::optional<JointPath> found_;
};

}  // namespace pipeedge
