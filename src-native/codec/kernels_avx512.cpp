#include <immintrin.h>
#include <stddef.h>

namespace pipeedge::codec {
namespace {

constexpr size_t kTile = 64;

/// The butterflies within a vector, at distances of 8, 4, 2 and 1. The upper half of each pair is subtracted by a
/// factor of -1; the fused sum is rounded once, as the difference is.
inline __m512 butterflies_within(__m512 x) {
  const __m512 one = _mm512_set1_ps(1), minus_one = _mm512_set1_ps(-1);
  x = _mm512_fmadd_ps(x, _mm512_mask_mov_ps(one, 0xff00, minus_one), _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_fmadd_ps(x, _mm512_mask_mov_ps(one, 0xf0f0, minus_one), _mm512_shuffle_f32x4(x, x, 0xb1));
  x = _mm512_fmadd_ps(x, _mm512_mask_mov_ps(one, 0xcccc, minus_one), _mm512_permute_ps(x, 0x4e));
  return _mm512_fmadd_ps(x, _mm512_mask_mov_ps(one, 0xaaaa, minus_one), _mm512_permute_ps(x, 0xb1));
}

/// Multiplies kTile values by the Hadamard matrix of that order, from the largest distance to 1.
inline void multiply_tile(float* tile) {
  const __m512 x0 = _mm512_loadu_ps(tile), x1 = _mm512_loadu_ps(tile + 16);
  const __m512 x2 = _mm512_loadu_ps(tile + 32), x3 = _mm512_loadu_ps(tile + 48);
  const __m512 even_sum = _mm512_add_ps(x0, x2), even_difference = _mm512_sub_ps(x0, x2);
  const __m512 odd_sum = _mm512_add_ps(x1, x3), odd_difference = _mm512_sub_ps(x1, x3);
  _mm512_storeu_ps(tile, butterflies_within(_mm512_add_ps(even_sum, odd_sum)));
  _mm512_storeu_ps(tile + 16, butterflies_within(_mm512_sub_ps(even_sum, odd_sum)));
  _mm512_storeu_ps(tile + 32, butterflies_within(_mm512_add_ps(even_difference, odd_difference)));
  _mm512_storeu_ps(tile + 48, butterflies_within(_mm512_sub_ps(even_difference, odd_difference)));
}

}  // namespace
}  // namespace pipeedge::codec

#define PIPEEDGE_VARIANT kAvx512
#define PIPEEDGE_VARIANT_NAME "avx512"
#include "kernels.inc"
