#include "heads.inc"

namespace pipeedge::attention {
namespace {

struct Bfloat16 {
  using Stored = uint16_t;
  static constexpr size_t kInUnit = 2;

  static __m512 multiply_add(__m512 sum, __m512 a, __m512 b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  static __m512i load(const char* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  /// Puts the values of two tokens beside each other; zero behind the last one.
  static void pack_values(const char* from, size_t stride, size_t tokens, Column to) {
    for (size_t j = 0; j < tokens; j += 2, to.at += to.stride) {
      const __m512i odd = j + 1 < tokens ? load(from + (j + 1) * stride) : _mm512_setzero_si512();
      _mm512_storeu_si512(to.at, _mm512_or_si512(load(from + j * stride), _mm512_slli_epi32(odd, 16)));
    }
  }

  static void store(__m512 values, char* to) {
    const __m256bh halves = _mm512_cvtneps_pbh(values);
    memcpy(to, &halves, sizeof halves);
  }

  static void store_weights(__m512 weights, char* to) { store(weights, to); }

  static void store_results(__m512 results, char* to) { store(results, to); }
};

}  // namespace

void attend_head_bfloat16(const Problem& problem, size_t item, size_t head, const HeadMemory& memory) {
  attend_head<Bfloat16>(problem, item, head, memory);
}

}  // namespace pipeedge::attention
