#include "vectors_avx512.inc"
// Behind the vectors that it uses.
#include "heads.inc"

namespace pipeedge::attention {
namespace {

struct Bfloat16Lanes {
  using Stored = Bfloat16;
  using Packed = Bfloat16;
  static constexpr size_t kInUnit = 2;

  template <int kUnit>
  static Floats multiply_add(Floats sum, Units a, Floats b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  static __m512i load_bits(const char* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static Floats load(const char* from, size_t count) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }

  static void store(Floats values, char* to, size_t count) {
    const __m256bh halves = _mm512_cvtneps_pbh(values);
    _mm256_mask_storeu_epi16(to, first_lanes(count), reinterpret_cast<__m256i>(halves));
  }

  /// Puts the values of two tokens beside each other; zero behind the last one.
  static void pack_values(const char* from, size_t stride, size_t tokens, Column to) {
    for (size_t j = 0; j < tokens; j += 2, to.at += to.stride) {
      const __m512i odd = j + 1 < tokens ? load_bits(from + (j + 1) * stride) : _mm512_setzero_si512();
      _mm512_storeu_si512(to.at, _mm512_or_si512(load_bits(from + j * stride), _mm512_slli_epi32(odd, 16)));
    }
  }

  static void store_weights(Floats weights, char* to) {
    const __m256bh halves = _mm512_cvtneps_pbh(weights);
    memcpy(to, &halves, sizeof halves);
  }

  static void store_results(Floats results, char* to) { store_weights(results, to); }
};

}  // namespace

void attend_avx512bf16(const Problem<Bfloat16>& problem, size_t item, size_t head, const HeadMemory& memory) {
  attend_head_in<Bfloat16Lanes>(problem, item, head, memory);
}

}  // namespace pipeedge::attention
