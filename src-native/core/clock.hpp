// The wall clock with a deadline: the only side effect in the core, passed to every long computation.
#pragma once

#include <chrono>

namespace pipeedge {

class Clock {
 public:
  explicit Clock(double limit_s) : start_(Now::now()), limit_s_(limit_s) {}
  double elapsed_s() const { return std::chrono::duration<double>(Now::now() - start_).count(); }
  bool expired() const { return elapsed_s() >= limit_s_; }

 private:
  using Now = std::chrono::steady_clock;
  Now::time_point start_;
  double limit_s_;
};

}  // namespace pipeedge
