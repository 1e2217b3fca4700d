// How hard to try. Effort is counted in work, not in seconds, so that equal problems get equal answers.
#pragma once

#include <cstdint>

namespace pipeedge {

struct Effort {
  int width;  // labels that a search keeps at a cut
  std::int64_t work;
  double precision;   // of the prices
  double resolution;  // objectives closer than this, relatively, are not told apart
};

// From a first impression to all that a patient user would wait for.
constexpr Effort kEfforts[] = {
    {60, 4'000'000, 1e-3, 3e-3},       {500, 60'000'000, 3e-4, 5e-4},       {4'000, 1'000'000'000, 1e-4, 5e-5},
    {30'000, 20'000'000'000, 1e-5, 0}, {200'000, 400'000'000'000, 1e-6, 0},
};
constexpr Effort kTieEffort = {2'000, 25'000'000, 1e-6, 0};
constexpr Effort kLossyTieEffort = {60, 2'000'000, 1e-3, 0};  // where loss counts, too, ties are many and long to break
constexpr Effort kGlance = {6, 200'000'000, 1e-2, 0};
constexpr int kNarrow = 12;  // width of a search that is only a first try

}  // namespace pipeedge
