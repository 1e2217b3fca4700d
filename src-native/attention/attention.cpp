#include "attention.hpp"

#include <algorithm>

#include "../parallel/in_threads.hpp"
#include "heads.hpp"

namespace pipeedge::attention {

bool supports(Element element) {
#ifdef PIPEEDGE_ATTENTION_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return false;
  }
  return element == Element::kFloat32 || __builtin_cpu_supports("avx512bf16");
#else
  static_cast<void>(element);
  return false;
#endif
}

void attend(Element element, const Problem& problem, std::size_t threads) {
#ifdef PIPEEDGE_ATTENTION_X86
  const auto attend_head = element == Element::kFloat32 ? attend_head_float32 : attend_head_bfloat16;
  const std::size_t padded = padded_tokens(problem.tokens);
  const std::size_t attended = std::min(problem.tokens, 2 * problem.reach + 1);
  const std::size_t work = 2 * problem.tokens * attended * problem.head_size;
  parallel::in_threads(problem.items * problem.heads, work, threads, [&](const parallel::Range& range) {
    thread_local parallel::Scratch<char> keys, values, rotated;
    thread_local parallel::Scratch<float> biases, scores;
    HeadMemory memory;
    memory.keys = keys.room(packed_bytes(problem));
    memory.values = values.room(packed_bytes(problem));
    memory.rotated = rotated.room(rotated_bytes(problem));
    memory.biases = biases.room(padded);
    memory.scores = scores.room(kHeadRows * std::max(padded, problem.head_size));
    for (std::size_t i = range.begin; i < range.end; ++i) {
      attend_head(problem, i / problem.heads, i % problem.heads, memory);
    }
  });
#else
  static_cast<void>(element);
  static_cast<void>(problem);
  static_cast<void>(threads);
#endif
}

}  // namespace pipeedge::attention
