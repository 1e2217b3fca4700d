#include <immintrin.h>
#include <stddef.h>

namespace pipeedge::codec {
namespace {

constexpr size_t kTile = 32;

/// The butterflies within a vector, at distances of 4, 2 and 1. The upper half of each pair is subtracted by
/// changing its sign.
inline __m256 butterflies_within(__m256 x) {
  const __m256 by4 = _mm256_setr_ps(0, 0, 0, 0, -0.F, -0.F, -0.F, -0.F);
  const __m256 by2 = _mm256_setr_ps(0, 0, -0.F, -0.F, 0, 0, -0.F, -0.F);
  const __m256 by1 = _mm256_setr_ps(0, -0.F, 0, -0.F, 0, -0.F, 0, -0.F);
  x = _mm256_add_ps(_mm256_permute2f128_ps(x, x, 1), _mm256_xor_ps(x, by4));
  x = _mm256_add_ps(_mm256_permute_ps(x, 0x4e), _mm256_xor_ps(x, by2));
  return _mm256_add_ps(_mm256_permute_ps(x, 0xb1), _mm256_xor_ps(x, by1));
}

/// Multiplies kTile values by the Hadamard matrix of that order, from the largest distance to 1.
inline void multiply_tile(float* tile) {
  const __m256 x0 = _mm256_loadu_ps(tile), x1 = _mm256_loadu_ps(tile + 8);
  const __m256 x2 = _mm256_loadu_ps(tile + 16), x3 = _mm256_loadu_ps(tile + 24);
  const __m256 even_sum = _mm256_add_ps(x0, x2), even_difference = _mm256_sub_ps(x0, x2);
  const __m256 odd_sum = _mm256_add_ps(x1, x3), odd_difference = _mm256_sub_ps(x1, x3);
  _mm256_storeu_ps(tile, butterflies_within(_mm256_add_ps(even_sum, odd_sum)));
  _mm256_storeu_ps(tile + 8, butterflies_within(_mm256_sub_ps(even_sum, odd_sum)));
  _mm256_storeu_ps(tile + 16, butterflies_within(_mm256_add_ps(even_difference, odd_difference)));
  _mm256_storeu_ps(tile + 24, butterflies_within(_mm256_sub_ps(even_difference, odd_difference)));
}

}  // namespace
}  // namespace pipeedge::codec

#define PIPEEDGE_VARIANT kAvx2
#define PIPEEDGE_VARIANT_NAME "avx2"
#include "kernels.inc"
