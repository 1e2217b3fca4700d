// The best schedule so far, and the bounds between which the optimum lies:
//
//   0 ... low | proven: no schedule is better | ? | high = the best schedule found ...
#pragma once

#include <utility>
#include <vector>

#include "instance.hpp"
#include "network.hpp"

namespace pipeedge {

struct Costs {
  double bottleneck_s = 0;
  double latency_s = 0;

  double of(Objective objective) const {
    return objective == Objective::kThroughput ? bottleneck_s : latency_s;
  }
};

// A path within the capacities as a schedule: hosts of a class in the order of the devices file.
std::vector<Stage> stages_of(const Instance& instance, const Path& path);
Costs costs_of(const Instance& instance, const Path& path);
bool uses_data_host(const Instance& instance, const Path& path);

class Incumbent {
 public:
  Incumbent(const Instance& instance, Objective objective) : instance_(instance), objective_(objective) {}

  double low() const { return low_; }
  double high() const { return high_; }
  // Equal up to rounding, the schedule is the optimum.
  bool proven() const { return high_ <= loosened(low_); }
  const Path& path() const { return path_; }
  int size() const { return static_cast<int>(path_.size()); }
  Costs costs() const { return costs_of(instance_, path_); }
  bool on_data_host() const { return uses_data_host(instance_, path_); }

  // Keeps a schedule if it is better.
  void improve(Path path);
  // Takes a schedule that is as good but preferred.
  void prefer(Path path) { path_ = std::move(path); }
  // Nothing below `bound` is possible.
  void raise_low(double bound);
  void set_low(double bound) { low_ = bound; }
  // The best schedule is the optimum.
  void close() { low_ = high_; }

 private:
  const Instance& instance_;
  const Objective objective_;
  double low_ = 0;
  double high_ = kInfinity;
  Path path_;
};

}  // namespace pipeedge
