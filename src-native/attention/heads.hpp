// One head of heads.inc, compiled for each number type.
#pragma once

#include "attention.hpp"

namespace pipeedge::attention {

/// Memory that a head needs, aligned to 64 bytes.
struct HeadMemory {
  char* keys;     // packed_bytes
  char* values;   // packed_bytes
  char* rotated;  // rotated_bytes
  float* biases;  // padded tokens
  float* scores;  // kHeadRows * padded tokens
};

/// Queries that are processed at once.
constexpr std::size_t kHeadRows = 12;
constexpr std::size_t kVectorLanes = 16;

/// Tokens, rounded up to whole vectors.
constexpr std::size_t padded_tokens(std::size_t tokens) {
  return (tokens + kVectorLanes - 1) / kVectorLanes * kVectorLanes;
}

/// Bytes of the packed keys, and of the packed values.
constexpr std::size_t packed_bytes(const Shape& shape) {
  return padded_tokens(shape.tokens) * shape.head_size * sizeof(float);
}

/// Bytes of the queries or keys that are rotated at once.
constexpr std::size_t rotated_bytes(const Shape& shape) { return kVectorLanes * shape.head_size * sizeof(float); }

#ifdef PIPEEDGE_ATTENTION_X86
void attend_head(const Problem<float>& problem, std::size_t item, std::size_t head, const HeadMemory& memory);
void attend_head(const Problem<Bfloat16>& problem, std::size_t item, std::size_t head, const HeadMemory& memory);
#endif

}  // namespace pipeedge::attention
