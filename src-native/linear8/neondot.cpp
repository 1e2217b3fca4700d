#include "tiles_neon.inc"

namespace pipeedge::linear8 {
namespace {

/// SDOT adds four products of 8 bits to each of four sums.
struct NeonDot : OneRow<NeonDot> {
  static constexpr size_t kDepth = 4;
  static constexpr size_t kTileGroups = 6;

  template <size_t kGroups, int kPart>
  static void multiply_part(int32x4_t (*total)[kHalf / 4], const int8x16_t* x, const int8_t* weights) {
    // Each load comes before the products of the weights before, as cores that execute in order would wait for it.
    const int8_t* from = weights + kPart * kColumns * kDepth;
    int8x16_t four = vld1q_s8(from);
#pragma GCC unroll 4
    for (size_t v = 0; v < kHalf / 4; ++v) {
      const int8x16_t next = v + 1 < kHalf / 4 ? vld1q_s8(from + 16 * (v + 1)) : four;
#pragma GCC unroll 6
      for (size_t g = 0; g < kGroups; ++g) total[g][v] = vdotq_laneq_s32(total[g][v], four, x[g], kPart);
      four = next;
    }
  }
};

}  // namespace

const Variant kNeonDot = variant_of<NeonDot>("neondot");

}  // namespace pipeedge::linear8
