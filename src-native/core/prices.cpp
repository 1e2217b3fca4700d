#include "prices.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

// The cheapest continuation from a cut for each sender, with what it consists of.
class Continuations {
 public:
  Continuations(const Network& network, Prices& prices)
      : network_(network), prices_(prices), levels_(at(network.levels())), senders_(at(network.senders())) {
    const std::size_t size = (at(network.layers()) + 1) * senders_;
    prices_.rest.assign(size, kInfinity);
    std::fill(prices_.rest.end() - static_cast<std::ptrdiff_t>(senders_), prices_.rest.end(), 0.0);
    choice_.resize(size);
    cheapest_.resize(at(network.groups()) * levels_);
    offers_.resize(levels_);
  }

  void settle(int cut) {
    price_arcs(cut);
    Step* choice = &choice_[at(cut) * senders_];
    double* best = &prices_.rest[at(cut) * senders_];
    if (cut == 0) {
      if (!offers_[0].empty()) *best = offers_[0].front().price, choice->arc = offers_[0].front().arc;
      return;
    }
    std::size_t level = 0;
    for (std::size_t sender = 0; sender < senders_; ++sender, ++best, ++choice) {
      for (const Offer& offer : offers_[level]) {
        if (!(offer.price < *best)) break;  // links cost something, too
        network_.hops(cut, static_cast<int>(sender), offer.group, [&](int width, const double* amounts) {
          const double price = offer.price + prices_.of(network_, amounts);
          if (price < *best) *best = price, *choice = {offer.arc, width};
        });
      }
      if (++level == levels_) level = 0;
    }
  }

  std::vector<Step> path() const {
    std::vector<Step> steps;
    int sender = 0;
    for (int cut = 0; cut < network_.layers();) {
      const Step& step = choice_[at(cut) * senders_ + at(sender)];
      if (step.arc < 0) return {};
      steps.push_back(step);
      cut = network_.arc(step.arc).to;
      sender = network_.sender(network_.arc(step.arc));
    }
    return steps;
  }

 private:
  // The cheapest arc of a group.
  struct Offer {
    double price = kInfinity;
    int arc = -1;
    int group = 0;
  };

  // Finds the cheapest arc of each group that takes values of each level, the cheapest first.
  void price_arcs(int cut) {
    std::fill(cheapest_.begin(), cheapest_.end(), Offer{});
    for (int index = network_.first_arc(cut); index < network_.end_arc(cut); ++index) {
      const Arc& arc = network_.arc(index);
      const double price = prices_.of_arc(network_, index) + prices_.at(network_, arc.to, network_.sender(arc));
      Offer* best = &cheapest_[at(network_.group(arc)) * levels_];
      for (std::size_t level = 0; level < levels_ && level <= at(arc.room); ++level, ++best) {
        if (price < best->price) *best = {price, index, network_.group(arc)};
      }
    }
    for (std::size_t level = 0; level < levels_; ++level) {
      offers_[level].clear();
      for (std::size_t offer = level; offer < cheapest_.size(); offer += levels_) {
        if (cheapest_[offer].arc >= 0) offers_[level].push_back(cheapest_[offer]);
      }
      std::sort(offers_[level].begin(), offers_[level].end(),
                [](const Offer& a, const Offer& b) { return a.price != b.price ? a.price < b.price : a.arc < b.arc; });
    }
  }

  const Network& network_;
  Prices& prices_;
  std::size_t levels_, senders_;
  std::vector<Step> choice_;                // [cut, sender]
  std::vector<Offer> cheapest_;             // [group, level]
  std::vector<std::vector<Offer>> offers_;  // by level
};

}  // namespace

double price_paths(const Network& network, Prices& prices, std::vector<Step>* steps) {
  Continuations continuations(network, prices);
  for (int cut = network.layers() - 1; cut >= 0; --cut) continuations.settle(cut);
  if (steps != nullptr) *steps = continuations.path();
  return prices.rest[0];
}

Prices amount_prices(const Network& network, Amount amount) {
  Prices prices;
  prices.of_resource.assign(at(network.resources()), 0);
  prices.of_active[at(network.place(amount))] = 1;
  price_paths(network, prices, nullptr);
  return prices;
}

void PriceMemory::remember(const Network& network, const Prices& prices) {
  of_class.assign(at(network.instance().classes()), 0);
  for (int cls = 0; cls < network.instance().classes(); ++cls) {
    const int resource = network.resource_of_class(cls);
    // One class of those that stand for each other keeps the price: prices that tell equal classes apart lead to more
    // different paths than prices that do not.
    if (resource >= 0 && network.first_class(resource) == cls) of_class[at(cls)] = prices.of_resource[at(resource)];
  }
  of_amount = {};
  for (int k = 0; k < network.active(); ++k) of_amount[network.amount(k)] = prices.of_active[at(k)];
}

Prices PriceMemory::prices_for(const Network& network, Amount least) const {
  Prices prices;
  for (int r = 0; r < network.resources(); ++r) {
    prices.of_resource.push_back(of_class[at(network.first_class(r))]);
    prices.budget += prices.of_resource.back() * network.capacity(r);
  }
  for (int k = 0; k < network.active(); ++k) {
    const Amount amount = network.amount(k);
    if (amount == least) {
      prices.of_active[at(k)] = 1;
    } else if (std::isfinite(network.limits().most[amount])) {
      prices.of_active[at(k)] = of_amount[amount];
    }
  }
  price_paths(network, prices, nullptr);
  return prices;
}

Pricer::Pricer(const Network& network, const PricingTask& task, const Clock& clock)
    : network_(network), task_(task), clock_(clock) {
  if (network.min_stages(0) > task.max_stages) {
    bound_ = kInfinity;
    excluded_ = true;
    return;
  }
  double all = 0;
  for (int r = 0; r < network.resources(); ++r) {
    capacity_.push_back(static_cast<double>(network.capacity(r)));
    all += capacity_.back();
  }
  stage_limit_ = task.max_stages < network.layers() && static_cast<double>(task.max_stages) < all;
  if (stage_limit_) capacity_.push_back(static_cast<double>(task.max_stages));
  for (int k = 0; k < network.active(); ++k) {
    const double most = network.limits().most[network.amount(k)];
    // What exceeds a limit of 0 is not in the network.
    if (network.amount(k) == task.least || std::isinf(most) || most <= 0) continue;
    limited_.push_back(at(k));
    capacity_.push_back(1);
  }
  if (!network.linked()) matcher_.emplace(network);
  std::vector<double> first(capacity_.size(), 0);
  if (!task.least) {
    if (task.guess != nullptr && !task.guess->of_class.empty()) {
      for (int r = 0; r < network.resources(); ++r) first[at(r)] = task.guess->of_class[at(network.first_class(r))];
      for (std::size_t i = 0; i < limited_.size(); ++i) {
        const Amount amount = network.amount(static_cast<int>(limited_[i]));
        first[capacity_.size() - limited_.size() + i] = task.guess->of_amount[amount] * network.limits().most[amount];
      }
    }
    if (worth(first, capacity_) <= 0) std::fill(first.begin(), first.end(), 1.0);
  }
  evaluate(std::move(first));
  judge();
  if (finished()) return;
  mixtures_.emplace(capacity_);
  std::vector<double> used = usage(steps_);
  const double cheapest = cost(used);
  used.resize(capacity_.size());
  if (!task.least) {
    mixtures_->begin_load(used);
    return;
  }
  std::vector<double> known(capacity_.size(), 0);
  for (const int cls : task.known->classes) {
    if (network.resource_of_class(cls) >= 0) known[at(network.resource_of_class(cls))] += 1;
  }
  if (stage_limit_) known[at(network.resources())] = static_cast<double>(task.known->classes.size());
  for (std::size_t i = 0; i < limited_.size(); ++i) {
    const Amount amount = network.amount(static_cast<int>(limited_[i]));
    known[capacity_.size() - limited_.size() + i] = task.known->amounts[amount] / network.limits().most[amount];
  }
  mixtures_->begin_cost(known, task.known->amounts[*task.least]);
  mixtures_->add(used, cheapest);
}

// What a path uses of each row, and, behind that, the amount to be made small.
std::vector<double> Pricer::usage(const std::vector<Step>& steps) const {
  std::array<double, kAmounts> sum{};
  std::vector<double> used(capacity_.size(), 0);
  int cut = 0;
  int sender = 0;
  for (const Step& step : steps) {
    const Arc& arc = network_.arc(step.arc);
    used[at(network_.resource(arc))] += 1;
    const auto add = [&](const double* amounts) {
      for (std::size_t k = 0; k < at(network_.active()); ++k) sum[k] += amounts[k];
    };
    add(network_.amounts(step.arc));
    if (cut > 0 && network_.active() > 0) {
      network_.hops(cut, sender, network_.group(arc), [&](int width, const double* amounts) {
        if (width == step.width) add(amounts);
      });
    }
    cut = arc.to;
    sender = network_.sender(arc);
  }
  if (stage_limit_) used[at(network_.resources())] = static_cast<double>(steps.size());
  for (std::size_t i = 0; i < limited_.size(); ++i) {
    const double most = network_.limits().most[network_.amount(static_cast<int>(limited_[i]))];
    used[capacity_.size() - limited_.size() + i] = sum[limited_[i]] / most;
  }
  if (task_.least) used.push_back(sum[at(network_.place(*task_.least))]);
  return used;
}

bool Pricer::within(const std::vector<double>& used) const {
  for (std::size_t r = 0; r < capacity_.size(); ++r) {
    if (!(used[r] <= loosened(capacity_[r]))) return false;
  }
  return true;
}

// Converts prices of rows to prices of stages and amounts.
Prices Pricer::prices_of(const std::vector<double>& rows) const {
  Prices prices;
  prices.of_resource.assign(rows.begin(), rows.begin() + network_.resources());
  for (std::size_t r = 0; r + limited_.size() < rows.size(); ++r) prices.budget += rows[r] * capacity_[r];
  if (stage_limit_) {
    for (double& price : prices.of_resource) price += rows[at(network_.resources())];
  }
  for (std::size_t i = 0; i < limited_.size(); ++i) {
    prices.of_active[limited_[i]] = rows[capacity_.size() - limited_.size() + i] /
                                    network_.limits().most[network_.amount(static_cast<int>(limited_[i]))];
  }
  if (task_.least) prices.of_active[at(network_.place(*task_.least))] = 1;
  return prices;
}

// Computes the Lagrangian bound for prices of rows. Returns whether it is the best so far.
bool Pricer::evaluate(std::vector<double> rows) {
  if (!task_.least) {
    const double total = worth(rows, capacity_);
    for (double& price : rows) price /= total;
  }
  Prices prices = prices_of(rows);
  const double bound = price_paths(network_, prices, &steps_) - worth(rows, capacity_);
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
  const double margin = kRelativeTolerance * (task_.least ? std::abs(task_.cutoff) : limited_.empty() ? 1 : 10);
  excluded_ = task_.least ? bound_ >= task_.cutoff - margin : bound_ > margin;
  if (!excluded_) accept(steps_);
}

// Keeps a path as a plan, with other hosts if necessary, if it is one.
void Pricer::accept(const std::vector<Step>& steps) {
  const std::vector<double> used = usage(steps);
  if (!steps.empty() && within(used)) {
    if (found_ && cost(used) >= found_cost_) return;
    found_cost_ = cost(used);
    found_ = network_.path(steps);
  } else if (matcher_ && !task_.least && static_cast<int>(steps.size()) <= task_.max_stages) {
    found_ = matcher_->assign(network_.path(steps));
  }
}

bool Pricer::advance(int rounds) {
  for (int round = 0; round < rounds && !finished() && !converged_ && !clock_.expired(); ++round) {
    mixtures_->optimise();
    const std::vector<double> latest = mixtures_->prices();
    if (!task_.least && worth(latest, capacity_) <= 0) {
      converged_ = true;
      break;
    }
    const bool better = evaluate(smoothing_.blend(best_rows_, latest));
    judge();
    const double value = mixtures_->objective() - (task_.least ? 0 : 1);
    const double scale = task_.least ? std::abs(value) : 1;
    if (finished() || value - bound_ <= task_.precision * scale) {
      converged_ = true;
      continue;
    }
    std::vector<double> used = usage(steps_);
    const double price = cost(used);
    used.resize(capacity_.size());
    if (mixtures_->add(used, price)) {
      smoothing_.advanced(better);
    } else {
      converged_ = !smoothing_.mispriced();
    }
  }
  return !finished() && !converged_;
}

Prices Pricer::spread(double sharpness, int rounds) {
  std::vector<double> load(capacity_.size(), 0);
  for (int round = 0;; ++round) {
    const double busiest = *std::max_element(load.begin(), load.end());
    std::vector<double> rows(capacity_.size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r] = std::exp(sharpness * (load[r] - busiest)) / capacity_[r];
    }
    Prices prices = prices_of(rows);
    std::vector<Step> steps;
    price_paths(network_, prices, &steps);
    if (round == rounds || steps.empty()) return prices;
    accept(steps);
    if (found_) return prices;
    const std::vector<double> used = usage(steps);
    const double part = 2.0 / (round + 2.0);
    for (std::size_t r = 0; r < load.size(); ++r) load[r] += part * (used[r] / capacity_[r] - load[r]);
  }
}

}  // namespace pipeedge
