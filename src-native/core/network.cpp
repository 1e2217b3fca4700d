#include "network.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Network::Network(const Instance& instance, double bottleneck, Purpose purpose, double latency_limit,
                 double reluctance)
    : instance_(instance),
      purpose_(purpose),
      latency_limit_(latency_limit + 2 * kRelativeTolerance * latency_limit),
      reluctance_(reluctance) {
  // Finite, so that a link without bandwidth (infinite seconds) always exceeds it.
  limit_ = std::min(loosened(bottleneck), std::numeric_limits<double>::max());
  std::vector<ClassStages> stages;
  stages.reserve(at(instance.classes()));
  for (int cls = 0; cls < instance.classes(); ++cls) stages.push_back(collect(cls));
  if (!by_reach()) prepare_hops();
  add_resources(stages);
  add_arcs(stages);
  prepare_min_stages();
}

Network::ClassStages Network::collect(int cls) {
  const int layers = instance_.layers();
  std::vector<char> may_end(at(layers) + 1, 0);
  for (int cut = 1; cut <= layers; ++cut) {
    const double out = instance_.link_out(cls, cut);
    may_end[at(cut)] = out <= limit_ ? 1 : 0;
    note(out);
  }
  ClassStages stages;
  auto& ends = stages.ends;
  for (int first = 0; first < layers; ++first) {
    const double in = instance_.link_in(cls, first);
    note(in);
    if (in > limit_) continue;
    const std::size_t row = ends.size();
    GrowingStage stage = instance_.stage_from(cls, first);
    for (int last = first + 1; last <= layers; ++last) {
      stage.add_layer();
      if (instance_.overfull(cls, stage)) break;
      // This stage and all longer ones.
      const double least =
          instance_.data_seconds(cls, first, layers) + (instance_.receive(cls, first) + stage.layers_s());
      if (least > limit_) {
        note(least);
        break;
      }
      const double compute = instance_.stage_seconds(cls, stage);
      const double busy = instance_.busy_seconds(cls, stage);
      note(busy);
      if (busy > limit_) continue;
      if (may_end[at(last)] == 0 || !instance_.fits(cls, stage)) continue;
      if (compute + instance_.fastest(0, first) + instance_.fastest(last, layers) > latency_limit_) continue;
      // A longer stage is as good as a shorter one, unless it ends at a dearer cut than one it passes.
      while (by_reach() && ends.size() > row) {
        bool dearer = false;
        for (int cut = ends.back().second; cut < last && last < layers && !dearer; ++cut) {
          dearer = instance_.dearer(last, cut);
        }
        if (dearer) break;
        ends.pop_back();
      }
      ends.emplace_back(first, last);
      if (purpose_ == Purpose::kLatency) stages.seconds.push_back(compute);
    }
  }
  return stages;
}

void Network::add_resources(const std::vector<ClassStages>& stages) {
  std::map<std::vector<std::pair<int, int>>, int> known;
  for (int cls = 0; cls < instance_.classes(); ++cls) {
    const auto& ends = stages[at(cls)].ends;
    if (ends.empty()) continue;
    int resource = resources();
    if (by_reach()) resource = known.emplace(ends, resource).first->second;
    if (resource == resources()) {
      capacity_.push_back(0);
      classes_of_.emplace_back();
    }
    capacity_[at(resource)] += instance_.count(cls);
    classes_of_[at(resource)].push_back(cls);
  }
}

void Network::add_arcs(const std::vector<ClassStages>& stages) {
  const int layers = instance_.layers();
  std::vector<std::size_t> next(at(instance_.classes()), 0);
  for (int cut = 0; cut < layers; ++cut) {
    start_.push_back(static_cast<int>(arcs_.size()));
    for (int resource = 0; resource < resources(); ++resource) {
      const int cls = classes_of_[at(resource)].front();
      const auto& ends = stages[at(cls)].ends;
      std::size_t& n = next[at(cls)];
      for (; n < ends.size() && ends[n].first == cut; ++n) {
        Arc arc;
        arc.resource = resource;
        arc.cls = cls;
        arc.to = ends[n].second;
        arc.sender = sender_of_.empty() ? 0 : sender_of_[at(cls)];
        if (purpose_ == Purpose::kLatency) {
          arc.cost = stages[at(cls)].seconds[n];
          if (cut == 0) arc.cost += instance_.link_from_data(cls);
          if (arc.to == layers) arc.cost += instance_.link_to_data(cls);
          // Every schedule has one last stage, and at most one on the data host, which is a class of its own.
          if (arc.to == layers) arc.cost += reluctance_;
          if (cls == instance_.data_class()) arc.cost -= reluctance_;
        }
        arcs_.push_back(arc);
      }
    }
  }
  start_.push_back(static_cast<int>(arcs_.size()));
}

void Network::prepare_hops() {
  const int classes = instance_.classes();
  std::map<double, int> by_bandwidth;
  for (int cls = 0; cls < classes; ++cls) {
    const int fresh = static_cast<int>(by_bandwidth.size());
    sender_of_.push_back(
        instance_.pairwise() ? cls
                             : by_bandwidth.emplace(instance_.type(cls).bw_bytes_per_s, fresh).first->second);
  }
  senders_ = instance_.pairwise() ? classes : static_cast<int>(by_bandwidth.size());
  std::set<double> sizes;
  for (int cut = 1; cut < instance_.layers(); ++cut) sizes.insert(instance_.bytes(cut));

  hops_.resize(at(senders_) * at(classes));
  for (int from = 0; from < classes; ++from) {
    for (int to = 0; to < classes; ++to) {
      const LinkSpeed speed = instance_.speed(from, to);
      Hop& hop = hops_[at(sender_of_[at(from)]) * at(classes) + at(to)];
      hop.latency_s = speed.latency_s;
      hop.seconds_per_byte = speed.bw_bytes_per_s > 0 ? 1 / speed.bw_bytes_per_s : kInfinity;
      if (!instance_.pairwise()) continue;  // link_in and link_out have recorded the values already
      for (const double bytes : sizes) note(link_seconds(bytes, speed.bw_bytes_per_s, speed.latency_s));
    }
  }
}

double Network::hop(int sender, int cls, int cut) const {
  if (hops_.empty()) return 0;
  const Hop& hop = hops_[at(sender) * at(instance_.classes()) + at(cls)];
  const double bytes = instance_.bytes(cut);
  const double seconds = bytes > 0 ? bytes * hop.seconds_per_byte + hop.latency_s : hop.latency_s;
  if (!(seconds <= limit_)) return kInfinity;
  return purpose_ == Purpose::kLatency ? seconds : 0;
}

void Network::prepare_min_stages() {
  const int layers = instance_.layers();
  min_stages_.assign(at(layers) + 1, layers + 1);
  min_stages_[at(layers)] = 0;
  for (int cut = layers - 1; cut >= 0; --cut) {
    for (const Arc* arc = begin(cut); arc != end(cut); ++arc) {
      min_stages_[at(cut)] = std::min(min_stages_[at(cut)], 1 + min_stages_[at(arc->to)]);
    }
  }
}

bool Network::allows(int cls, int first, int last) const {
  if (instance_.link_in(cls, first) > limit_ || instance_.link_out(cls, last) > limit_) return false;
  GrowingStage stage = instance_.stage_from(cls, first);
  while (stage.last() < last) {
    stage.add_layer();
    if (stage.layers_s() > limit_) return false;
  }
  return instance_.busy_seconds(cls, stage) <= limit_ && instance_.fits(cls, stage);
}

Path Network::path(const std::vector<int>& arcs) const {
  Path path;
  std::vector<int> used(at(instance_.classes()), 0);
  int cut = 0;
  for (const int index : arcs) {
    const Arc& arc = this->arc(index);
    int cls = arc.cls;
    for (const int alike : classes_of_[at(arc.resource)]) {
      cls = alike;
      if (used[at(alike)] < instance_.count(alike)) break;
    }
    ++used[at(cls)];
    path.push_back({cls, cut, arc.to});
    cut = arc.to;
  }
  return path;
}

}  // namespace pipeedge
