// Scaling of a layer's costs to sentences of a length that was not measured.
//
//   products (projections, MLP)     a + b n          linear between two measured lengths
//   attention                       b n + c n^2      so value / n is linear in n
//
// Between two lengths, the curve passes through both; beyond the shortest or the longest, the curve of the
// two nearest continues. Shorter sentences never take more than the shortest measured one, nor less than
// in proportion to tokens (attention: to their square); longer ones never take less than the longest one.
#pragma once

#include <vector>

namespace pipeedge {

enum class Growth { kLinear, kSquare };

// Returns the value at `wanted` tokens. `lengths` ascend and are at least 1; `values` has one for each. With
// a single length, returns its value. Throws std::invalid_argument if sizes differ or lengths do not ascend.
double at_length(const std::vector<double>& lengths, const std::vector<double>& values, double wanted, Growth growth);

// How the cost of layer `layer` (from 0) grows: the first of the four layers of a block has the attention.
constexpr Growth growth_of(int layer) { return layer % 4 == 0 ? Growth::kSquare : Growth::kLinear; }

}  // namespace pipeedge
