#include "attention.hpp"

#include <algorithm>

#include "../parallel/in_threads.hpp"
#include "../processor/features.hpp"
#include "heads.hpp"

namespace pipeedge::attention {

namespace {

#ifdef PIPEEDGE_ATTENTION_X86
bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

/// The best code for one head on this processor, or null if there is none.
AttendHead<float> find_head(const float*) {
#ifdef PIPEEDGE_ATTENTION_X86
  if (has_avx512()) return attend_avx512;
#endif
#ifdef PIPEEDGE_ATTENTION_ARM
  return attend_neon;
#else
  return nullptr;
#endif
}

AttendHead<Bfloat16> find_head(const Bfloat16*) {
#ifdef PIPEEDGE_ATTENTION_X86
  if (has_avx512() && __builtin_cpu_supports("avx512bf16")) return attend_avx512bf16;
#endif
#ifdef PIPEEDGE_ATTENTION_ARM
#ifdef PIPEEDGE_ARM_BF16
  if (processor::arm_features().bfloat16) return attend_neonbf16;
#endif
  return attend_neon;
#else
  return nullptr;
#endif
}

template <typename Value>
AttendHead<Value> best_head() {
  static const AttendHead<Value> best = find_head(static_cast<const Value*>(nullptr));
  return best;
}

template <typename Value>
void attend_heads(const Problem<Value>& problem, std::size_t threads) {
  const AttendHead<Value> attend_head = best_head<Value>();
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
}

}  // namespace

template <>
bool supports<float>() {
  return best_head<float>() != nullptr;
}

template <>
bool supports<Bfloat16>() {
  return best_head<Bfloat16>() != nullptr;
}

void attend(const Problem<float>& problem, std::size_t threads) { attend_heads(problem, threads); }
void attend(const Problem<Bfloat16>& problem, std::size_t threads) { attend_heads(problem, threads); }

}  // namespace pipeedge::attention
