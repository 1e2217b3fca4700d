#include <arm_neon.h>
#include <stddef.h>

namespace pipeedge::codec {
namespace {

constexpr size_t kTile = 32;
constexpr size_t kVectors = kTile / 4;

/// The butterflies within two vectors, at distances of 2 and 1.
inline void butterflies_within(float32x4_t* first, float32x4_t* second) {
  const float64x2_t x = vreinterpretq_f64_f32(*first), y = vreinterpretq_f64_f32(*second);
  const float32x4_t low = vreinterpretq_f32_f64(vzip1q_f64(x, y)), high = vreinterpretq_f32_f64(vzip2q_f64(x, y));
  const float32x4_t sum = vaddq_f32(low, high), difference = vsubq_f32(low, high);
  const float32x4_t even = vuzp1q_f32(sum, difference), odd = vuzp2q_f32(sum, difference);
  const float32x4_t plus = vaddq_f32(even, odd), minus = vsubq_f32(even, odd);
  *first = vtrn1q_f32(plus, minus);
  *second = vtrn2q_f32(plus, minus);
}

/// Multiplies kTile values by the Hadamard matrix of that order, from the largest distance to 1.
inline void multiply_tile(float* tile) {
  float32x4_t x[kVectors];
#pragma GCC unroll 8
  for (size_t i = 0; i < kVectors; ++i) x[i] = vld1q_f32(tile + 4 * i);
#pragma GCC unroll 3
  for (size_t distance = kVectors / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kVectors; ++i) {
      if ((i & distance) != 0) continue;
      const float32x4_t a = x[i], b = x[i + distance];
      x[i] = vaddq_f32(a, b);
      x[i + distance] = vsubq_f32(a, b);
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < kVectors; i += 2) butterflies_within(x + i, x + i + 1);
#pragma GCC unroll 8
  for (size_t i = 0; i < kVectors; ++i) vst1q_f32(tile + 4 * i, x[i]);
}

}  // namespace
}  // namespace pipeedge::codec

#define PIPEEDGE_VARIANT kNeon
#define PIPEEDGE_VARIANT_NAME "neon"
#include "kernels.inc"
