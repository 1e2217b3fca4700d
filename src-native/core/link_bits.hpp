// Schedules whose links carry fewer bits a value.
//
//   wider    0 (as it is), 16, 8, 7, 6, 5, 4, 3, 2    narrower
//
// Narrower links lose more and are never slower, so the best bottleneck grows from narrow to wide. With
// automatic bits the schedule is the one that, first, has the bottleneck of the narrowest links (no
// schedule with compressed links is faster); second, reaches it with the widest common width; and
// then each link gets the widest with which it still is within that bottleneck.
#pragma once

#include <vector>

#include "problem.hpp"

namespace pipeedge {

// From wide to narrow; those that are not smaller than a value as it is are left out.
std::vector<int> link_widths(const Problem& problem);

// The problem with `bits` a value at every cut between two layers; 0: as it is.
Problem with_link_bits(Problem problem, int bits);

struct AutoBits {
  Problem problem;                // with the bits of each link of the schedule
  Solution solution;
};

// kThroughput only: for latency, fewer bits are always better.
AutoBits solve_with_auto_bits(const Problem& problem, const Options& options);

}  // namespace pipeedge
