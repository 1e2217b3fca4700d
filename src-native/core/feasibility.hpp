// Two questions about a network: is there a plan within its limits, and which has the least of an amount?
//
// They are put to the prices first (prices.hpp), which may prove that there is none or come across one, then to the
// label search (search.hpp), which answers exactly unless it had to drop labels. What stays open may be asked again
// with more effort.
#pragma once

#include <optional>

#include "clock.hpp"
#include "effort.hpp"
#include "network.hpp"
#include "prices.hpp"

namespace pipeedge {

enum class Answer { kYes, kNo, kOpen };

struct Verdict {
  Answer answer = Answer::kOpen;
  Path path;
  double next_period = kInfinity;  // after kNo: the period is at least this
};

class Feasibility {
 public:
  Feasibility(const Instance& instance, const Clock& clock) : instance_(instance), clock_(clock) {}

  // `least`: an amount to be made as small as possible, as far as the effort goes; none: any plan will do.
  Verdict ask(const Limits& limits, const Effort& effort, std::optional<Amount> least = std::nullopt);
  Verdict ask(const Network& network, int max_stages, const Effort& effort, std::optional<Amount> least = std::nullopt);

 private:
  void explore(const Network& network, Pricer& pricer, int max_stages, std::optional<Amount> least, bool narrow,
               const Effort& effort, Verdict& verdict) const;

  const Instance& instance_;
  const Clock& clock_;
  PriceMemory memory_;
};

struct Least {
  std::optional<Path> better;  // with less of the amount than `most`, if one was found
  double bound = 0;            // no plan in the network has less than this, or none has less than `most`
  bool exact = false;          // none has less than `better` or, without one, than `most`
  Prices prices;
};

// The plan of a network with the least of an amount, and less than `most`. `known` is one to start from.
Least find_least(const Network& network, Amount amount, const KnownPlan& known, double most, int max_stages,
                 const Effort& effort, const Clock& clock, int max_rounds);

// Rounds of pricing after which more are not worth their time.
inline int max_rounds(const Network& network) { return 200 + 5 * network.resources(); }

}  // namespace pipeedge
