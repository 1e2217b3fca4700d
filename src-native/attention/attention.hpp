// Multi-head attention, https://arxiv.org/abs/1706.03762, eq. 1, from queries, keys and values side by side. Plain
// C++17, no I/O.
//
//   qkv [items, tokens, 3 D]    a token: queries of all heads, keys of all heads, values of all heads
//   out [items, tokens, D]      softmax(q k' / sqrt(D / heads) + bias) v, heads side by side
//
// Nothing is transposed in memory: the keys and values of one head are packed for the processor's vectors, and stay in
// the cache with the scores of a few queries. A value that is NaN reaches exactly the results that depend on it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipeedge::attention {

/// Number type of queries, keys, values and results; scores are float32.
enum class Element { kFloat32, kBfloat16 };

/// Head sizes are multiples of this.
constexpr std::size_t kHeadMultiple = 16;

struct Problem {
  const void* qkv = nullptr;
  const float* bias = nullptr;  // [items, tokens], added to the scores of each key, or null
  void* out = nullptr;
  std::size_t items = 0, tokens = 0, heads = 0;
  std::size_t head_size = 0;  // D / heads, a multiple of kHeadMultiple
};

/// Whether this processor has the instructions: AVX-512, and for bfloat16 those for products of bfloat16.
bool supports(Element element);

/// Computes `out`. The element must be supported.
void attend(Element element, const Problem& problem, std::size_t threads);

}  // namespace pipeedge::attention
