// Schedules whose links carry fewer bits per value.
//
//   wider    0 (uncompressed), 16, 8, 7, 6, 5, 4, 3, 2    narrower
//
// Narrower links lose more precision but are never slower, so the best bottleneck grows from narrow to
// wide. With automatic bits, the schedule has the bottleneck of the narrowest links (no schedule with
// compressed links is faster) and reaches it with the widest possible common width. Then each link gets
// the widest bits with which it stays within that bottleneck.
#pragma once

#include <vector>

#include "problem.hpp"

namespace pipeedge {

// Bit widths from wide to narrow, without those that are not smaller than an uncompressed value.
std::vector<int> link_widths(const Problem& problem);

// Returns the problem with `bits` per value at every cut between two layers; 0 means uncompressed.
Problem with_link_bits(Problem problem, int bits);

struct AutoBits {
  Problem problem;                // the problem with the bits of each link of the schedule
  Solution solution;
};

// Only for kThroughput: for latency, fewer bits are always better.
AutoBits solve_with_auto_bits(const Problem& problem, const Options& options);

}  // namespace pipeedge
