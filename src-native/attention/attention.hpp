// Multi-head attention, https://arxiv.org/abs/1706.03762, eq. 1, from queries, keys and values side by side. Plain
// C++17, no I/O.
//
//   qkv [items, tokens, 3 D]    a token: queries of all heads, keys of all heads, values of all heads
//   out [items, tokens, D]      softmax(q k' / sqrt(D / heads) + bias) v, heads side by side
//
// Nothing is transposed in memory: the keys and values of one head are packed for the processor's vectors, and stay in
// the cache with the scores of a few queries. Rotary positions, https://arxiv.org/abs/2104.09864, are applied to a few
// queries or keys at a time, just before they are used. Within a window, scores are computed only for the keys that a
// few neighbouring queries reach, so time grows with the number of tokens rather than its square.
//
// A value that is NaN reaches exactly the results that depend on it; in a window, it may also reach those of queries up
// to 64 tokens farther away.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipeedge::attention {

/// The bits of a bfloat16. Queries, keys, values and results are float or Bfloat16; scores are float.
using Bfloat16 = std::uint16_t;

/// Head sizes are multiples of this.
constexpr std::size_t kHeadMultiple = 16;

/// A reach that makes every query attend to all keys.
constexpr std::size_t kEverywhere = static_cast<std::size_t>(-1) / 4;

/// All of a problem but the queries, keys, values and results.
struct Shape {
  const float* bias = nullptr;       // [items, tokens], added to the scores of each key, or null
  const float* distances = nullptr;  // [heads, 2 tokens - 1], the scores of key j for query i get j - i + tokens - 1
  const float* cosines = nullptr;    // [rotated, head_size / 2] of the angles by which queries and keys are rotated
  const float* sines = nullptr;
  std::size_t items = 0, tokens = 0, heads = 0;
  std::size_t head_size = 0;        // D / heads, a multiple of kHeadMultiple
  std::size_t rotated = 0;          // number of tokens at the end of a sentence that are rotated
  std::size_t reach = kEverywhere;  // largest distance between a query and the keys that it attends to
};

template <typename Value>
struct Problem : Shape {
  const Value* qkv = nullptr;
  Value* out = nullptr;
};

/// Whether this processor has the instructions: NEON, or AVX-512 and for Bfloat16 its products of bfloat16.
template <typename Value>
bool supports();

/// Computes `out`. The number type must be supported.
void attend(const Problem<float>& problem, std::size_t threads);
void attend(const Problem<Bfloat16>& problem, std::size_t threads);

}  // namespace pipeedge::attention
