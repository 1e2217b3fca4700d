// Label search over a network: exact when nothing had to be dropped, else a beam.
//
// A label is a way to reach a cut: the hosts used so far and the seconds spent. Cuts are taken from
// the first to the last. A label is dropped when
//   - the bound of some prices says that it cannot be completed within the capacities (or below the
//     cutoff): spent + prices of used + cheapest priced way to the end > budget (+ cutoff), or
//   - another label of the same cut (and sender) has used no more of any resource and spent no more.
// These two never lose an answer. When more than `width` labels remain at a cut, those with the least
// room to spare go, and the outcome "nothing found" is no longer a proof.
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
  int width = 1000;               // labels kept at a cut
  std::int64_t max_work = 0;      // comparisons and extensions before giving up; not clock time, so
                                  // that the same problem gives the same answer on every machine
};

struct SearchResult {
  std::optional<Path> found;
  bool complete = false;          // nothing was dropped: the answer is exact
};

SearchResult search(const Network& network, const std::vector<Prices>& prices, const SearchTask& task,
                    const Clock& clock);

}  // namespace pipeedge
