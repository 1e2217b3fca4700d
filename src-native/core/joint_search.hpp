// Label search: plans within the limits of a network, or that there are none.
//
// A label is the beginning of a plan: the hosts it uses, what sends at its last cut, and its amounts. It is
// dropped if another one at the same cut uses no more hosts, sends at least as well and has no larger amount, or
// if prices rule it out. With more labels at a cut than the width allows, the least promising are dropped too,
// and a search that finds nothing proves nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "clock.hpp"
#include "joint_network.hpp"
#include "joint_prices.hpp"

namespace pipeedge {

struct JointSearchTask {
  int width = 0;
  std::int64_t max_work = 0;
  // An amount to be made as small as possible; none: any plan will do.
  std::optional<Amount> least;
};

struct JointSearchResult {
  std::optional<JointPath> found;      // with `least`, the best plan if the search is complete
  bool complete = false;               // nothing was dropped that could have been a (better) plan
};

// `prices`: the first rank labels, all of them rule labels out.
JointSearchResult search(const JointNetwork& network, const std::vector<JointPrices>& prices,
                         const JointSearchTask& task, const Clock& clock);

}  // namespace pipeedge
