#include "what_if.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "../yaml/wording.hpp"

namespace pipeedge::cli {
namespace {

Problem with_hosts(Problem problem, const Change& change) {
  const auto type = std::find_if(problem.types.begin(), problem.types.end(),
                                 [&](const DeviceType& one) { return one.name == change.name; });
  if (type == problem.types.end()) {
    std::vector<std::string> names;
    for (const DeviceType& one : problem.types) names.push_back(yaml::printable(one.name));
    throw UsageError(
        yaml::printable(change.text) +
        ": no such device type with a profile for the request; there are: " + yaml::listing(names));
  }
  const int index = static_cast<int>(type - problem.types.begin());
  for (int i = 0; i < change.count; ++i) {
    problem.hosts.push_back({change.name + " (new " + std::to_string(i + 1) + ")", index});
  }
  return problem;
}

Problem without_host_of(const Problem& problem, const Change& change) {
  const auto found = std::find_if(problem.hosts.begin(), problem.hosts.end(),
                                  [&](const Host& host) { return host.name == change.name; });
  if (found == problem.hosts.end()) {
    std::vector<std::string> names;
    for (const Host& host : problem.hosts) names.push_back(yaml::printable(host.name));
    throw UsageError(yaml::printable(change.text) +
                     ": no such host to schedule on; there are: " + yaml::listing(names));
  }
  const int gone = static_cast<int>(found - problem.hosts.begin());
  if (gone == problem.data_host) {
    throw UsageError(yaml::printable(change.text) + ": it is the data host; name another with --data-host");
  }
  return without_host(problem, gone);
}

Problem with_bandwidth(Problem problem, double factor) {
  for (DeviceType& type : problem.types) type.bw_bytes_per_s *= factor;
  for (Link& link : problem.links) link.bw_bytes_per_s *= factor;
  return problem;
}

}  // namespace

Problem without_host(const Problem& problem, int host) {
  Problem rest = problem;
  const auto renumbered = [host](int other) { return other > host ? other - 1 : other; };
  rest.hosts.erase(rest.hosts.begin() + host);
  rest.links.clear();
  for (Link link : problem.links) {
    if (link.from == host || link.to == host) continue;
    link.from = renumbered(link.from);
    link.to = renumbered(link.to);
    rest.links.push_back(link);
  }
  rest.data_host = renumbered(problem.data_host);
  return rest;
}

Problem changed(const Problem& problem, const Change& change) {
  switch (change.kind) {
    case Change::Kind::kAddHost: return with_hosts(problem, change);
    case Change::Kind::kRemoveHost: return without_host_of(problem, change);
    case Change::Kind::kScaleBandwidth: return with_bandwidth(problem, change.factor);
  }
  return problem;
}

}  // namespace pipeedge::cli
