#include "links.hpp"

#include <algorithm>

namespace pipeedge {

double cut_bytes(const Problem& problem, int layer) {
  if (layer == 0 && problem.input_bytes >= 0) return problem.input_bytes * problem.batch_size;
  if (layer == problem.model.layers() && problem.output_bytes >= 0) return problem.output_bytes * problem.batch_size;
  const double elements = layer == 0 ? problem.model.elements_in
                                     : problem.model.elements_out[static_cast<std::size_t>(layer - 1)];
  return elements * problem.batch_size * problem.element_bytes;
}

double link_bytes(const Problem& problem, int layer) {
  const int bits = problem.cut_bits.empty() ? 0 : problem.cut_bits[static_cast<std::size_t>(layer)];
  return bits == 0 ? cut_bytes(problem, layer)
                   : cut_bytes(problem, layer) * (bits / (8 * problem.element_bytes));
}

double buffer_bytes(const Problem& problem, int first, int last) {
  return problem.buffers_in * cut_bytes(problem, first) + problem.buffers_out * cut_bytes(problem, last);
}

double link_seconds(double bytes, double bw_bytes_per_s, double latency_s) {
  if (bytes <= 0) return latency_s;
  return bw_bytes_per_s > 0 ? bytes / bw_bytes_per_s + latency_s : kInfinity;
}

LinkTable::LinkTable(const Problem& problem) : problem_(problem) {
  overrides_.reserve(problem.links.size());
  for (const Link& link : problem.links) {
    overrides_[key(link.from, link.to)] = {link.bw_bytes_per_s, link.latency_s};
  }
}

const DeviceType& LinkTable::type_of(int host) const {
  return problem_.types[static_cast<std::size_t>(problem_.hosts[static_cast<std::size_t>(host)].type)];
}

LinkSpeed LinkTable::default_speed(int from, int to) const {
  return {std::min(type_of(from).bw_bytes_per_s, type_of(to).bw_bytes_per_s), 0};
}

LinkSpeed LinkTable::speed(int from, int to) const {
  if (!overrides_.empty()) {
    auto entry = overrides_.find(key(from, to));
    if (entry == overrides_.end()) entry = overrides_.find(key(to, from));
    if (entry != overrides_.end()) return entry->second;
  }
  return default_speed(from, to);
}

double LinkTable::seconds(int from, int to, double bytes) const {
  if (from == to) return 0;
  const LinkSpeed link = speed(from, to);
  return link_seconds(bytes, link.bw_bytes_per_s, link.latency_s);
}

std::uint64_t LinkTable::key(int from, int to) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(from)) << 32 |
         static_cast<std::uint32_t>(to);
}

}  // namespace pipeedge
