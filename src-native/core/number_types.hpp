// Bytes of each number type that stages compute in: the one statement of them, for every program.
#pragma once

#include <string_view>
#include <vector>

namespace pipeedge {

struct NumberType {
  const char* name;
  double element_bytes;                // of a value that crosses a cut; weights in int8 send bfloat16
  double weight_factor;                // weights, of what float32 takes
  double end_weight_factor;            // the same of the first and the last layer, with embeddings and heads
};

const std::vector<NumberType>& number_types();

// nullptr for one that is not known. `name` without "torch.".
const NumberType* find_number_type(std::string_view name);

// Weights of each layer in a type, from those in float32, where nothing more exact is known.
std::vector<double> scaled_weights(const NumberType& type, std::vector<double> float32_bytes);

}  // namespace pipeedge
