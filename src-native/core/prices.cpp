#include "prices.hpp"

#include <algorithm>
#include <cmath>

#include "mixtures.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

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
      // First the best stage of this class, then every sender that may reach it.
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

Prices spread_prices(const Network& network, double sharpness, int rounds, int max_stages,
                     std::optional<Path>* matched) {
  const std::size_t resources = at(network.resources());
  std::optional<Matcher> matcher;
  if (network.senders() == 1) matcher.emplace(network);
  // The last load belongs to the stage limit.
  std::vector<double> capacity;
  for (int r = 0; r < network.resources(); ++r) {
    capacity.push_back(static_cast<double>(std::min(network.capacity(r), network.layers())));
  }
  capacity.push_back(static_cast<double>(max_stages));
  std::vector<double> load(capacity.size(), 0);
  const bool limited = max_stages < network.layers();

  Prices prices;
  std::vector<int> arcs;
  for (int round = 0;; ++round) {
    const double busiest = *std::max_element(load.begin(), load.end());
    const auto price = [&](std::size_t r) { return std::exp(sharpness * (load[r] - busiest)) / capacity[r]; };
    const double stage_price = limited ? price(resources) : 0;
    prices.of.assign(resources, stage_price);
    prices.budget = stage_price * capacity.back();
    for (std::size_t r = 0; r < resources; ++r) {
      prices.of[r] += price(r);
      prices.budget += price(r) * capacity[r];
    }
    price_paths(network, prices, &arcs);
    if (round == rounds) return prices;
    if (matcher && static_cast<int>(arcs.size()) <= max_stages) {
      *matched = matcher->assign(network.path(arcs));
      if (*matched) return prices;
    }
    const double step = 2.0 / (round + 2.0);
    for (double& l : load) l *= 1 - step;
    for (const int arc : arcs) {
      const std::size_t r = at(network.arc(arc).resource);
      load[r] += step / capacity[r];
    }
    if (limited) load.back() += step * static_cast<double>(arcs.size()) / capacity.back();
  }
}

// What the rows of the linear programme stand for: hosts of a resource, then the stage limit, if it is tighter than
// the capacities.
class Pricer::Rows {
 public:
  Rows(const Network& network, int max_stages) : network_(network) {
    double all = 0;
    for (int r = 0; r < network.resources(); ++r) {
      capacity_.push_back(static_cast<double>(std::min(network.capacity(r), network.layers())));
      all += capacity_.back();
    }
    stage_limit_ = max_stages < network.layers() && static_cast<double>(max_stages) < all;
    if (stage_limit_) capacity_.push_back(static_cast<double>(max_stages));
  }

  const std::vector<double>& capacity() const { return capacity_; }

  // Counts how often a path uses each row.
  std::vector<double> usage(const std::vector<int>& arcs) const {
    std::vector<double> used(capacity_.size(), 0);
    for (const int arc : arcs) used[at(network_.arc(arc).resource)] += 1;
    if (stage_limit_) used.back() = static_cast<double>(arcs.size());
    return used;
  }

  bool within(const std::vector<double>& used) const {
    for (std::size_t r = 0; r < used.size(); ++r) {
      if (used[r] > capacity_[r]) return false;
    }
    return true;
  }

  // Converts prices of rows to prices of a stage on each resource.
  Prices arc_prices(const std::vector<double>& rows) const {
    Prices prices;
    prices.of.assign(rows.begin(), rows.begin() + network_.resources());
    if (stage_limit_) {
      for (double& price : prices.of) price += rows.back();
    }
    prices.budget = worth(rows, capacity_);
    return prices;
  }

 private:
  const Network& network_;
  bool stage_limit_ = false;
  std::vector<double> capacity_;
};

Pricer::Pricer(const Network& network, const PricingTask& task, const Clock& clock)
    : network_(network), task_(task), clock_(clock), feasibility_(task.known == nullptr),
      rows_(std::make_unique<Rows>(network, task.max_stages)), mixtures_(rows_->capacity()) {
  if (network.min_stages(0) > task.max_stages) {
    bound_ = kInfinity;
    excluded_ = true;
    return;
  }
  if (feasibility_ && network.senders() == 1) matcher_.emplace(network);
  std::vector<double> first(rows_->capacity().size(), 0);
  if (feasibility_) {
    if (task.guess != nullptr) {
      for (int r = 0; r < network.resources(); ++r) first[at(r)] = (*task.guess)[at(network.first_class(r))];
    }
    if (worth(first, rows_->capacity()) <= 0) std::fill(first.begin(), first.end(), 1.0);
  }
  evaluate(std::move(first));
  judge();
  if (finished()) return;
  if (feasibility_) {
    mixtures_.begin_load(rows_->usage(path_));
  } else {
    const std::vector<int> known = arcs_of(network, *task.known);
    mixtures_.begin_cost(rows_->usage(known), path_cost(network, known));
    mixtures_.add(rows_->usage(path_), path_cost(network, path_));
  }
}

Pricer::~Pricer() = default;

// Computes the Lagrangian bound for prices of rows. Returns whether it is the best so far.
bool Pricer::evaluate(std::vector<double> rows) {
  if (feasibility_) {
    const double total = worth(rows, rows_->capacity());
    for (double& price : rows) price /= total;
  }
  Prices prices = rows_->arc_prices(rows);
  const double bound = price_paths(network_, prices, &path_) - prices.budget;
  if (!(bound > bound_)) return false;
  bound_ = bound;
  best_ = std::move(prices);
  best_rows_ = std::move(rows);
  return true;
}

// Conclusions of the last evaluation.
void Pricer::judge() {
  if (std::isinf(bound_)) {
    excluded_ = true;
    return;
  }
  const double margin = kRelativeTolerance * (feasibility_ ? 1 : std::abs(task_.cutoff));
  excluded_ = feasibility_ ? bound_ > margin : bound_ >= task_.cutoff - margin;
  if (excluded_) return;
  if (rows_->within(rows_->usage(path_))) {
    const double cost = path_cost(network_, path_);
    if (cost < found_cost_) {
      found_cost_ = cost;
      found_ = network_.path(path_);
    }
  } else if (matcher_ && static_cast<int>(path_.size()) <= task_.max_stages) {
    found_ = matcher_->assign(network_.path(path_));
  }
}

bool Pricer::advance(int rounds) {
  for (int round = 0; round < rounds && !finished() && !converged_ && !clock_.expired(); ++round) {
    mixtures_.optimise();
    const std::vector<double> latest = mixtures_.prices();
    if (feasibility_ && worth(latest, rows_->capacity()) <= 0) {
      converged_ = true;
      break;
    }
    const bool better = evaluate(smoothing_.blend(best_rows_, latest));
    judge();
    const double value = mixtures_.objective() - (feasibility_ ? 1 : 0);
    const double scale = feasibility_ ? 1 : std::abs(value);
    if (finished() || value - bound_ <= task_.precision * scale) {
      converged_ = true;
    } else if (mixtures_.add(rows_->usage(path_), feasibility_ ? 0 : path_cost(network_, path_))) {
      smoothing_.advanced(better);
    } else {
      converged_ = !smoothing_.mispriced();
    }
  }
  return !finished() && !converged_;
}

}  // namespace pipeedge
