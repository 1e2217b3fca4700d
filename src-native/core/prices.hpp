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

#include <memory>
#include <optional>
#include <vector>

#include "clock.hpp"
#include "matching.hpp"
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

struct PricingTask {
  int max_stages = 0;
  double cutoff = kInfinity;      // kLatency: stop once nothing below it remains
  double precision = 1e-4;        // stop when the bound is this close, relatively, to the LP's value
  const std::vector<double>* guess = nullptr;  // by class: prices of a similar network
  const Path* known = nullptr;    // kLatency: a schedule in this network, needed to begin
};

// Fills prices.rest for prices.of. Returns D(p); `arcs` is set to the cheapest path.
double price_paths(const Network& network, Prices& prices, std::vector<int>* arcs);

// Prices that spread the load: those of the mixture of paths with the least sum_r exp(sharpness *
// load_r), by Frank and Wolfe's method. The best bound looks at the busiest resources alone and says
// nothing about the others; these prices order the choices of a beam well everywhere. Stops early when
// the cuts of a path on the way, with other hosts, are a schedule: `matched`.
Prices spread_prices(const Network& network, double sharpness, int rounds, int max_stages,
                     std::optional<Path>* matched);

// The search for the best prices, which can be interrupted and taken up again.
class Pricer {
 public:
  Pricer(const Network& network, const PricingTask& task, const Clock& clock);
  ~Pricer();
  Pricer(const Pricer&) = delete;
  Pricer& operator=(const Pricer&) = delete;

  // Up to `rounds` more columns; false when nothing is left to gain.
  bool advance(int rounds);

  const Prices& best() const { return best_; }     // with the highest bound
  // Seconds (kLatency), or for kFeasibility the load of the busiest resource less 1.
  double bound() const { return bound_; }
  // Proven: no schedule within the capacities, or (kLatency) none below the cutoff.
  bool excluded() const { return excluded_; }
  // A schedule within the capacities that turned up on the way, the cheapest.
  const std::optional<Path>& found() const { return found_; }

 private:
  class Master;
  bool evaluate(std::vector<double> rows);
  void judge();
  bool finished() const { return excluded_ || (feasibility_ && found_.has_value()); }

  const Network& network_;
  const PricingTask task_;
  const Clock& clock_;
  const bool feasibility_;
  std::unique_ptr<Master> master_;
  Prices best_;
  double bound_ = -kInfinity;
  bool excluded_ = false;
  bool converged_ = false;
  std::optional<Matcher> matcher_;
  std::optional<Path> found_;
  double found_cost_ = kInfinity;
  std::vector<double> best_rows_;  // prices of the master's rows behind best_
  std::vector<int> path_;          // the cheapest path at the prices tried last
  double smoothing_ = 0.5;
};

}  // namespace pipeedge
