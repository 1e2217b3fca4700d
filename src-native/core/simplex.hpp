// A small primal simplex for the column-generation master: explicit inverse, sparse columns.
//
// Rows are equations; the caller adds slack columns as needed. Meant for at most a few thousand rows, and
// columns that are added one at a time. Its results guide the search but are never used as a proof, so
// double precision with a tolerance in the ratio test is sufficient.
#pragma once

#include <utility>
#include <vector>

namespace pipeedge {

struct Column {
  double cost = 0;
  std::vector<std::pair<int, double>> entries;  // (row, value)
};

class Simplex {
 public:
  // The initial basis has one unit column per row (columns 0 .. rows-1), with the given right side.
  explicit Simplex(std::vector<double> right_side);

  int add(const Column& column);
  // Puts a column into the basis at a row, even if infeasible. Returns false if its entry there is too small.
  bool force(int column, int row);
  // Pivots until no column improves or the limit is reached. A barred column never enters the basis.
  void optimise(int max_pivots);
  void bar(int column) { barred_[static_cast<std::size_t>(column)] = 1; }

  double objective() const;
  double dual(int row) const { return duals_[static_cast<std::size_t>(row)]; }
  int columns() const { return static_cast<int>(costs_.size()); }

 private:
  struct Priced {
    double reduced_cost = 0;
    int column = -1;
  };

  double reduced_cost(int column) const;
  // The column with the least reduced cost of these; -1 if none of them improves.
  Priced cheapest(const std::vector<int>& columns) const;
  void find_candidates();
  void transform(int column);
  void pivot(int column, int row, double reduced_cost);

  int rows_;
  // Entries of all columns, one column behind the other: [start_[column], start_[column + 1]).
  std::vector<int> entry_rows_;
  std::vector<double> entry_values_;
  std::vector<std::size_t> start_{0};
  std::vector<double> costs_;
  std::vector<char> barred_;
  std::vector<char> is_basic_;
  std::vector<int> basis_;
  std::vector<double> values_;  // of the basic columns
  std::vector<double> duals_;
  std::vector<double> inverse_;  // column-major
  std::vector<double> direction_;
  std::vector<int> candidates_;
};

}  // namespace pipeedge
