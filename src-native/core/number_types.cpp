#include "number_types.hpp"

#include <cstddef>

namespace pipeedge {

const std::vector<NumberType>& number_types() {
  // With int8, the linear layers of blocks have one byte per weight and a scale per row: 0.3 is an upper
  // bound. Embeddings and heads stay bfloat16. Of decoders, int8 and int4 are in groups of 32 with a scale; their profiles
  // have the sizes.
  static const std::vector<NumberType> types{{"float32", 4, 1, 1},
                                             {"bfloat16", 2, 0.5, 0.5},
                                             {"float16", 2, 0.5, 0.5},
                                             {"int8", 2, 0.3, 0.5},
                                             {"int4", 2, 0.15, 0.5}};
  return types;
}

const NumberType* find_number_type(std::string_view name) {
  for (const NumberType& type : number_types()) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

std::vector<double> scaled_weights(const NumberType& type, std::vector<double> float32_bytes) {
  for (std::size_t i = 0; i < float32_bytes.size(); ++i) {
    const bool end = i == 0 || i + 1 == float32_bytes.size();
    float32_bytes[i] *= end ? type.end_weight_factor : type.weight_factor;
  }
  return float32_bytes;
}

}  // namespace pipeedge
