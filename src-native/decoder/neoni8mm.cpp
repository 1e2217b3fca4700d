#include "vectors_neon.inc"

namespace pipeedge::decoder {
namespace {

/// As in neondot.cpp.
constexpr size_t kCodeRows = 6;
constexpr size_t kAtOnce = 4;

/// USDOT takes the codes of the weights as they are stored, without sign.
struct MixedQuads {
  using Sums = int32x4_t;
  using Codes = int8x16_t;
  static Sums begin(int32_t start) { return vdupq_n_s32(start); }
  static Codes spread(int32_t four) { return vreinterpretq_s8_s32(vdupq_n_s32(four)); }
  static void add(Codes x, Ints columns, Sums& sums) { sums = vusdotq_s32(sums, vreinterpretq_u8_s32(columns), x); }
  static Ints total(Sums sums) { return sums; }
};

}  // namespace

const Product kCodesNeonI8mm = {kCodeRows, multiply_rows<CodeProduct<MixedQuads, kAtOnce>, kCodeRows>};

}  // namespace pipeedge::decoder
