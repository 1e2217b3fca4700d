#include "mixtures.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pipeedge {

double worth(const std::vector<double>& prices, const std::vector<double>& capacity) {
  double sum = 0;
  for (std::size_t r = 0; r < capacity.size(); ++r) sum += prices[r] * capacity[r];
  return sum;
}

void Mixtures::begin_load(const std::vector<double>& used) {
  std::vector<double> right_side(capacity_.size() + 1, 0);
  right_side.back() = 1;
  simplex_.emplace(std::move(right_side));
  simplex_->bar(share_row());
  Column load{1, {}};
  std::size_t worst = 0;
  for (std::size_t r = 0; r < capacity_.size(); ++r) {
    load.entries.emplace_back(static_cast<int>(r), -capacity_[r]);
    if (used[r] * capacity_[worst] > used[worst] * capacity_[r]) worst = r;
  }
  const int load_column = simplex_->add(load);
  simplex_->force(simplex_->add(column(used, 0)), share_row());
  simplex_->force(load_column, static_cast<int>(worst));
}

void Mixtures::begin_cost(const std::vector<double>& used, double cost) {
  std::vector<double> right_side = capacity_;
  right_side.push_back(1);
  simplex_.emplace(std::move(right_side));
  simplex_->bar(share_row());
  simplex_->force(simplex_->add(column(used, cost)), share_row());
}

bool Mixtures::add(const std::vector<double>& used, double cost) {
  const Column fresh = column(used, cost);
  double reduced = fresh.cost;
  for (const auto& [row, entry] : fresh.entries) reduced -= simplex_->dual(row) * entry;
  if (reduced >= -1e-12) return false;
  simplex_->add(fresh);
  return true;
}

std::vector<double> Mixtures::prices() const {
  std::vector<double> prices;
  for (int r = 0; r < share_row(); ++r) prices.push_back(std::max(0.0, -simplex_->dual(r)));
  return prices;
}

Column Mixtures::column(const std::vector<double>& used, double cost) const {
  Column column{cost, {}};
  for (std::size_t r = 0; r < used.size(); ++r) {
    if (used[r] > 0) column.entries.emplace_back(static_cast<int>(r), used[r]);
  }
  column.entries.emplace_back(share_row(), 1.0);
  return column;
}

std::vector<double> Smoothing::blend(const std::vector<double>& best, const std::vector<double>& latest) const {
  std::vector<double> prices;
  for (std::size_t r = 0; r < latest.size(); ++r) prices.push_back(part_ * best[r] + (1 - part_) * latest[r]);
  return prices;
}

void Smoothing::advanced(bool better) { part_ = better ? std::min(0.9, part_ + 0.1) : std::max(0.0, part_ - 0.1); }

bool Smoothing::mispriced() {
  if (part_ == 0) return false;
  part_ = part_ > 0.3 ? part_ / 2 : 0;
  return true;
}

}  // namespace pipeedge
