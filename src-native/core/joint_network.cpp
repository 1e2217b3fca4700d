#include "joint_network.hpp"

#include <algorithm>
#include <cmath>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

bool no_worse(const JointHop& hop, const JointHop& than) {
  for (std::size_t k = 0; k < kAmounts; ++k) {
    if (hop.amount[k] > than.amount[k]) return false;
  }
  return true;
}

}  // namespace

JointNetwork::JointNetwork(const JointInstance& instance, const JointLimits& limits, const Score& score)
    : instance_(instance), limits_(limits), score_(score), longest_(with_tolerance(limits.period_s)) {
  std::vector<int> modes;
  for (int m = 0; m < static_cast<int>(instance.modes().size()); ++m) modes.push_back(m);
  const auto group_of = [&](int m) { return instance.group(instance.modes()[at(m)].cls); };
  std::stable_sort(modes.begin(), modes.end(), [&](int a, int b) { return group_of(a) < group_of(b); });
  for (int cut = 0; cut < layers(); ++cut) {
    start_.push_back(static_cast<int>(arcs_.size()));
    for (const int mode : modes) add_arcs(cut, mode);
  }
  start_.push_back(static_cast<int>(arcs_.size()));
  for (int cut = 0; cut < layers(); ++cut) {
    for (int sender = 0; sender < instance.senders(); ++sender) {
      for (int group = 0; group < instance.groups(); ++group) {
        hop_start_.push_back(static_cast<int>(hops_.size()));
        if (cut > 0) add_hops(cut, sender, group);
      }
    }
  }
  hop_start_.push_back(static_cast<int>(hops_.size()));
}

// Whether something may take this long; remembers what does not.
bool JointNetwork::allowed(double seconds) {
  if (seconds <= longest_) return true;
  next_ = std::min(next_, seconds);
  return false;
}

bool JointNetwork::within(const Amounts& amount) const {
  for (std::size_t k = 0; k < kAmounts; ++k) {
    if (!(amount[k] <= with_tolerance(limits_.most[k]))) return false;
  }
  return true;
}

// `busy_s`: while the host computes; `first`: the first layer of the arc, whose seconds and end are known.
double JointNetwork::score_of(const Mode& mode, double busy_s, const JointArc& arc, int first) const {
  const bool on_data = mode.cls == instance_.data_class();
  double sum = score_.stage + (on_data ? 0 : score_.away) + score_.second * arc.amount[kSeconds];
  if (score_.joule > 0) {
    const DeviceType& type = instance_.costs(mode).types[at(mode.type)];
    // The data host is on in any plan.
    sum += score_.joule * (busy_joules(type, busy_s) + (on_data ? 0 : type.idle_w * score_.period_s));
    sum += score_.joule * instance_.data().link_joules(!on_data && first == 0, !on_data && arc.to == layers());
  }
  return sum;
}

void JointNetwork::add_arcs(int cut, int number) {
  const Mode& mode = instance_.modes()[at(number)];
  const Problem& costs = instance_.costs(mode);
  const DeviceType& type = costs.types[at(mode.type)];
  const Wiring& wiring = instance_.wiring();
  const int host = instance_.hosts(mode.cls).front();
  const bool on_data = mode.cls == instance_.data_class();
  const DataWork& data = instance_.data().work;
  const double memory = with_tolerance(type.mem_bytes);
  double begins_s = 0;
  if (cut == 0 && wiring.data_host() != -1) {
    begins_s = wiring.seconds(wiring.data_host(), host, cut_bytes(costs, 0));
    if (!allowed(std::max(begins_s, data.feeding_s(!on_data)))) return;
  }
  const double receive = receive_seconds(costs, mode.host, cut);
  GrowingStage stage(costs, type, cut);
  while (stage.last() < layers()) {
    stage.add_layer();
    if (!type.bids() && stage.held_bytes() > memory) return;
    const int last = stage.last();
    JointArc arc;
    arc.room = instance_.levels() - 1;
    if (!type.bids()) {
      const double held = stage.held_bytes() + costs.buffers_out * cut_bytes(costs, last);
      const auto fits = [&](const Problem& before) {
        return held + costs.buffers_in * cut_bytes(before, cut) <= memory;
      };
      if (cut == 0) {
        if (!fits(costs)) continue;
      } else {
        while (arc.room >= 0 && !fits(instance_.costs_at(arc.room))) --arc.room;
        if (arc.room < 0) continue;
      }
    }
    const double loss = stage_loss(instance_.setting(mode), mode.type, cut, last);
    const double seconds = stage.seconds(receive, send_seconds(costs, mode.host, last));
    if (!std::isfinite(seconds) || std::isinf(loss)) continue;
    if (!allowed(seconds + (on_data ? data.total_s(cut > 0, last < layers()) : 0))) continue;
    double ends_s = 0;
    if (last == layers() && wiring.data_host() != -1) {
      ends_s = wiring.seconds(host, wiring.data_host(), cut_bytes(costs, last));
      if (!allowed(std::max(ends_s, data.collecting_s(!on_data)))) continue;
    }
    arc.amount[kLoss] = loss;
    arc.amount[kSeconds] = begins_s + seconds + ends_s;
    arc.to = last;
    arc.amount[kScore] = score_of(mode, seconds, arc, cut);
    if (!within(arc.amount)) continue;
    arc.mode = number;
    arc.cls = mode.cls;
    arc.group = instance_.group(mode.cls);
    arc.sender = instance_.sender(mode);
    arcs_.push_back(arc);
  }
}

void JointNetwork::add_hops(int cut, int sender, int group) {
  if (!instance_.connects(instance_.group_of(sender), group)) return;
  const Problem& costs = instance_.costs_at(instance_.level_of(sender));
  const LinkSpeed speed = instance_.speed(instance_.group_of(sender), group);
  const bool timed = std::isfinite(limits_.most[kSeconds]) || score_.second > 0;
  const std::ptrdiff_t begin = static_cast<std::ptrdiff_t>(hops_.size());
  const std::vector<Width>& widths = instance_.problem().widths;
  for (int w = 0; w < static_cast<int>(widths.size()); ++w) {
    const Width& width = widths[at(w)];
    if (!useful(costs, width.bits)) continue;
    JointHop hop;
    hop.width = w;
    hop.amount[kLoss] = width_loss(width, cut);
    if (std::isinf(hop.amount[kLoss])) continue;
    const double seconds = link_seconds(link_bytes(costs, width.bits, cut), speed.bw_bytes_per_s, speed.latency_s);
    if (!std::isfinite(seconds) || !allowed(seconds)) continue;
    // Without a limit, the widths are alike but for their loss.
    hop.amount[kSeconds] = timed ? seconds : 0;
    hop.amount[kScore] = score_.second * hop.amount[kSeconds];
    if (!within(hop.amount)) continue;
    const auto kept = [&](const JointHop& other) { return no_worse(other, hop); };
    if (std::any_of(hops_.begin() + begin, hops_.end(), kept)) continue;
    hops_.erase(std::remove_if(hops_.begin() + begin, hops_.end(),
                               [&](const JointHop& other) { return no_worse(hop, other); }),
                hops_.end());
    hops_.push_back(hop);
  }
}

Amounts amounts_of(const JointNetwork& network, const JointPath& path) {
  Amounts sum{};
  for (const JointStep& step : path) {
    for (std::size_t k = 0; k < kAmounts; ++k) {
      sum[k] += network.arc(step.arc).amount[k] + (step.hop < 0 ? 0 : network.hop(step.hop).amount[k]);
    }
  }
  return sum;
}

std::vector<JointStage> stages_of(const JointNetwork& network, const JointPath& path) {
  const JointInstance& instance = network.instance();
  std::vector<JointStage> stages;
  std::vector<std::size_t> used(at(instance.classes()), 0);
  int first = 0;
  for (const JointStep& step : path) {
    const JointArc& arc = network.arc(step.arc);
    if (step.hop >= 0) stages.back().width = network.hop(step.hop).width;
    const int host = instance.hosts(arc.cls)[used[at(arc.cls)]++];
    stages.push_back({host, first, arc.to, instance.modes()[at(arc.mode)].setting, -1});
    first = arc.to;
  }
  return stages;
}

}  // namespace pipeedge
