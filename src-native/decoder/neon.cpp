#include "vectors_neon.inc"

namespace pipeedge::decoder {
namespace {

/// Sums, a vector of each row and those of columns fit the 32 registers. Codes of 8 bits have two registers for a sum.
constexpr size_t kFloatRows = 6, kFloatSums = 24;
constexpr size_t kHalfRows = 4, kHalfSums = 16;
constexpr size_t kCodeRows = 3, kCodeSums = 12;

struct FloatLanes : ByLane<FloatLanes, 4> {
  using Row = float32x4_t;
  static Row read(const char* from) { return load<Floats>(from); }
  static float32x4_t read_columns(const char* from) { return load<Floats>(from); }
  template <int kLane>
  static void add(Row x, float32x4_t columns, Floats& sum) {
    sum = vfmaq_laneq_f32(sum, columns, x, kLane);
  }
};

/// bfloat16 widened, as in HalfUnits: a vector has the four values of two units of a row.
struct HalfLanes : ByLane<HalfLanes, 2> {
  using Row = float32x4_t;
  struct Columns {
    float32x4_t second, first;
  };
  static Row read(const char* from) { return widen(load<Halves>(from)); }
  static Columns read_columns(const char* from) {
    const Bits both = load<Bits>(from);
    return {reinterpret_cast<Floats>(both & HalfUnits::kUpper), reinterpret_cast<Floats>(both << 16)};
  }
  template <int kLane>
  static void add(Row x, const Columns& columns, Floats& sum) {
    sum = vfmaq_laneq_f32(sum, columns.second, x, 2 * kLane + 1);
    sum = vfmaq_laneq_f32(sum, columns.first, x, 2 * kLane);
  }
};

inline int8x16_t signed_codes(uint32_t four) { return vreinterpretq_s8_u32(vdupq_n_u32(four)); }
inline Ints integers(int32x4_t values) { return values; }

/// Products of 8 bits have 16. Two of at most 127 * 127 each fit, and are added in 32 bits in pairs.
struct LongQuads {
  static constexpr size_t kUnits = kGroup / kUnit;
  struct Sums {
    int32x4_t low, high;
  };
  using Row = const char*;
  static Row read(const char* from) { return from; }
  static Sums begin(int32_t) { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }

  template <size_t kRows, size_t kCount>
  static void add_units(const Row* rows, const char* panel, Sums (*sums)[kCount]) {
    add_half<kRows, true>(rows, 0, panel, sums);
    add_half<kRows, false>(rows, kGroup / 2, panel + kGroup / 2 * kColumns, sums);
  }

  template <size_t kRows, bool kFirst, size_t kCount>
  static void add_half(const Row* rows, size_t byte, const char* panel, Sums (*sums)[kCount]) {
    int32x4_t x[kRows];
#pragma GCC unroll 3
    for (size_t r = 0; r < kRows; ++r) x[r] = load<int32x4_t>(rows[r] + byte);
    add_pair<kRows, 0, kFirst>(x, panel, sums);
    add_pair<kRows, 2, false>(x, panel + 2 * kColumns * kUnit, sums);
  }

  template <size_t kRows, int kLane, bool kFirst, size_t kCount>
  static void add_pair(const int32x4_t* x, const char* panel, Sums (*sums)[kCount]) {
#pragma GCC unroll 8
    for (size_t v = 0; v < kCount; ++v) {
      const int8x16_t one = load<int8x16_t>(panel + 16 * v), two = load<int8x16_t>(panel + kColumns * kUnit + 16 * v);
#pragma GCC unroll 3
      for (size_t r = 0; r < kRows; ++r) {
        const int8x16_t a = vreinterpretq_s8_s32(vdupq_laneq_s32(x[r], kLane));
        const int8x16_t b = vreinterpretq_s8_s32(vdupq_laneq_s32(x[r], kLane + 1));
        const int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(one), vget_low_s8(a)), vget_low_s8(two), vget_low_s8(b));
        const int16x8_t high = vmlal_high_s8(vmull_high_s8(one, a), two, b);
        Sums& sum = sums[r][v];
        sum.low = kFirst ? vpaddlq_s16(low) : vpadalq_s16(sum.low, low);
        sum.high = kFirst ? vpaddlq_s16(high) : vpadalq_s16(sum.high, high);
      }
    }
  }

  static Floats floats(const Sums& sums) { return vcvtq_f32_s32(vpaddq_s32(sums.low, sums.high)); }
};

/// All products of a group, of at most 15 * 127 each, are added in 16 bits: 16 of them in a lane are below 2^15.
struct ShortQuads {
  struct Sums {
    int16x8_t low, high;
  };
  static int8x16_t spread(uint32_t four) { return signed_codes(four); }
  static Sums first(int8x16_t x, Ints columns) {
    const int8x16_t w = vreinterpretq_s8_s32(columns);
    return {vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)};
  }
  static void add(int8x16_t x, Ints columns, Sums& sums) {
    const int8x16_t w = vreinterpretq_s8_s32(columns);
    sums.low = vmlal_s8(sums.low, vget_low_s8(w), vget_low_s8(x));
    sums.high = vmlal_high_s8(sums.high, w, x);
  }
  static Ints total(const Sums& sums) { return integers(vpaddlq_s16(vpaddq_s16(sums.low, sums.high))); }
};

}  // namespace

const Variant kNeon = variant_of("neon", {kFloatRows, multiply_rows<UnitProduct<FloatLanes, kFloatSums>, kFloatRows>},
                                 {kHalfRows, multiply_rows<UnitProduct<HalfLanes, kHalfSums>, kHalfRows>},
                                 {kCodeRows, multiply_rows<CodeProduct<LongQuads, kCodeSums>, kCodeRows>},
                                 {1, multiply_rows<NibbleProduct<ShortQuads>, 1>});

}  // namespace pipeedge::decoder
