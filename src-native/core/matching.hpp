// Hosts for given cuts: a bipartite matching.
//
//   stages   [0,3) [3,5) [5,9) ...
//              | \  /  \   |          an edge if a class can run the stage within the bottleneck
//   classes    a   b    c  ...        each at most as often as it has hosts
//
// A path of the network that uses a host twice can often be repaired with other hosts for the same cuts. In a network
// that is not linked, the cost of a stage depends only on its own host, so choosing hosts is a matching problem,
// which augmenting paths solve exactly (Kuhn 1955).
#pragma once

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "network.hpp"

namespace pipeedge {

class Matcher {
 public:
  explicit Matcher(const Network& network);

  // Returns a path with the same cuts and with hosts within the capacities, if there is one.
  std::optional<Path> assign(const Path& path);

 private:
  const std::vector<int>& able(int first, int last);
  bool augment(std::size_t stage);

  const Network& network_;
  std::unordered_map<int, std::vector<int>> able_;  // by first layer and end: the modes that can run the stage
  // State of the matching under construction:
  Path assigned_;
  std::vector<const std::vector<int>*> candidates_;  // by stage
  std::vector<std::vector<std::size_t>> serving_;    // by class: its stages so far
  std::vector<int> visited_;                         // by class: the last round that reached it
  int round_ = 0;
};

}  // namespace pipeedge
