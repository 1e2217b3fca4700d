#include "tiles_neon.inc"

namespace pipeedge::linear8 {
namespace {

/// USMMLA multiplies two rows of eight codes by two columns of eight weights, and adds to their four sums.
struct NeonI8mm {
  static constexpr size_t kDepth = 8;
  static constexpr size_t kGroupRows = 2;
  static constexpr size_t kTileGroups = 3;
  static constexpr size_t kSums = kHalf / 2;

  /// Where the codes of both rows are: eight of each are read when it is their turn, so that registers suffice.
  struct Codes {
    const uint8_t* first_row;
    const uint8_t* last_row;
  };

  static void start(const int32_t* columns, int32x4_t* total) {
#pragma GCC unroll 8
    for (size_t v = 0; v < kSums; ++v) {
      const int32x2_t two = vld1_s32(columns + 2 * v);
      total[v] = vcombine_s32(two, two);
    }
  }

  static Codes load(const uint8_t* first_row, const uint8_t* last_row) { return {first_row, last_row}; }

  template <size_t kGroups>
  static void multiply_add(int32x4_t (*total)[kSums], const Codes* x, const int8_t* weights) {
#pragma GCC unroll 2
    for (size_t part = 0; part < kStep; part += kDepth) {
      uint8x16_t codes[kGroups];
#pragma GCC unroll 3
      for (size_t g = 0; g < kGroups; ++g) {
        codes[g] = vcombine_u8(vld1_u8(x[g].first_row + part), vld1_u8(x[g].last_row + part));
      }
#pragma GCC unroll 8
      for (size_t v = 0; v < kSums; ++v) {
        const int8x16_t two = vld1q_s8(weights + part * kColumns + 16 * v);
#pragma GCC unroll 3
        for (size_t g = 0; g < kGroups; ++g) total[g][v] = vusmmlaq_s32(total[g][v], codes[g], two);
      }
    }
  }

  static void store(const int32x4_t* total, int32_t* first_row, int32_t* last_row) {
    // Where both are one row, its sums are written last.
#pragma GCC unroll 4
    for (size_t v = 0; v < kSums; v += 2) {
      const int64x2_t left = vreinterpretq_s64_s32(total[v]), right = vreinterpretq_s64_s32(total[v + 1]);
      vst1q_s32(last_row + 2 * v, vreinterpretq_s32_s64(vzip2q_s64(left, right)));
      vst1q_s32(first_row + 2 * v, vreinterpretq_s32_s64(vzip1q_s64(left, right)));
    }
  }
};

}  // namespace

const Variant kNeonI8mm = variant_of<NeonI8mm>("neoni8mm");

}  // namespace pipeedge::linear8
