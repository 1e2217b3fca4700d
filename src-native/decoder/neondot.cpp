#include "vectors_neon.inc"

namespace pipeedge::decoder {
namespace {

/// Six rows have the sums of four vectors of columns at once, and with 4 bits two rows those of all eight.
constexpr size_t kCodeRows = 6;
constexpr size_t kAtOnce = 4;
constexpr size_t kNibbleRows = 2;

/// SDOT adds four products of 8 bits to each of four sums.
struct DotQuads {
  using Sums = int32x4_t;
  using Codes = int8x16_t;
  static Sums begin(int32_t) { return vdupq_n_s32(0); }
  static Codes spread(int32_t four) { return vreinterpretq_s8_s32(vdupq_n_s32(four)); }
  static void add(Codes x, Ints columns, Sums& sums) { sums = vdotq_s32(sums, vreinterpretq_s8_s32(columns), x); }
  static Ints total(Sums sums) { return sums; }
};

/// The codes of 8 bits are made signed.
struct SignedDotQuads : DotQuads {
  static void add(Codes x, Ints columns, Sums& sums) {
    const int8x16_t zero = vdupq_n_s8(static_cast<int8_t>(kZero - 256));
    sums = vdotq_s32(sums, veorq_s8(vreinterpretq_s8_s32(columns), zero), x);
  }
};

}  // namespace

const Product kCodesNeonDot = {kCodeRows, multiply_rows<CodeProduct<SignedDotQuads, kAtOnce>, kCodeRows>};
const Product kNibblesNeonDot = {kNibbleRows, multiply_rows<NibbleProduct<DotQuads>, kNibbleRows>};

}  // namespace pipeedge::decoder
