// One question: is there a schedule with at most this bottleneck and number of stages?
//
// It is put to the prices first (prices.hpp), which may prove "no" or come across a "yes", then to the
// label search (search.hpp), which answers exactly unless it had to drop labels. What stays open may be
// asked again with more effort.
#pragma once

#include <vector>

#include "clock.hpp"
#include "effort.hpp"
#include "network.hpp"
#include "prices.hpp"

namespace pipeedge {

enum class Answer { kYes, kNo, kOpen };

struct Verdict {
  Answer answer = Answer::kOpen;
  Path path;
  double next_bottleneck = kInfinity;  // after kNo: the optimum is at least this
};

// Prices that were good for the last network, by class: a first guess for one like it.
class PriceMemory {
 public:
  void remember(const Network& network, const Prices& prices);
  const std::vector<double>* guess() const { return of_class_.empty() ? nullptr : &of_class_; }
  // The remembered prices for a network, whose classes the last one had.
  Prices prices_for(const Network& network) const;

 private:
  std::vector<double> of_class_;
};

class Feasibility {
 public:
  Feasibility(const Instance& instance, const Clock& clock) : instance_(instance), clock_(clock) {}

  Verdict ask(double bottleneck, int stages, const Effort& effort);
  Verdict ask(const Network& network, int stages, const Effort& effort);

 private:
  void explore(const Network& network, const Prices& bounding, int stages, bool narrow, const Effort& effort,
               Verdict& verdict) const;

  const Instance& instance_;
  const Clock& clock_;
  PriceMemory memory_;
};

}  // namespace pipeedge
