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
/// Values in the widest vector.
constexpr std::size_t kWidest = 16;

/// Tokens, rounded up to whole vectors of any width.
constexpr std::size_t padded_tokens(std::size_t tokens) { return (tokens + kWidest - 1) / kWidest * kWidest; }

/// Bytes of the packed keys, and of the packed values.
constexpr std::size_t packed_bytes(const Shape& shape) {
  return padded_tokens(shape.tokens) * shape.head_size * sizeof(float);
}

/// Bytes of the queries or keys that are rotated at once.
constexpr std::size_t rotated_bytes(const Shape& shape) { return kWidest * shape.head_size * sizeof(float); }

template <typename Value>
using AttendHead = void (*)(const Problem<Value>& problem, std::size_t item, std::size_t head,
                            const HeadMemory& memory);

#ifdef PIPEEDGE_ATTENTION_X86
void attend_avx512(const Problem<float>& problem, std::size_t item, std::size_t head, const HeadMemory& memory);
void attend_avx512bf16(const Problem<Bfloat16>& problem, std::size_t item, std::size_t head, const HeadMemory& memory);
#endif
#ifdef PIPEEDGE_ATTENTION_ARM
void attend_neon(const Problem<float>& problem, std::size_t item, std::size_t head, const HeadMemory& memory);
/// For processors without products of bfloat16: computes in float32.
void attend_neon(const Problem<Bfloat16>& problem, std::size_t item, std::size_t head, const HeadMemory& memory);
#ifdef PIPEEDGE_ARM_BF16
void attend_neonbf16(const Problem<Bfloat16>& problem, std::size_t item, std::size_t head, const HeadMemory& memory);
#endif
#endif

}  // namespace pipeedge::attention
