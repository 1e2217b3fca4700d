// Label search over a network: exact unless labels had to be dropped, in which case it is a beam search.
//
// A label is a path to a cut: the hosts used so far and the seconds spent. Cuts are processed from the
// first to the last. A label is dropped if
//   - the bound of some prices shows that it cannot be completed within the capacities (or below the
//     cutoff): spent + prices of used + cheapest priced path to the end > budget (+ cutoff), or
//   - another label at the same cut (and sender) has used no more of any resource and spent no more.
// These two rules never lose a solution. If more than `width` labels remain at a cut, those closest to
// their limit are dropped, and finding nothing is no longer a proof.
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
  double cutoff = kInfinity;      // kLatency: only schedules cheaper than this count
  int width = 1000;               // largest number of labels at a cut
  std::int64_t max_work = 0;      // limit on comparisons and extensions; not a time, so that a problem
                                  // has the same solution on every machine
};

struct SearchResult {
  std::optional<Path> found;
  bool complete = false;          // no label was dropped, so the result is exact
};

SearchResult search(const Network& network, const std::vector<Prices>& prices, const SearchTask& task,
                    const Clock& clock);

}  // namespace pipeedge
