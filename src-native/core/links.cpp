#include "links.hpp"

#include <algorithm>

namespace pipeedge {

double cut_bytes(const Problem& problem, const Setting& setting, int layer) {
  if (layer == 0 && setting.input_bytes >= 0) return setting.input_bytes * setting.batch_size;
  if (layer == problem.layers() && setting.output_bytes >= 0) return setting.output_bytes * setting.batch_size;
  const double elements =
      layer == 0 ? problem.model.elements_in : problem.model.elements_out[static_cast<std::size_t>(layer - 1)];
  return elements * setting.batch_size * setting.element_bytes;
}

double mean_bytes(const Problem& problem, const Setting& setting, int layer) {
  const double part = setting.carried.empty() ? 1 : setting.carried[static_cast<std::size_t>(layer)];
  return cut_bytes(problem, setting, layer) * part;
}

double link_bytes(const Problem& problem, const Setting& sender, int bits, int layer) {
  const double bytes = mean_bytes(problem, sender, layer);
  return bits == 0 ? bytes : bytes * (bits / (8 * sender.element_bytes));
}

double link_seconds(double bytes, double bw_bytes_per_s, double latency_s) {
  if (bytes <= 0) return latency_s;
  return bw_bytes_per_s > 0 ? bytes / bw_bytes_per_s + latency_s : kInfinity;
}

LinkTable::LinkTable(const Problem& problem) : bandwidth_(problem.hosts.size(), 0) {
  for (const Setting& setting : problem.settings) {
    for (int h = 0; h < problem.host_count(); ++h) {
      const DeviceType* type = setting.type(h);
      if (type != nullptr) bandwidth_[static_cast<std::size_t>(h)] = type->bw_bytes_per_s;
    }
  }
  overrides_.reserve(problem.links.size());
  for (const Link& link : problem.links) {
    overrides_[key(link.from, link.to)] = {link.bw_bytes_per_s, link.latency_s};
  }
}

LinkSpeed LinkTable::speed_by_type(int from, int to) const { return {std::min(bandwidth(from), bandwidth(to)), 0}; }

LinkSpeed LinkTable::speed(int from, int to) const {
  if (!overrides_.empty()) {
    auto entry = overrides_.find(key(from, to));
    if (entry == overrides_.end()) entry = overrides_.find(key(to, from));
    if (entry != overrides_.end()) return entry->second;
  }
  return speed_by_type(from, to);
}

double LinkTable::seconds(int from, int to, double bytes) const {
  if (from == to) return 0;
  const LinkSpeed link = speed(from, to);
  return link_seconds(bytes, link.bw_bytes_per_s, link.latency_s);
}

std::uint64_t LinkTable::key(int from, int to) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(from)) << 32 | static_cast<std::uint32_t>(to);
}

}  // namespace pipeedge
