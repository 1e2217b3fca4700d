#include "tiles_neon.inc"

namespace pipeedge::linear8 {
namespace {

/// Products of 8 bits have 16; two of at most 127 * 127 each fit, and are added to the sums in pairs.
struct Neon : OneRow<Neon> {
  static constexpr size_t kDepth = 2;
  static constexpr size_t kTileGroups = 4;

  template <size_t kGroups, int kPart>
  static void multiply_part(int32x4_t (*total)[kHalf / 4], const int8x16_t* x, const int8_t* weights) {
    constexpr size_t kPair = kColumns * kDepth;
    weights += 2 * kPart * kPair;
#pragma GCC unroll 2
    for (size_t v = 0; v < kHalf / 8; ++v) {
      const int8x16_t one = vld1q_s8(weights + 16 * v), two = vld1q_s8(weights + kPair + 16 * v);
#pragma GCC unroll 4
      for (size_t g = 0; g < kGroups; ++g) {
        const int16x8_t pairs = vreinterpretq_s16_s8(x[g]);
        const int8x16_t a = vreinterpretq_s8_s16(vdupq_laneq_s16(pairs, 2 * kPart));
        const int8x16_t b = vreinterpretq_s8_s16(vdupq_laneq_s16(pairs, 2 * kPart + 1));
        int16x8_t low = vmull_s8(vget_low_s8(one), vget_low_s8(a));
        int16x8_t high = vmull_high_s8(one, a);
        low = vmlal_s8(low, vget_low_s8(two), vget_low_s8(b));
        high = vmlal_high_s8(high, two, b);
        total[g][2 * v] = vpadalq_s16(total[g][2 * v], low);
        total[g][2 * v + 1] = vpadalq_s16(total[g][2 * v + 1], high);
      }
    }
  }
};

}  // namespace

const Variant kNeon = variant_of<Neon>("neon");

}  // namespace pipeedge::linear8
