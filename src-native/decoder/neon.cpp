#include "vectors_neon.inc"

namespace pipeedge::decoder {
namespace {

/// Eight registers of sums for each row, eight of weights and two of the row fit the 32 registers.
constexpr size_t kTileRows = 2;
/// In 8 bits, two registers of sums for each vector of columns, of which three rows have four at once.
constexpr size_t kCodeRows = 3;
constexpr size_t kAtOnce = 4;

inline int8x16_t signed_codes(int32_t four) { return vreinterpretq_s8_s32(vdupq_n_s32(four)); }
inline Ints integers(int32x4_t values) { return values; }

/// Products of 8 bits have 16. Two of each column are added in 32.
struct LongQuads {
  struct Sums {
    int32x4_t low, high;
  };
  using Codes = int8x16_t;
  static Sums begin(int32_t) { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static Codes spread(int32_t four) { return signed_codes(four); }
  static void add(Codes x, Ints columns, Sums& sums) {
    const int8x16_t zero = vdupq_n_s8(static_cast<int8_t>(kZero - 256));
    const int8x16_t w = veorq_s8(vreinterpretq_s8_s32(columns), zero);
    sums.low = vpadalq_s16(sums.low, vmull_s8(vget_low_s8(w), vget_low_s8(x)));
    sums.high = vpadalq_s16(sums.high, vmull_high_s8(w, x));
  }
  static Ints total(const Sums& sums) { return integers(vpaddq_s32(sums.low, sums.high)); }
};

/// All products of a group, of at most 15 * 127 each, are added in 16 bits: eight of them in a lane.
struct ShortQuads {
  struct Sums {
    int16x8_t low, high;
  };
  using Codes = int8x16_t;
  static Sums begin(int32_t) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  static Codes spread(int32_t four) { return signed_codes(four); }
  static void add(Codes x, Ints columns, Sums& sums) {
    const int8x16_t w = vreinterpretq_s8_s32(columns);
    sums.low = vmlal_s8(sums.low, vget_low_s8(w), vget_low_s8(x));
    sums.high = vmlal_high_s8(sums.high, w, x);
  }
  static Ints total(const Sums& sums) { return integers(vpaddq_s32(vpaddlq_s16(sums.low), vpaddlq_s16(sums.high))); }
};

}  // namespace

const Variant kNeon = variant_of("neon", {kTileRows, multiply_rows<FloatProduct, kTileRows>},
                                 {kTileRows, multiply_rows<HalfProduct, kTileRows>},
                                 {kCodeRows, multiply_rows<CodeProduct<LongQuads, kAtOnce>, kCodeRows>},
                                 {1, multiply_rows<NibbleProduct<ShortQuads>, 1>});

}  // namespace pipeedge::decoder
