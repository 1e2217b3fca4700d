// Links between hosts, and what crosses a cut: the one place that turns bytes into seconds.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "problem.hpp"

namespace pipeedge {

// Bytes of one microbatch at the cut in front of `layer`, in memory; at 0 the input, at L the output.
double cut_bytes(const Problem& problem, int layer);

// The same on a link, with the bits that Problem::cut_bits says.
double link_bytes(const Problem& problem, int layer);

// Bytes of the microbatches that a stage [first, last) holds in front of and behind it.
double buffer_bytes(const Problem& problem, int first, int last);

// bandwidth 0 carries nothing; no bytes cost the latency alone.
double link_seconds(double bytes, double bw_bytes_per_s, double latency_s);

struct LinkSpeed {
  double bw_bytes_per_s = 0;
  double latency_s = 0;

  bool operator==(const LinkSpeed& other) const {
    return bw_bytes_per_s == other.bw_bytes_per_s && latency_s == other.latency_s;
  }
};

// What joins each ordered pair of hosts: an entry of Problem::links, else the entry of the opposite
// direction, else the slower of the two device types without latency.
class LinkTable {
 public:
  explicit LinkTable(const Problem& problem);

  const DeviceType& type_of(int host) const;
  LinkSpeed speed(int from, int to) const;
  // Seconds for `bytes` from one host to another; a host reaches itself at no cost.
  double seconds(int from, int to, double bytes) const;

 private:
  LinkSpeed default_speed(int from, int to) const;
  static std::uint64_t key(int from, int to);

  const Problem& problem_;
  std::unordered_map<std::uint64_t, LinkSpeed> overrides_;
};

}  // namespace pipeedge
