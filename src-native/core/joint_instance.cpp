#include "joint_instance.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

const DeviceType& type_of(const Problem& problem, int host) {
  return problem.types[at(problem.hosts[at(host)].type)];
}

}  // namespace

std::vector<std::string> host_names(const JointProblem& problem) {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const Setting& setting : problem.settings) {
    for (const Host& host : setting.problem.hosts) {
      if (seen.insert(host.name).second) names.push_back(host.name);
    }
  }
  return names;
}

double link_bytes(const Problem& sender, int bits, int cut) {
  const double bytes = cut_bytes(sender, cut);
  return bits == 0 ? bytes : bytes * (bits / (8 * sender.element_bytes));
}

bool useful(const Problem& sender, int bits) { return bits < 8 * sender.element_bytes; }

double stage_loss(const Setting& setting, int type, int first, int last) {
  if (setting.loss.empty() || setting.loss[at(type)].empty()) return 0;
  double sum = 0;
  for (int l = first; l < last; ++l) sum += setting.loss[at(type)][at(l)];
  return sum;
}

double width_loss(const Width& width, int cut) { return width.loss.empty() ? 0 : width.loss[at(cut)]; }

DataHost data_host_of(const JointProblem& problem, double batch_size) {
  DataHost data;
  const auto raise = [](double& most, double value) { most = std::max(most, value); };
  for (const Setting& setting : problem.settings) {
    if (setting.problem.batch_size != batch_size || setting.problem.data_host == -1) continue;
    const DataWork work = data_work(setting.problem);
    raise(data.work.feed_s, work.feed_s);
    raise(data.work.collect_s, work.collect_s);
    raise(data.work.both_s, work.both_s);
    raise(data.work.input_send_s, work.input_send_s);
    raise(data.work.output_receive_s, work.output_receive_s);
    const DeviceType& type = type_of(setting.problem, setting.problem.data_host);
    data.busy_w = data.busy_w < 0 || type.busy_w < 0 ? -1 : std::max(data.busy_w, type.busy_w);
    data.idle_w = type.idle_w;
  }
  return data;
}

Wiring::Wiring(const JointProblem& problem) {
  std::unordered_map<std::string, int> index;
  for (const std::string& name : host_names(problem)) {
    index.emplace(name, static_cast<int>(board_.hosts.size()));
    board_.hosts.push_back({name, static_cast<int>(board_.hosts.size())});
  }
  board_.types.resize(board_.hosts.size());
  linked_.assign(board_.hosts.size(), 0);
  for (const Setting& setting : problem.settings) {
    const Problem& own = setting.problem;
    index_.emplace_back(board_.hosts.size(), -1);
    for (std::size_t h = 0; h < own.hosts.size(); ++h) {
      const int host = index.at(own.hosts[h].name);
      index_.back()[at(host)] = static_cast<int>(h);
      board_.types[at(host)].bw_bytes_per_s = type_of(own, static_cast<int>(h)).bw_bytes_per_s;
    }
    const auto global = [&](int host) { return index.at(own.hosts[at(host)].name); };
    for (const Link& link : own.links) {
      const int from = global(link.from);
      const int to = global(link.to);
      board_.links.push_back({from, to, link.bw_bytes_per_s, link.latency_s});
      linked_[at(from)] = linked_[at(to)] = 1;
    }
    if (own.data_host != -1) board_.data_host = global(own.data_host);
  }
  for (const NamedLink& link : problem.links) {
    const int from = index.at(link.from);
    const int to = index.at(link.to);
    board_.links.push_back({from, to, link.bw_bytes_per_s, link.latency_s});
    linked_[at(from)] = linked_[at(to)] = 1;
  }
  links_ = std::make_unique<LinkTable>(board_);
}

JointInstance::JointInstance(const JointProblem& problem, const Wiring& wiring, double batch_size)
    : problem_(problem), wiring_(wiring), batch_size_(batch_size), data_(data_host_of(problem, batch_size)) {
  std::map<double, int> sizes;
  for (std::size_t s = 0; s < problem.settings.size(); ++s) {
    if (problem.settings[s].problem.batch_size != batch_size) continue;
    settings_.push_back(static_cast<int>(s));
    sizes.emplace(problem.settings[s].problem.element_bytes, static_cast<int>(s));
  }
  for (const auto& [bytes, setting] : sizes) {
    element_bytes_.push_back(bytes);
    setting_at_.push_back(setting);
  }
  classify();
  add_modes();
  compare_senders();
}

void JointInstance::classify() {
  std::map<std::tuple<std::vector<int>, bool, int>, int> classes;
  std::map<std::tuple<bool, double>, int> groups;  // of a host in the links table, or with this bandwidth
  for (int host = 0; host < wiring_.hosts(); ++host) {
    std::vector<int> types;
    for (const int s : settings_) {
      const int own = wiring_.in_setting(host, s);
      types.push_back(own < 0 ? -1 : problem_.settings[at(s)].problem.hosts[at(own)].type);
    }
    const bool data = host == wiring_.data_host();
    const auto [entry, fresh] = classes.emplace(
        std::make_tuple(std::move(types), data, wiring_.linked(host) ? host : -1), this->classes());
    if (fresh) {
      hosts_.emplace_back();
      const double key = wiring_.linked(host) ? host : wiring_.bandwidth(host);
      const auto [group, first] = groups.emplace(std::make_tuple(wiring_.linked(host), key), this->groups());
      if (first) members_.emplace_back();
      group_.push_back(group->second);
      if (data) data_class_ = entry->second;
    }
    hosts_[at(entry->second)].push_back(host);
    members_[at(group(entry->second))].push_back(host);
  }
}

void JointInstance::add_modes() {
  for (int cls = 0; cls < classes(); ++cls) {
    for (const int s : settings_) {
      const int own = wiring_.in_setting(hosts(cls).front(), s);
      if (own < 0) continue;
      const Problem& costs = problem_.settings[at(s)].problem;
      const auto level = std::find(element_bytes_.begin(), element_bytes_.end(), costs.element_bytes);
      modes_.push_back({cls, s, costs.hosts[at(own)].type, own, static_cast<int>(level - element_bytes_.begin())});
    }
  }
}

const Problem& JointInstance::costs_at(int level) const {
  return problem_.settings[at(setting_at_[at(level)])].problem;
}

bool JointInstance::connects(int from_group, int to_group) const {
  return from_group != to_group || members_[at(from_group)].size() > 1;
}

LinkSpeed JointInstance::speed(int from_group, int to_group) const {
  const std::vector<int>& to = members_[at(to_group)];
  return wiring_.speed(members_[at(from_group)].front(), from_group == to_group ? to[1] : to.front());
}

void JointInstance::compare_senders() {
  const auto faster = [&](int group, int other, int to) {
    // A single host that has been used is no receiver for either.
    if (!connects(group, to) || !connects(other, to)) return true;
    const LinkSpeed speed = this->speed(group, to);
    const LinkSpeed than = this->speed(other, to);
    return speed.bw_bytes_per_s >= than.bw_bytes_per_s && speed.latency_s <= than.latency_s;
  };
  // A smaller element size is only as good if it can do without the widths that are of use to the larger one.
  const bool uncompressed = std::any_of(problem_.widths.begin(), problem_.widths.end(), [](const Width& width) {
    return width.bits == 0 && std::all_of(width.loss.begin(), width.loss.end(), [](double loss) { return loss == 0; });
  });
  as_good_.assign(at(senders()) * at(senders()), 0);
  for (int one = 0; one < senders(); ++one) {
    for (int other = 0; other < senders(); ++other) {
      bool good = uncompressed ? level_of(one) <= level_of(other) : level_of(one) == level_of(other);
      for (int to = 0; to < groups() && good; ++to) good = faster(group_of(one), group_of(other), to);
      as_good_[at(one) * at(senders()) + at(other)] = good ? 1 : 0;
    }
  }
}

}  // namespace pipeedge
