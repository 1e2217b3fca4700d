#include "conditions.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "links.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

void check(double value, double least, const std::string& what) {
  if (!(value >= least) || std::isinf(value)) {
    throw std::invalid_argument(what + (least > 0 ? " must be above 0" : " must not be negative"));
  }
}

// Calls visit(aside) for all other kinds of microbatches.
template <typename Visit>
void each_aside(Problem& problem, Visit visit) {
  for (std::vector<Aside>* asides : {&problem.asides, &problem.either, &problem.prompts, &problem.again}) {
    for (Aside& aside : *asides) visit(aside);
  }
}

// Calls visit(setting) for all settings, those of other kinds of microbatches included.
template <typename Visit>
void each_setting(Problem& problem, Visit visit) {
  for (Setting& setting : problem.settings) visit(setting);
  each_aside(problem, [&](Aside& aside) {
    for (Setting& setting : aside.settings) visit(setting);
  });
}

// Calls change(type) for the device type of a host in each setting that has the host, which gets one of its own.
template <typename Change>
void change_types(Problem& problem, int host, Change change) {
  each_setting(problem, [&](Setting& setting) {
    if (setting.type(host) == nullptr) return;
    DeviceType own = *setting.type(host);
    change(own);
    setting.type_of[at(host)] = static_cast<int>(setting.types.size());
    setting.types.push_back(std::move(own));
  });
}

void slow_down(DeviceType& type, double slowness) {
  for (double* seconds : {&type.overhead_s, &type.load_s_per_byte, &type.feed_s, &type.collect_s, &type.input_send_s,
                          &type.output_receive_s}) {
    *seconds *= slowness;
  }
  for (std::vector<double>* seconds : {&type.time_s, &type.receive_s, &type.send_s, &type.stage_s}) {
    for (double& each : *seconds) each *= slowness;
  }
}

// Hosts that were equivalent stay so where they have changed in the same way.
void change_hosts(Problem& problem, const std::vector<HostCondition>& hosts) {
  each_setting(problem, [&](Setting& setting) {
    std::map<std::tuple<int, double, double>, int> changed;
    for (const HostCondition& one : hosts) {
      if (setting.type(one.host) == nullptr || (one.slowness == 1 && one.occupied_bytes == 0)) continue;
      int& type_of = setting.type_of[at(one.host)];
      const auto [entry, is_new] =
          changed.try_emplace({type_of, one.slowness, one.occupied_bytes}, static_cast<int>(setting.types.size()));
      if (is_new) {
        DeviceType own = *setting.type(one.host);
        if (one.slowness != 1) slow_down(own, one.slowness);
        own.mem_bytes = std::max(0.0, own.mem_bytes - one.occupied_bytes);
        setting.types.push_back(std::move(own));
      }
      type_of = entry->second;
    }
  });
}

}  // namespace

Problem with_conditions(Problem problem, const Conditions& conditions) {
  constexpr double kLeast = 1e-9;
  for (const HostCondition& one : conditions.hosts) {
    const std::string& name = problem.hosts[at(one.host)];
    check(one.slowness, kLeast, "the slowness of the host " + name);
    check(one.occupied_bytes, 0, "the occupied memory of the host " + name);
  }
  change_hosts(problem, conditions.hosts);
  for (const HostCondition& one : conditions.hosts) {
    if (one.host != problem.data_host) continue;
    each_aside(problem, [&](Aside& aside) { aside.fixed_s *= one.slowness; });
  }
  const LinkTable links(problem);
  for (const LinkCondition& one : conditions.links) {
    check(one.slowness, kLeast,
          "the slowness of the link from " + problem.hosts[at(one.from)] + " to " + problem.hosts[at(one.to)]);
    // A link in one direction would be used for both.
    const LinkSpeed back = links.speed(one.to, one.from);
    const auto reverse = [&](const Link& link) { return link.from == one.to && link.to == one.from; };
    if (std::none_of(problem.links.begin(), problem.links.end(), reverse)) {
      problem.links.push_back({one.to, one.from, back.bw_bytes_per_s, back.latency_s});
    }
    const LinkSpeed speed = links.speed(one.from, one.to);
    problem.links.push_back({one.from, one.to, speed.bw_bytes_per_s / one.slowness, speed.latency_s * one.slowness});
  }
  if (conditions.data_work && problem.data_host != -1) {
    const DataWork& work = *conditions.data_work;
    change_types(problem, problem.data_host, [&](DeviceType& type) {
      type.feed_s = work.feed_s;
      type.collect_s = work.collect_s;
      type.input_send_s = work.input_send_s;
      type.output_receive_s = work.output_receive_s;
    });
  }
  return problem;
}

Problem without_host(Problem problem, int host) {
  const auto renumbered = [host](int other) { return other > host ? other - 1 : other; };
  problem.hosts.erase(problem.hosts.begin() + host);
  each_setting(problem, [&](Setting& setting) { setting.type_of.erase(setting.type_of.begin() + host); });
  auto& links = problem.links;
  links.erase(std::remove_if(links.begin(), links.end(),
                             [&](const Link& link) { return link.from == host || link.to == host; }),
              links.end());
  for (Link& link : links) {
    link.from = renumbered(link.from);
    link.to = renumbered(link.to);
  }
  problem.data_host = renumbered(problem.data_host);
  return problem;
}

Problem without_stages_on(Problem problem, int host) {
  if (host != problem.data_host) return without_host(std::move(problem), host);
  const std::size_t cuts = problem.model.mem_bytes.size() + 1;
  change_types(problem, host, [&](DeviceType& type) { type.stage_s.assign(cuts * cuts, kInfinity); });
  return problem;
}

Problem with_hosts(Problem problem, const std::string& type, int count) {
  const auto index = [&](const Setting& setting) {
    const auto found = std::find_if(setting.types.begin(), setting.types.end(),
                                    [&](const DeviceType& one) { return one.name == type; });
    return found == setting.types.end() ? Setting::kUnprofiled : static_cast<int>(found - setting.types.begin());
  };
  const bool any = std::any_of(problem.settings.begin(), problem.settings.end(),
                               [&](const Setting& setting) { return index(setting) != Setting::kUnprofiled; });
  for (int added = 0, number = 1; added < count && any; ++number) {
    const std::string name = type + " (new " + std::to_string(number) + ")";
    if (std::find(problem.hosts.begin(), problem.hosts.end(), name) != problem.hosts.end()) continue;
    ++added;
    problem.hosts.push_back(name);
    each_setting(problem, [&](Setting& setting) { setting.type_of.push_back(index(setting)); });
  }
  return problem;
}

Problem with_bandwidth(Problem problem, double factor) {
  each_setting(problem, [&](Setting& setting) {
    for (DeviceType& type : setting.types) type.bw_bytes_per_s *= factor;
  });
  for (Link& link : problem.links) link.bw_bytes_per_s *= factor;
  return problem;
}

}  // namespace pipeedge
