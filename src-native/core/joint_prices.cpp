#include "joint_prices.hpp"

#include <algorithm>
#include <cmath>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

double worth(const std::vector<double>& prices, const std::vector<double>& capacity) {
  double sum = 0;
  for (std::size_t r = 0; r < capacity.size(); ++r) sum += prices[r] * capacity[r];
  return sum;
}

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
  if (!excluded_ && !found_) begin();
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

// The linear programme: load of the fullest row over mixtures of the paths so far.
void JointPricer::begin() {
  const std::size_t rows = capacity_.size();
  std::vector<double> right_side(rows + 1, 0);
  right_side.back() = 1;
  simplex_.emplace(std::move(right_side));
  const int share = static_cast<int>(rows);
  simplex_->bar(share);
  const std::vector<double> used = usage(path_);
  Column load{1, {}};
  Column first{0, {}};
  std::size_t worst = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    load.entries.emplace_back(static_cast<int>(r), -1.0);
    if (used[r] > 0) first.entries.emplace_back(static_cast<int>(r), used[r] / capacity_[r]);
    if (used[r] * capacity_[worst] > used[worst] * capacity_[r]) worst = r;
  }
  first.entries.emplace_back(share, 1.0);
  const int load_column = simplex_->add(std::move(load));
  simplex_->force(simplex_->add(std::move(first)), share);
  simplex_->force(load_column, static_cast<int>(worst));
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
    simplex_->optimise(20 + static_cast<int>(capacity_.size()));
    std::vector<double> rows(capacity_.size(), 0);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r] = std::max(0.0, -simplex_->dual(static_cast<int>(r))) / capacity_[r];
    }
    if (worth(rows, capacity_) <= 0) {
      converged_ = true;
      break;
    }
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r] = smoothing_ * best_rows_[r] + (1 - smoothing_) * rows[r];
    }
    const bool better = evaluate(std::move(rows));
    judge();
    if (excluded_ || found_ || simplex_->objective() - 1 - bound_ <= precision) {
      converged_ = true;
      break;
    }
    const std::vector<double> used = usage(path_);
    Column column{0, {}};
    double reduced = -simplex_->dual(static_cast<int>(used.size()));
    for (std::size_t r = 0; r < used.size(); ++r) {
      if (used[r] <= 0) continue;
      const double load = used[r] / capacity_[r];
      column.entries.emplace_back(static_cast<int>(r), load);
      reduced -= simplex_->dual(static_cast<int>(r)) * load;
    }
    column.entries.emplace_back(static_cast<int>(used.size()), 1.0);
    if (reduced < -1e-12) {
      simplex_->add(std::move(column));
      smoothing_ = better ? std::min(0.9, smoothing_ + 0.1) : std::max(0.0, smoothing_ - 0.1);
    } else if (smoothing_ == 0) {
      converged_ = true;
    } else {
      smoothing_ = smoothing_ > 0.3 ? smoothing_ / 2 : 0;  // mispriced: closer to the programme's own
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
