#include "attention.hpp"

#include <algorithm>

#include "../parallel/in_threads.hpp"
#include "heads.hpp"

namespace pipeedge::attention {

namespace {

bool has_avx512() {
#ifdef PIPEEDGE_ATTENTION_X86
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

template <typename Value>
void attend_heads([[maybe_unused]] const Problem<Value>& problem, [[maybe_unused]] std::size_t threads) {
#ifdef PIPEEDGE_ATTENTION_X86
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
#endif
}

}  // namespace

template <>
bool supports<float>() {
  return has_avx512();
}

template <>
bool supports<Bfloat16>() {
#ifdef PIPEEDGE_ATTENTION_X86
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

void attend(const Problem<float>& problem, std::size_t threads) { attend_heads(problem, threads); }
void attend(const Problem<Bfloat16>& problem, std::size_t threads) { attend_heads(problem, threads); }

}  // namespace pipeedge::attention
