#include "vectors_avx512.inc"
// Behind the vectors that it uses.
#include "heads.inc"

namespace pipeedge::attention {
namespace {

struct Float32 {
  using Stored = float;
  using Packed = float;
  static constexpr size_t kInUnit = 1;

  template <int kUnit>
  static Floats multiply_add(Floats sum, Units a, Floats b) {
    return _mm512_fmadd_ps(a, b, sum);
  }

  static Floats load(const char* from, size_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }

  static void store(Floats values, char* to, size_t count) { _mm512_mask_storeu_ps(to, first_lanes(count), values); }

  static void pack_values(const char* from, size_t stride, size_t tokens, Column to) {
    for (size_t j = 0; j < tokens; ++j) _mm512_storeu_ps(to.at + j * to.stride, _mm512_loadu_ps(from + j * stride));
  }

  static void store_weights(Floats weights, char* to) { _mm512_storeu_ps(to, weights); }

  static void store_results(Floats results, char* to) { _mm512_storeu_ps(to, results); }
};

}  // namespace

void attend_avx512(const Problem<float>& problem, size_t item, size_t head, const HeadMemory& memory) {
  attend_head_in<Float32>(problem, item, head, memory);
}

}  // namespace pipeedge::attention
