// Plans whose links carry fewer bits per value, whatever that loses.
//
//   wider    0 (uncompressed), 16, 8, 7, 6, 5, 4, 3, 2    narrower
//
// Narrower links lose more precision but are never slower, so the best period grows from narrow to wide. With
// automatic bits, the plan has the period of the narrowest links (no plan with compressed links is faster) and reaches
// it with the widest possible common width. Then each link gets the widest bits with which it stays within that period.
#pragma once

#include <vector>

#include "problem.hpp"

namespace pipeedge {

// Returns the problem with `bits` per value at every cut between two layers; 0 means uncompressed, as do bits that are
// not fewer than those of an uncompressed value.
Problem with_link_bits(Problem problem, int bits);

// Returns the problem with every width that is smaller than an uncompressed value, the widest first.
Problem with_all_link_bits(Problem problem);

// The plan with automatic bits of a problem that has all of them. Only for kThroughput and a single setting: for
// latency, fewer bits are always better.
Solution solve_with_auto_bits(const Problem& problem, const Options& options);

}  // namespace pipeedge
