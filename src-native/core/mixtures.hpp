// The linear programme over mixtures of paths that column generation solves (Dantzig and Wolfe 1960).
//
// Each path uses an amount u_r of every row r, such as hosts of one resource; there are c_r of it. The shares of
// the paths sum to 1, and `used` is what the mixture uses:
//
//   begin_load    min load   used_r - load c_r <= 0
//   begin_cost    min cost   used_r            <= c_r
//
// Its dual solution is a price for each row. Its user asks for the cheapest path at these prices and adds it.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "simplex.hpp"

namespace pipeedge {

// The value of all there is of each row at these prices.
double worth(const std::vector<double>& prices, const std::vector<double>& capacity);

class Mixtures {
 public:
  explicit Mixtures(std::vector<double> capacity) : capacity_(std::move(capacity)) {}

  // Starts with a single path, which uses `used` of the rows.
  void begin_load(const std::vector<double>& used);
  void begin_cost(const std::vector<double>& used, double cost);

  // Adds a path if it can improve the mixture; returns whether it can. Paths have no cost after begin_load.
  bool add(const std::vector<double>& used, double cost);

  void optimise() { simplex_->optimise(20 + share_row()); }
  double objective() const { return simplex_->objective(); }
  std::vector<double> prices() const;

 private:
  int share_row() const { return static_cast<int>(capacity_.size()); }
  Column column(const std::vector<double>& used, double cost) const;

  std::vector<double> capacity_;
  std::optional<Simplex> simplex_;
};

// Smoothing of the programme's prices towards the best so far (Wentges 1997): less of it where it leads astray.
class Smoothing {
 public:
  // Returns prices between `best` and `latest`, which are those of the programme.
  std::vector<double> blend(const std::vector<double>& best, const std::vector<double>& latest) const;

  // Notes that blended prices have led to a path worth adding, and whether they were the best so far.
  void advanced(bool better);
  // Notes that they have not. Returns false if the prices were the programme's own, so that no path is left.
  bool mispriced();

 private:
  double part_ = 0.5;
};

}  // namespace pipeedge
