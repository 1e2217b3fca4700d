#include "heads.inc"

namespace pipeedge::attention {
namespace {

struct Float32 {
  using Stored = float;
  static constexpr size_t kInUnit = 1;

  static __m512 multiply_add(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }

  static __m512 load(const char* from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }

  static void store(__m512 values, char* to, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, values); }

  static void pack_values(const char* from, size_t stride, size_t tokens, Column to) {
    for (size_t j = 0; j < tokens; ++j) _mm512_storeu_ps(to.at + j * to.stride, _mm512_loadu_ps(from + j * stride));
  }

  static void store_weights(__m512 weights, char* to) { _mm512_storeu_ps(to, weights); }

  static void store_results(__m512 results, char* to) { _mm512_storeu_ps(to, results); }
};

}  // namespace

void attend_head(const Problem<float>& problem, size_t item, size_t head, const HeadMemory& memory) {
  attend_head_in<Float32>(problem, item, head, memory);
}

}  // namespace pipeedge::attention
