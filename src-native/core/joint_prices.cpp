#include "joint_prices.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

// The cheapest continuation from a cut for each sender, with what it consists of.
class Continuations {
 public:
  Continuations(const JointNetwork& network, JointPrices& prices)
      : network_(network), instance_(network.instance()), prices_(prices), levels_(at(instance_.levels())),
        senders_(at(instance_.senders())) {
    const std::size_t size = (at(network.layers()) + 1) * senders_;
    prices_.rest.assign(size, kInfinity);
    std::fill_n(prices_.rest.begin() + static_cast<std::ptrdiff_t>(size - senders_), senders_, 0.0);
    choice_.assign(size, {-1, -1});
    cheapest_.resize(at(instance_.groups()) * levels_);
  }

  void settle(int cut) {
    price_arcs(cut);
    const std::size_t row = at(cut) * senders_;
    for (int sender = 0; sender < (cut == 0 ? 1 : instance_.senders()); ++sender) {
      double& best = prices_.rest[row + at(sender)];
      for (int group = 0; group < instance_.groups(); ++group) {
        const Cheapest& next = cheapest_[at(group) * levels_ + at(cut == 0 ? 0 : instance_.level_of(sender))];
        if (next.arc < 0) continue;
        if (cut == 0) {
          if (next.price < best) best = next.price, choice_[row] = {next.arc, -1};
          continue;
        }
        for (int hop = network_.first_hop(cut, sender, group); hop < network_.end_hop(cut, sender, group); ++hop) {
          const double price = next.price + prices_.of(network_.hop(hop).amount);
          if (price < best) best = price, choice_[row + at(sender)] = {next.arc, hop};
        }
      }
    }
  }

  JointPath path() const {
    JointPath path;
    int sender = 0;
    for (int cut = 0; cut < network_.layers();) {
      const JointStep& step = choice_[at(cut) * senders_ + at(sender)];
      if (step.arc < 0) return {};
      path.push_back(step);
      cut = network_.arc(step.arc).to;
      sender = network_.arc(step.arc).sender;
    }
    return path;
  }

 private:
  struct Cheapest {
    double price = kInfinity;
    int arc = -1;
  };

  // The cheapest arc of each group that takes values of each level.
  void price_arcs(int cut) {
    std::fill(cheapest_.begin(), cheapest_.end(), Cheapest{});
    for (int index = network_.first_arc(cut); index < network_.end_arc(cut); ++index) {
      const JointArc& arc = network_.arc(index);
      const double price = prices_.of(arc) + prices_.rest[at(arc.to) * senders_ + at(arc.sender)];
      for (int level = 0; level <= arc.room; ++level) {
        Cheapest& best = cheapest_[at(arc.group) * levels_ + at(level)];
        if (price < best.price) best = {price, index};
      }
    }
  }

  const JointNetwork& network_;
  const JointInstance& instance_;
  JointPrices& prices_;
  std::size_t levels_, senders_;
  std::vector<JointStep> choice_;
  std::vector<Cheapest> cheapest_;
};

}  // namespace

double price_paths(const JointNetwork& network, JointPrices& prices, JointPath* path) {
  Continuations continuations(network, prices);
  for (int cut = network.layers() - 1; cut >= 0; --cut) continuations.settle(cut);
  if (path != nullptr) *path = continuations.path();
  return prices.rest[0];
}

JointPrices amount_prices(const JointNetwork& network, Amount amount) {
  JointPrices prices;
  prices.of_class.assign(at(network.instance().classes()), 0);
  prices.of_amount[amount] = 1;
  prices.budget = network.limits().most[amount];
  price_paths(network, prices, nullptr);
  return prices;
}

JointPricer::JointPricer(const JointNetwork& network, const JointPrices* guess, const Clock& clock)
    : network_(network), clock_(clock) {
  const JointInstance& instance = network.instance();
  for (int cls = 0; cls < instance.classes(); ++cls) {
    capacity_.push_back(static_cast<double>(std::min(instance.count(cls), network.layers())));
  }
  for (const Amount amount : {kLoss, kSeconds, kScore}) {
    const double most = network.limits().most[amount];
    // What exceeds a limit of 0 is not in the network.
    if (std::isinf(most) || most <= 0) continue;
    limited_.push_back(amount);
    capacity_.push_back(most);
  }
  std::vector<double> rows(capacity_.size(), 0);
  if (guess != nullptr) {
    std::copy(guess->of_class.begin(), guess->of_class.end(), rows.begin());
    for (std::size_t k = 0; k < limited_.size(); ++k) {
      rows[guess->of_class.size() + k] = guess->of_amount[limited_[k]];
    }
  }
  if (worth(rows, capacity_) <= 0) {
    for (std::size_t r = 0; r < rows.size(); ++r) rows[r] = 1 / capacity_[r];
  }
  evaluate(std::move(rows));
  judge();
  if (excluded_ || found_) return;
  mixtures_.emplace(std::vector<double>(capacity_.size(), 1));
  mixtures_->begin_load(load_of(path_));
}

// The part of each row that a path uses: the programme's rows have a capacity of 1, as their units differ.
std::vector<double> JointPricer::load_of(const JointPath& path) const {
  std::vector<double> part = usage(path);
  for (std::size_t r = 0; r < part.size(); ++r) part[r] /= capacity_[r];
  return part;
}

std::vector<double> JointPricer::usage(const JointPath& path) const {
  std::vector<double> used(capacity_.size(), 0);
  for (const JointStep& step : path) used[at(network_.arc(step.arc).cls)] += 1;
  const Amounts amounts = amounts_of(network_, path);
  const std::size_t classes = capacity_.size() - limited_.size();
  for (std::size_t k = 0; k < limited_.size(); ++k) used[classes + k] = amounts[limited_[k]];
  return used;
}

bool JointPricer::within(const std::vector<double>& used) const {
  for (std::size_t r = 0; r < used.size(); ++r) {
    if (!(used[r] <= with_tolerance(capacity_[r]))) return false;
  }
  return true;
}

JointPrices JointPricer::prices_of(const std::vector<double>& rows) const {
  JointPrices prices;
  const std::size_t classes = capacity_.size() - limited_.size();
  prices.of_class.assign(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(classes));
  for (std::size_t k = 0; k < limited_.size(); ++k) prices.of_amount[limited_[k]] = rows[classes + k];
  prices.budget = worth(rows, capacity_);
  return prices;
}

// Computes the bound for prices of rows. Returns whether it is the best so far.
bool JointPricer::evaluate(std::vector<double> rows) {
  const double total = worth(rows, capacity_);
  for (double& price : rows) price /= total;
  JointPrices prices = prices_of(rows);
  const double bound = price_paths(network_, prices, &path_) - prices.budget;
  if (!(bound > bound_)) return false;
  bound_ = bound;
  best_ = std::move(prices);
  best_rows_ = std::move(rows);
  return true;
}

// Conclusions of the last evaluation.
void JointPricer::judge() {
  excluded_ = bound_ > kRelativeTolerance * 10;
  if (!excluded_ && !path_.empty() && within(usage(path_))) found_ = path_;
}

bool JointPricer::advance(int rounds, double precision) {
  for (int round = 0; round < rounds && !excluded_ && !found_ && !converged_ && !clock_.expired(); ++round) {
    mixtures_->optimise();
    std::vector<double> latest = mixtures_->prices();
    for (std::size_t r = 0; r < latest.size(); ++r) latest[r] /= capacity_[r];
    if (worth(latest, capacity_) <= 0) {
      converged_ = true;
      break;
    }
    const bool better = evaluate(smoothing_.blend(best_rows_, latest));
    judge();
    if (excluded_ || found_ || mixtures_->objective() - 1 - bound_ <= precision) {
      converged_ = true;
    } else if (mixtures_->add(load_of(path_), 0)) {
      smoothing_.advanced(better);
    } else {
      converged_ = !smoothing_.mispriced();
    }
  }
  return !excluded_ && !found_ && !converged_;
}

JointPrices JointPricer::spread(double sharpness, int rounds) {
  std::vector<double> load(capacity_.size(), 0);
  for (int round = 0;; ++round) {
    const double fullest = *std::max_element(load.begin(), load.end());
    std::vector<double> rows(capacity_.size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r] = std::exp(sharpness * (load[r] - fullest)) / capacity_[r];
    }
    JointPrices prices = prices_of(rows);
    JointPath path;
    price_paths(network_, prices, &path);
    if (round == rounds || path.empty()) return prices;
    const std::vector<double> used = usage(path);
    if (within(used)) found_ = path;
    const double step = 2.0 / (round + 2.0);
    for (std::size_t r = 0; r < load.size(); ++r) {
      load[r] += step * (used[r] / capacity_[r] - load[r]);
    }
  }
}

}  // namespace pipeedge
