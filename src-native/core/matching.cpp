#include "matching.hpp"

#include <algorithm>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Matcher::Matcher(const Network& network)
    : network_(network),
      serving_(at(network.instance().classes())),
      visited_(at(network.instance().classes()), 0) {}

const std::vector<int>& Matcher::able(int first, int last) {
  const auto [entry, fresh] = able_.try_emplace(first * (network_.layers() + 1) + last);
  if (fresh) {
    for (int cls = 0; cls < network_.instance().classes(); ++cls) {
      if (network_.allows(cls, first, last)) entry->second.push_back(cls);
    }
  }
  return entry->second;
}

std::optional<Path> Matcher::assign(const Path& path) {
  for (auto& stages : serving_) stages.clear();
  candidates_.clear();
  std::vector<std::size_t> waiting;
  for (std::size_t s = 0; s < path.size(); ++s) {
    candidates_.push_back(&able(path[s].first, path[s].last));
    auto& stages = serving_[at(path[s].cls)];
    if (static_cast<int>(stages.size()) < network_.instance().count(path[s].cls)) {
      stages.push_back(s);
    } else {
      waiting.push_back(s);
    }
  }
  for (const std::size_t stage : waiting) {
    ++round_;
    if (!augment(stage)) return std::nullopt;
  }
  Path assigned = path;
  for (int cls = 0; cls < network_.instance().classes(); ++cls) {
    for (const std::size_t stage : serving_[at(cls)]) assigned[stage].cls = cls;
  }
  return assigned;
}

bool Matcher::augment(std::size_t stage) {
  for (const int cls : *candidates_[stage]) {
    auto& stages = serving_[at(cls)];
    if (visited_[at(cls)] != round_ && static_cast<int>(stages.size()) < network_.instance().count(cls)) {
      stages.push_back(stage);
      return true;
    }
  }
  for (const int cls : *candidates_[stage]) {
    if (visited_[at(cls)] == round_) continue;
    visited_[at(cls)] = round_;
    auto& stages = serving_[at(cls)];
    for (std::size_t& other : stages) {
      if (augment(other)) {
        other = stage;
        return true;
      }
    }
  }
  return false;
}

}  // namespace pipeedge
