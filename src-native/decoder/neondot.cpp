#include "vectors_neon.inc"

namespace pipeedge::decoder {
namespace {

/// Sums of integers and of float32 for six rows and two vectors of columns, and a vector of each row, fit the 32
/// registers. Up to four rows take four vectors of columns, so that they read no cache line of the weights twice. With 4
/// bits two rows have the sums of all columns.
constexpr size_t kCodeRows = 6, kMostSums = 16;
constexpr size_t kNibbleRows = 2;
constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23
/// Where sums begin: they are loaded, because to copy a register takes a unit that could multiply meanwhile.
const volatile Floats kRounders = {kRounder, kRounder, kRounder, kRounder};

/// SDOT adds four products of 8 bits to each of four sums. Those of a group are below 2^22 and begin with the bits of 1.5
/// * 2^23, so that as float32 they are larger by that number: to subtract it takes less than a conversion.
struct DotQuads : ByLane<DotQuads, 4> {
  using Sums = int32x4_t;
  using Row = int8x16_t;
  static Row read(const char* from) { return read_columns(from); }
  static int8x16_t read_columns(const char* from) { return load<int8x16_t>(from); }
  static Sums begin(int32_t) { return vreinterpretq_s32_f32(kRounders); }
  static Floats floats(Sums sum) { return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(kRounder)); }
  template <int kLane>
  static void add(Row x, int8x16_t columns, Sums& sum) {
    sum = vdotq_laneq_s32(sum, columns, x, kLane);
  }
  static int8x16_t spread(uint32_t four) { return vreinterpretq_s8_u32(vdupq_n_u32(four)); }
  static void add(int8x16_t x, Ints columns, Sums& sum) { sum = vdotq_s32(sum, vreinterpretq_s8_s32(columns), x); }
  static Sums first(int8x16_t x, Ints columns) {
    Sums sum = vdupq_n_s32(0);
    add(x, columns, sum);
    return sum;
  }
  static Ints total(Sums sum) { return sum; }
};

}  // namespace

const Product kCodesNeonDot = {kCodeRows, multiply_rows<CodeProduct<DotQuads, kMostSums>, kCodeRows>};
const Product kNibblesNeonDot = {kNibbleRows, multiply_rows<NibbleProduct<DotQuads>, kNibbleRows>};

}  // namespace pipeedge::decoder
