#include "simplex.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>

namespace pipeedge {
namespace {

constexpr double kPivotTolerance = 1e-9;
constexpr double kReducedCostTolerance = 1e-11;
constexpr double kPerturbation = 1e-9;  // of right sides, so that few steps have no length
constexpr std::size_t kCandidates = 8;  // columns that are priced alone until none of them improves

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Simplex::Simplex(std::vector<double> right_side)
    : rows_(static_cast<int>(right_side.size())), values_(std::move(right_side)) {
  const std::size_t n = at(rows_);
  std::uint32_t noise = 1;
  for (double& value : values_) {
    noise = noise * 1664525U + 1013904223U;
    value += kPerturbation * (1 + noise / 4294967296.0);
  }
  inverse_.assign(n * n, 0);
  duals_.assign(n, 0);
  direction_.assign(n, 0);
  for (int row = 0; row < rows_; ++row) {
    inverse_[at(row) * n + at(row)] = 1;
    basis_.push_back(add({0, {{row, 1.0}}}));
    is_basic_[at(row)] = 1;
  }
}

int Simplex::add(const Column& column) {
  for (const auto& [row, value] : column.entries) {
    entry_rows_.push_back(row);
    entry_values_.push_back(value);
  }
  start_.push_back(entry_rows_.size());
  costs_.push_back(column.cost);
  barred_.push_back(0);
  is_basic_.push_back(0);
  return columns() - 1;
}

bool Simplex::force(int column, int row) {
  transform(column);
  if (std::abs(direction_[at(row)]) <= kPivotTolerance) return false;
  pivot(column, row, reduced_cost(column));
  return true;
}

void Simplex::optimise(int max_pivots) {
  candidates_.clear();
  for (int n = 0; n < max_pivots; ++n) {
    Priced entering = cheapest(candidates_);
    if (entering.column < 0) {
      find_candidates();
      entering = cheapest(candidates_);
    }
    if (entering.column < 0) return;
    transform(entering.column);
    int leaving = -1;
    double ratio = 0;
    for (int row = 0; row < rows_; ++row) {
      const double step = direction_[at(row)];
      if (step <= kPivotTolerance) continue;
      const double limit = std::max(0.0, values_[at(row)]) / step;
      if (leaving < 0 || limit < ratio - 1e-12 || (limit <= ratio + 1e-12 && step > direction_[at(leaving)])) {
        leaving = row;
        ratio = limit;
      }
    }
    if (leaving < 0) return;
    pivot(entering.column, leaving, entering.reduced_cost);
  }
}

Simplex::Priced Simplex::cheapest(const std::vector<int>& columns) const {
  Priced best{-kReducedCostTolerance, -1};
  for (const int column : columns) {
    if (is_basic_[at(column)] != 0) continue;
    const double reduced = reduced_cost(column);
    if (reduced < best.reduced_cost) best = {reduced, column};
  }
  return best;
}

void Simplex::find_candidates() {
  std::vector<Priced> improving;
  for (int column = 0; column < columns(); ++column) {
    if (is_basic_[at(column)] != 0 || barred_[at(column)] != 0) continue;
    const double reduced = reduced_cost(column);
    if (reduced < -kReducedCostTolerance) improving.push_back({reduced, column});
  }
  const auto end = improving.begin() + static_cast<std::ptrdiff_t>(std::min(kCandidates, improving.size()));
  std::partial_sort(improving.begin(), end, improving.end(), [](const Priced& a, const Priced& b) {
    return std::tie(a.reduced_cost, a.column) < std::tie(b.reduced_cost, b.column);
  });
  candidates_.clear();
  for (auto each = improving.begin(); each != end; ++each) candidates_.push_back(each->column);
}

double Simplex::objective() const {
  double sum = 0;
  for (int row = 0; row < rows_; ++row) sum += costs_[at(basis_[at(row)])] * values_[at(row)];
  return sum;
}

// Sums up in four parts, because each addition would wait for the one before it.
double Simplex::reduced_cost(int column) const {
  const std::size_t end = start_[at(column) + 1];
  std::size_t entry = start_[at(column)];
  double parts[4] = {0, 0, 0, 0};
  for (; entry + 4 <= end; entry += 4) {
    for (std::size_t part = 0; part < 4; ++part) {
      parts[part] += duals_[at(entry_rows_[entry + part])] * entry_values_[entry + part];
    }
  }
  for (; entry < end; ++entry) parts[0] += duals_[at(entry_rows_[entry])] * entry_values_[entry];
  return costs_[at(column)] - ((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

void Simplex::transform(int column) {
  const std::size_t n = at(rows_);
  std::fill(direction_.begin(), direction_.end(), 0.0);
  for (std::size_t entry = start_[at(column)]; entry < start_[at(column) + 1]; ++entry) {
    const double* inverse = inverse_.data() + at(entry_rows_[entry]) * n;
    const double value = entry_values_[entry];
    for (std::size_t row = 0; row < n; ++row) direction_[row] += inverse[row] * value;
  }
}

void Simplex::pivot(int column, int row, double reduced_cost) {
  const std::size_t n = at(rows_);
  const double scale = 1 / direction_[at(row)];
  const auto subtract = [&](double* target, double moved) {
    for (std::size_t other = 0; other < n; ++other) target[other] -= direction_[other] * moved;
    target[at(row)] = moved;
  };
  for (std::size_t c = 0; c < n; ++c) {
    double* inverse = inverse_.data() + c * n;
    const double moved = inverse[at(row)] * scale;
    if (moved == 0) continue;
    subtract(inverse, moved);
    duals_[c] += reduced_cost * moved;
  }
  subtract(values_.data(), values_[at(row)] * scale);
  is_basic_[at(basis_[at(row)])] = 0;
  basis_[at(row)] = column;
  is_basic_[at(column)] = 1;
}

}  // namespace pipeedge
