#include "prices.hpp"

#include <algorithm>
#include <cmath>

#include "simplex.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

// The linear programme over the paths found so far.
//
//   kFeasibility   min load   used_r - load n_r <= 0    the paths' shares sum to 1
//   kLatency       min cost   used_r            <= n_r
class Master {
 public:
  Master(const Network& network, int max_stages)
      : network_(network), stage_row_(network.resources()), share_row_(network.resources() + 1) {
    for (int r = 0; r < network.resources(); ++r) {
      capacity_.push_back(static_cast<double>(std::min(network.capacity(r), network.layers())));
    }
    capacity_.push_back(static_cast<double>(max_stages));
  }

  const std::vector<double>& capacity() const { return capacity_; }

  // How often a path uses each resource, and its number of stages.
  std::vector<double> usage(const std::vector<int>& arcs) const {
    std::vector<double> used(capacity_.size(), 0);
    for (const int arc : arcs) used[at(network_.arc(arc).resource)] += 1;
    used[at(stage_row_)] = static_cast<double>(arcs.size());
    return used;
  }

  bool within(const std::vector<double>& used) const {
    for (std::size_t r = 0; r < used.size(); ++r) {
      if (used[r] > capacity_[r]) return false;
    }
    return true;
  }

  Simplex begin_feasibility(const std::vector<double>& used) const {
    std::vector<double> right_side(capacity_.size() + 1, 0);
    right_side.back() = 1;
    Simplex simplex(std::move(right_side));
    simplex.bar(share_row_);
    Column load{1, {}};
    int worst = 0;
    for (int r = 0; r < share_row_; ++r) {
      load.entries.emplace_back(r, -capacity_[at(r)]);
      if (used[at(r)] * capacity_[at(worst)] > used[at(worst)] * capacity_[at(r)]) worst = r;
    }
    const int load_column = simplex.add(std::move(load));
    simplex.force(simplex.add(column(used, 0)), share_row_);
    simplex.force(load_column, worst);
    return simplex;
  }

  Simplex begin_latency(const std::vector<double>& used, double cost) const {
    std::vector<double> right_side = capacity_;
    right_side.push_back(1);
    Simplex simplex(std::move(right_side));
    simplex.bar(share_row_);
    simplex.force(simplex.add(column(used, cost)), share_row_);
    return simplex;
  }

  Column column(const std::vector<double>& used, double cost) const {
    Column column{cost, {}};
    for (std::size_t r = 0; r < used.size(); ++r) {
      if (used[r] > 0) column.entries.emplace_back(static_cast<int>(r), used[r]);
    }
    column.entries.emplace_back(share_row_, 1.0);
    return column;
  }

  // Row prices: of each resource, and of any stage.
  std::vector<double> prices(const Simplex& simplex) const {
    std::vector<double> prices;
    for (int r = 0; r < share_row_; ++r) prices.push_back(std::max(0.0, -simplex.dual(r)));
    return prices;
  }

 private:
  const Network& network_;
  int stage_row_;
  int share_row_;
  std::vector<double> capacity_;  // by resource, then the stage limit
};

double worth(const std::vector<double>& row_prices, const std::vector<double>& capacity) {
  double sum = 0;
  for (std::size_t r = 0; r < capacity.size(); ++r) sum += row_prices[r] * capacity[r];
  return sum;
}

Prices arc_prices(const std::vector<double>& row_prices, double budget) {
  Prices prices;
  prices.of.assign(row_prices.begin(), row_prices.end() - 1);
  for (double& price : prices.of) price += row_prices.back();
  prices.budget = budget;
  return prices;
}

double path_cost(const Network& network, const std::vector<int>& arcs) {
  double cost = 0;
  int cut = 0;
  int sender = 0;
  for (const int index : arcs) {
    const Arc& arc = network.arc(index);
    if (cut > 0) cost += network.hop(sender, arc.cls, cut);
    cost += arc.cost;
    cut = arc.to;
    sender = arc.sender;
  }
  return cost;
}

std::vector<int> arcs_of(const Network& network, const Path& path) {
  std::vector<int> arcs;
  for (const Step& step : path) {
    const Arc* begin = network.begin(step.first);
    const Arc* arc = std::find_if(begin, network.end(step.first), [&](const Arc& a) {
      return a.cls == step.cls && a.to == step.last;
    });
    if (arc == network.end(step.first)) return {};
    arcs.push_back(network.first_arc(step.first) + static_cast<int>(arc - begin));
  }
  return arcs;
}

}  // namespace

double price_paths(const Network& network, Prices& prices, std::vector<int>* arcs) {
  const int layers = network.layers();
  const int senders = network.senders();
  const std::size_t width = at(senders);
  prices.rest.assign(at(layers + 1) * width, kInfinity);
  std::vector<std::int32_t> choice(at(layers + 1) * width, -1);
  std::fill_n(prices.rest.begin() + static_cast<std::ptrdiff_t>(at(layers) * width), width, 0.0);

  for (int cut = layers - 1; cut >= 0; --cut) {
    const std::size_t row = at(cut) * width;
    const Arc* end = network.end(cut);
    int index = network.first_arc(cut);
    for (const Arc* arc = network.begin(cut); arc != end;) {
      // The best stage of this class; then every sender that may reach it.
      const std::int32_t cls = arc->cls;
      const double price = prices.of[at(arc->resource)];
      double best = kInfinity;
      std::int32_t best_arc = -1;
      for (; arc != end && arc->cls == cls; ++arc, ++index) {
        const double cost = arc->cost + price + prices.rest[at(arc->to) * width + at(arc->sender)];
        if (cost < best) {
          best = cost;
          best_arc = index;
        }
      }
      if (best_arc < 0) continue;
      const int count = cut == 0 ? 1 : senders;
      for (int sender = 0; sender < count; ++sender) {
        const double cost = cut == 0 ? best : best + network.hop(sender, cls, cut);
        if (cost < prices.rest[row + at(sender)]) {
          prices.rest[row + at(sender)] = cost;
          choice[row + at(sender)] = best_arc;
        }
      }
    }
  }
  if (arcs != nullptr) {
    arcs->clear();
    int sender = 0;
    for (int cut = 0; cut < layers;) {
      const std::int32_t index = choice[at(cut) * width + at(sender)];
      if (index < 0) break;
      arcs->push_back(index);
      cut = network.arc(index).to;
      sender = network.arc(index).sender;
    }
  }
  return prices.rest[0];
}

Pricing find_prices(const Network& network, const PricingTask& task, const Clock& clock) {
  const bool feasibility = task.known == nullptr;
  const Master master(network, task.max_stages);
  const std::vector<double>& capacity = master.capacity();
  Pricing result;
  result.bound = -kInfinity;
  if (network.min_stages(0) > task.max_stages) {
    result.bound = kInfinity;
    result.excluded = true;
    return result;
  }

  std::vector<double> best_rows(capacity.size(), 0);
  std::vector<int> arcs;

  // Lagrangian bound of row prices; keeps the best, and any path within the capacities.
  const auto evaluate = [&](std::vector<double> rows) {
    if (feasibility) {
      const double total = worth(rows, capacity);
      for (double& price : rows) price /= total;
    }
    Prices prices = arc_prices(rows, worth(rows, capacity));
    const double cheapest = price_paths(network, prices, &arcs);
    const double bound = cheapest - prices.budget;
    const bool better = bound > result.bound;
    if (better) {
      result.bound = bound;
      result.best = std::move(prices);
      best_rows = std::move(rows);
    }
    return better;
  };
  const auto settled = [&] {
    const double margin = kRelativeTolerance * (feasibility ? 1 : std::abs(task.cutoff));
    return feasibility ? result.bound > margin : result.bound >= task.cutoff - margin;
  };
  const auto keep_if_feasible = [&](const std::vector<double>& used) {
    if (!master.within(used)) return;
    const double cost = path_cost(network, arcs);
    if (cost < result.arcs_cost) {
      result.arcs_cost = cost;
      result.arcs = arcs;
    }
  };

  std::vector<double> rows(capacity.size(), 0);
  if (feasibility) {
    if (task.guess != nullptr) {
      for (int r = 0; r < network.resources(); ++r) rows[at(r)] = (*task.guess)[at(network.first_class(r))];
    }
    if (worth(rows, capacity) <= 0) std::fill(rows.begin(), rows.end() - 1, 1.0);
  }
  evaluate(rows);
  if (std::isinf(result.best.rest[0])) {
    result.excluded = true;
    return result;
  }
  std::vector<double> used = master.usage(arcs);
  keep_if_feasible(used);
  if (settled()) {
    result.excluded = true;
    return result;
  }
  if (feasibility && result.arcs) return result;

  Simplex simplex = [&] {
    if (feasibility) return master.begin_feasibility(used);
    const std::vector<int> known = arcs_of(network, *task.known);
    Simplex begun = master.begin_latency(master.usage(known), path_cost(network, known));
    begun.add(master.column(used, path_cost(network, arcs)));
    return begun;
  }();

  double smoothing = 0.5;
  for (int round = 0; round < task.max_rounds && !clock.expired(); ++round) {
    simplex.optimise(20 + network.resources());
    const std::vector<double> exact = master.prices(simplex);
    if (feasibility && worth(exact, capacity) <= 0) break;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r] = smoothing * best_rows[r] + (1 - smoothing) * exact[r];
    }
    const bool better = evaluate(rows);
    used = master.usage(arcs);
    keep_if_feasible(used);
    if (settled()) {
      result.excluded = true;
      return result;
    }
    if (feasibility && result.arcs) return result;

    const double value = feasibility ? simplex.objective() - 1 : simplex.objective();
    if (value - result.bound <= task.precision * (feasibility ? 1 : std::abs(value))) break;

    Column column = master.column(used, feasibility ? 0 : path_cost(network, arcs));
    double reduced = column.cost;
    for (const auto& [row, entry] : column.entries) reduced -= simplex.dual(row) * entry;
    if (reduced < -1e-12) {
      simplex.add(std::move(column));
      smoothing = better ? std::min(0.9, smoothing + 0.1) : std::max(0.0, smoothing - 0.1);
    } else if (smoothing == 0) {
      break;
    } else {
      smoothing = smoothing > 0.3 ? smoothing / 2 : 0;  // mispriced: go closer to the master's own
    }
  }
  return result;
}

}  // namespace pipeedge
