#include "matching.hpp"

#include <algorithm>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Matcher::Matcher(const Network& network)
    : network_(network), serving_(at(network.instance().classes())), visited_(at(network.instance().classes()), 0) {}

const std::vector<int>& Matcher::able(int first, int last) {
  const auto [entry, fresh] = able_.try_emplace(first * (network_.layers() + 1) + last);
  if (fresh) {
    const Instance& instance = network_.instance();
    for (int mode = 0; mode < static_cast<int>(instance.modes().size()); ++mode) {
      if (network_.allows(mode, first, last)) entry->second.push_back(mode);
    }
  }
  return entry->second;
}

std::optional<Path> Matcher::assign(const Path& path) {
  const Instance& instance = network_.instance();
  for (auto& stages : serving_) stages.clear();
  candidates_.clear();
  assigned_ = path;
  std::vector<std::size_t> waiting;
  for (std::size_t s = 0; s < path.size(); ++s) {
    candidates_.push_back(&able(path[s].first, path[s].last));
    const int cls = instance.mode(path[s].mode).cls;
    auto& stages = serving_[at(cls)];
    if (static_cast<int>(stages.size()) < instance.count(cls)) {
      stages.push_back(s);
    } else {
      waiting.push_back(s);
    }
  }
  for (const std::size_t stage : waiting) {
    ++round_;
    if (!augment(stage)) return std::nullopt;
  }
  return assigned_;
}

bool Matcher::augment(std::size_t stage) {
  const Instance& instance = network_.instance();
  for (const int mode : *candidates_[stage]) {
    const int cls = instance.mode(mode).cls;
    auto& stages = serving_[at(cls)];
    if (visited_[at(cls)] != round_ && static_cast<int>(stages.size()) < instance.count(cls)) {
      stages.push_back(stage);
      assigned_[stage].mode = mode;
      return true;
    }
  }
  for (const int mode : *candidates_[stage]) {
    const int cls = instance.mode(mode).cls;
    if (visited_[at(cls)] == round_) continue;
    visited_[at(cls)] = round_;
    for (std::size_t& other : serving_[at(cls)]) {
      if (augment(other)) {
        other = stage;
        assigned_[stage].mode = mode;
        return true;
      }
    }
  }
  return false;
}

}  // namespace pipeedge
