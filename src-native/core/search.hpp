// Label search over a network: exact unless labels had to be dropped, in which case it is a beam search.
//
// A label is the beginning of a plan: the hosts it uses, what sends at its last cut, and its active amounts. Cuts are
// processed from the first to the last. A label is dropped if
//   - the bound of some prices shows that it cannot be completed within the capacities and limits:
//     amounts spent + prices of used + cheapest priced path to the end > budget, or
//   - another label at the same cut has used no more of any resource, sends at least as well, and has no larger amount.
// These two rules never lose a solution. If more than `width` labels remain at a cut, the least promising are dropped,
// and finding nothing is no longer a proof.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "clock.hpp"
#include "network.hpp"
#include "prices.hpp"

namespace pipeedge {

struct SearchTask {
  int max_stages = 0;
  int width = 1000;             // largest number of labels at a cut
  std::int64_t max_work = 0;    // limit on comparisons and extensions; not a time, so that a problem
                                // has the same solution on every machine
  std::optional<Amount> least;  // an amount to be made as small as possible; none: any plan will do
  double most = kInfinity;      // of this amount
};

struct SearchResult {
  std::optional<Path> found;  // with `least`, the best plan if the search is complete
  double least = kInfinity;   // its amount to be made small
  bool complete = false;      // no label was dropped, so the result is exact
};

// `prices`: the first rank labels, all of them rule labels out.
SearchResult search(const Network& network, const std::vector<Prices>& prices, const SearchTask& task,
                    const Clock& clock);

}  // namespace pipeedge
