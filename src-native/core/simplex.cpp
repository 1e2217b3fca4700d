#include "simplex.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace pipeedge {
namespace {

constexpr double kPivotTolerance = 1e-9;
constexpr double kReducedCostTolerance = 1e-11;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Simplex::Simplex(std::vector<double> right_side)
    : rows_(static_cast<int>(right_side.size())), values_(std::move(right_side)) {
  const std::size_t n = at(rows_);
  inverse_.assign(n * n, 0);
  duals_.assign(n, 0);
  direction_.assign(n, 0);
  for (int row = 0; row < rows_; ++row) {
    inverse_[at(row) * n + at(row)] = 1;
    basis_.push_back(add({0, {{row, 1.0}}}));
    is_basic_[at(row)] = 1;
  }
}

int Simplex::add(Column column) {
  columns_.push_back(std::move(column));
  barred_.push_back(0);
  is_basic_.push_back(0);
  return columns() - 1;
}

bool Simplex::force(int column, int row) {
  transform(columns_[at(column)]);
  if (std::abs(direction_[at(row)]) <= kPivotTolerance) return false;
  pivot(column, row, reduced_cost(columns_[at(column)]));
  return true;
}

void Simplex::optimise(int max_pivots) {
  for (int n = 0; n < max_pivots; ++n) {
    int entering = -1;
    double best = -kReducedCostTolerance;
    for (int c = 0; c < columns(); ++c) {
      if (is_basic_[at(c)] != 0 || barred_[at(c)] != 0) continue;
      const double reduced = reduced_cost(columns_[at(c)]);
      if (reduced < best) {
        best = reduced;
        entering = c;
      }
    }
    if (entering < 0) return;
    transform(columns_[at(entering)]);
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
    pivot(entering, leaving, best);
  }
}

double Simplex::objective() const {
  double sum = 0;
  for (int row = 0; row < rows_; ++row) sum += columns_[at(basis_[at(row)])].cost * values_[at(row)];
  return sum;
}

double Simplex::reduced_cost(const Column& column) const {
  double reduced = column.cost;
  for (const auto& [row, value] : column.entries) reduced -= duals_[at(row)] * value;
  return reduced;
}

void Simplex::transform(const Column& column) {
  const std::size_t n = at(rows_);
  for (std::size_t row = 0; row < n; ++row) {
    const double* inverse = inverse_.data() + row * n;
    double sum = 0;
    for (const auto& [entry, value] : column.entries) sum += inverse[at(entry)] * value;
    direction_[row] = sum;
  }
}

void Simplex::pivot(int column, int row, double reduced_cost) {
  const std::size_t n = at(rows_);
  double* pivot_row = inverse_.data() + at(row) * n;
  const double scale = 1 / direction_[at(row)];
  for (std::size_t c = 0; c < n; ++c) pivot_row[c] *= scale;
  values_[at(row)] *= scale;
  for (int other = 0; other < rows_; ++other) {
    const double factor = direction_[at(other)];
    if (other == row || factor == 0) continue;
    double* target = inverse_.data() + at(other) * n;
    for (std::size_t c = 0; c < n; ++c) target[c] -= factor * pivot_row[c];
    values_[at(other)] -= factor * values_[at(row)];
  }
  for (std::size_t c = 0; c < n; ++c) duals_[c] += reduced_cost * pivot_row[c];
  is_basic_[at(basis_[at(row)])] = 0;
  basis_[at(row)] = column;
  is_basic_[at(column)] = 1;
}

}  // namespace pipeedge
