// Links between hosts, and the bytes at each cut. Only this file converts bytes to seconds.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "problem.hpp"

namespace pipeedge {

// Bytes of one microbatch in memory at the cut before `layer`; 0 is the input, L the output.
double cut_bytes(const Problem& problem, int layer);

// The same on a link, with the bits of Problem::cut_bits.
double link_bytes(const Problem& problem, int layer);

// Bytes of the microbatches that a stage [first, last) buffers before and after itself.
double buffer_bytes(const Problem& problem, int first, int last);

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
// direction, else the smaller bandwidth of the two device types without latency.
class LinkTable {
 public:
  explicit LinkTable(const Problem& problem);

  const DeviceType& type_of(int host) const;
  LinkSpeed speed(int from, int to) const;
  // Seconds to send `bytes` from one host to another; sending to itself costs nothing.
  double seconds(int from, int to, double bytes) const;

 private:
  LinkSpeed default_speed(int from, int to) const;
  static std::uint64_t key(int from, int to);

  const Problem& problem_;
  std::unordered_map<std::uint64_t, LinkSpeed> overrides_;
};

}  // namespace pipeedge
