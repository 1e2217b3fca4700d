// Sizes of the number types of stages. All programs use this single definition.
#pragma once

#include <string_view>
#include <vector>

namespace pipeedge {

struct NumberType {
  const char* name;
  double element_bytes;      // of a value that crosses a cut; a stage with int8 weights sends bfloat16
  double weight_factor;      // size of weights relative to float32
  double end_weight_factor;  // the same for the first and the last layer, which have embeddings and heads
};

const std::vector<NumberType>& number_types();

// Returns nullptr for an unknown type. `name` is without "torch.".
const NumberType* find_number_type(std::string_view name);

// Estimates the size of each layer's weights in a type from that in float32.
std::vector<double> scaled_weights(const NumberType& type, std::vector<double> float32_bytes);

}  // namespace pipeedge
