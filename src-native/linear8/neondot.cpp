#include "tiles_neon.inc"

namespace pipeedge::linear8 {
namespace {

/// SDOT adds four products of 8 bits to each of four sums.
struct NeonDot : OneRow {
  static constexpr size_t kDepth = 4;
  static constexpr size_t kTileGroups = 6;

  template <size_t kGroups, int kPart>
  static void multiply_part(int32x4_t (*total)[kHalf / 4], const int8x16_t* x, const int8_t* weights) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kHalf / 4; ++v) {
      const int8x16_t four = vld1q_s8(weights + kPart * kColumns * kDepth + 16 * v);
#pragma GCC unroll 6
      for (size_t g = 0; g < kGroups; ++g) total[g][v] = vdotq_laneq_s32(total[g][v], four, x[g], kPart);
    }
  }

  template <size_t kGroups>
  static void multiply_add(int32x4_t (*total)[kHalf / 4], const int8x16_t* x, const int8_t* weights) {
    multiply_part<kGroups, 0>(total, x, weights);
    multiply_part<kGroups, 1>(total, x, weights);
    multiply_part<kGroups, 2>(total, x, weights);
    multiply_part<kGroups, 3>(total, x, weights);
  }
};

}  // namespace

const Variant kNeonDot = {"neondot", NeonDot::kTileGroups, NeonDot::kDepth, kStep, multiply<NeonDot>, quantise, finish};

}  // namespace pipeedge::linear8
