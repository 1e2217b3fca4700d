// What a layer takes for sentences of a length at which it was not measured.
//
//   products (projections, MLP)     a + b n          linear between two measured lengths
//   attention                       b n + c n^2      so value / n is linear in n
//
// Between two lengths the curve passes through both; beyond the shortest or the longest, that of the two
// nearest goes on. Shorter sentences never take more than the shortest measured one, nor less than its
// share by tokens (attention: by their square); longer ones never take less than the longest measured one.
#pragma once

#include <vector>

namespace pipeedge {

enum class Growth { kLinear, kSquare };

// The value at `wanted` tokens. `lengths`: ascending, all at least 1; `values`: one for each of them. With
// a single length, its value. Throws std::invalid_argument where sizes disagree or lengths do not ascend.
double at_length(const std::vector<double>& lengths, const std::vector<double>& values, double wanted,
                 Growth growth);

// How a layer of a model grows, from 0: the first of the four layers of a block holds the attention.
constexpr Growth growth_of(int layer) { return layer % 4 == 0 ? Growth::kSquare : Growth::kLinear; }

}  // namespace pipeedge
