// What the search knows: the best plan so far and, for each microbatch size, a bound for all others.
//
//   0 ... low | proven: no plan is better | ? | value of the best plan found ...
//
// Values are those of the objective: seconds an item, seconds of latency, or joules an item.
#pragma once

#include <memory>
#include <vector>

#include "clock.hpp"
#include "feasibility.hpp"
#include "instance.hpp"

namespace pipeedge {

struct Plan {
  std::vector<Stage> stages;
  Costs costs;
  double value = kInfinity;

  int size() const { return static_cast<int>(stages.size()); }
};

struct Size {
  Size(const Problem& problem, const LinkTable& links, double batch, const Clock& clock)
      : batch_size(batch), instance(problem, links, batch), feasibility(instance, clock) {}

  double batch_size;
  Instance instance;
  Feasibility feasibility;
  double low = 0;  // no plan of this microbatch size has a smaller value
  Plan known;      // the best of this size, if there is any
};

class Incumbent {
 public:
  Incumbent(const Problem& problem, const Options& options);

  const Problem& problem() const { return problem_; }
  const Options& options() const { return options_; }
  const Clock& clock() const { return clock_; }
  int sizes() const { return static_cast<int>(sizes_.size()); }
  Size& size(int s) { return *sizes_[static_cast<std::size_t>(s)]; }
  const Size& size(int s) const { return *sizes_[static_cast<std::size_t>(s)]; }

  const Plan& best() const { return best_; }
  int best_size() const { return best_size_; }  // -1: there is no plan yet
  bool on_data_host() const;
  // Whether no plan of a microbatch size is better than the best.
  bool closed(int s) const { return size(s).low >= just_below(best_.value); }
  bool proven() const;
  double low() const;  // of all sizes

  // Keeps a plan if it is better than the best of its size; returns whether it is better than all.
  bool improve(int s, const Path& path);
  // Takes a plan that is as good as the best but preferred.
  void prefer(const Path& path);
  // Gives each link of the best plan the most bits with which nothing but the latency grows.
  void widen_links();
  void raise_low(int s, double bound);
  // No plan that is as good as the best has fewer stages; 0: unknown.
  int fewest_stages() const { return fewest_stages_; }
  void set_fewest_stages(int stages) { fewest_stages_ = stages; }

  // The limits that the request sets.
  Limits limits() const;
  Costs costs_of(const std::vector<Stage>& stages) const { return evaluate(problem_, links_, stages); }
  // A plan of a size, for the linear programme.
  KnownPlan known(int s, const Plan& plan, const Score& score = {}) const;

 private:
  double value_of(const Costs& costs, double batch_size) const;

  const Problem& problem_;
  const Options& options_;
  const Clock clock_;
  const LinkTable links_;
  std::vector<std::unique_ptr<Size>> sizes_;
  Plan best_;
  int best_size_ = -1;
  int fewest_stages_ = 0;
};

}  // namespace pipeedge
