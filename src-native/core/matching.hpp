// Hosts for given cuts: a bipartite matching.
//
//   stages   [0,3) [3,5) [5,9) ...
//              | \  /  \   |          an edge where a class can run the stage within the bottleneck
//   classes    a   b    c  ...        each as often as it has hosts
//
// A path of the network that uses some host twice often needs only other hosts for the same cuts.
// Without a links table a stage's cost depends on its own host alone, so that choosing them is a
// matching, which augmenting paths decide exactly (Kuhn 1955).
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

  // The same cuts with hosts that are all within the capacities; none when there is no such choice.
  std::optional<Path> assign(const Path& path);

 private:
  const std::vector<int>& able(int first, int last);
  bool augment(std::size_t stage);

  const Network& network_;
  std::unordered_map<int, std::vector<int>> able_;  // by stage: the classes that can run it
  // The matching under construction.
  std::vector<const std::vector<int>*> candidates_;  // by stage
  std::vector<std::vector<std::size_t>> serving_;    // by class: its stages
  std::vector<int> visited_;                         // by class: the round that reached it last
  int round_ = 0;
};

}  // namespace pipeedge
