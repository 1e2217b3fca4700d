// Links between hosts, and the bytes at each cut. Only this file converts bytes to seconds.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "problem.hpp"

namespace pipeedge {

// Bytes of the largest microbatch in memory at the cut before `layer`; 0 is the input, L the output.
double cut_bytes(const Problem& problem, const Setting& setting, int layer);

// The same on average, which is less where microbatches differ.
double mean_bytes(const Problem& problem, const Setting& setting, int layer);

// Those on a link between two stages, at so many bits per value; 0: uncompressed.
double link_bytes(const Problem& problem, const Setting& sender, int bits, int layer);

// Whether a width is smaller than uncompressed values of the sender, or is none.
inline bool useful(const Setting& sender, int bits) { return bits < 8 * sender.element_bytes; }

// A bandwidth of 0 carries nothing; sending no bytes costs only the latency.
double link_seconds(double bytes, double bw_bytes_per_s, double latency_s);

struct LinkSpeed {
  double bw_bytes_per_s = 0;
  double latency_s = 0;

  bool operator==(const LinkSpeed& other) const {
    return bw_bytes_per_s == other.bw_bytes_per_s && latency_s == other.latency_s;
  }
};

// The link between each ordered pair of hosts: an entry of Problem::links, else the entry for the opposite
// direction, else the smaller bandwidth of the two hosts' device types without latency.
class LinkTable {
 public:
  explicit LinkTable(const Problem& problem);

  double bandwidth(int host) const { return bandwidth_[static_cast<std::size_t>(host)]; }
  LinkSpeed speed_by_type(int from, int to) const;
  LinkSpeed speed(int from, int to) const;
  // Seconds to send `bytes` from one host to another; sending to itself costs nothing.
  double seconds(int from, int to, double bytes) const;

 private:
  static std::uint64_t key(int from, int to);

  std::vector<double> bandwidth_;  // by host
  std::unordered_map<std::uint64_t, LinkSpeed> overrides_;
};

}  // namespace pipeedge
