#include "vectors_neon.inc"

namespace pipeedge::decoder {
namespace {

/// As in neon.cpp.
constexpr size_t kTileRows = 2;

struct PairProduct {
  template <size_t kRows>
  static void multiply(const Tile& tile) {
    multiply_units<kRows>(tile, [](Floats* sums, uint32_t pair, const Floats* columns) {
      const bfloat16x8_t x = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
#pragma GCC unroll 8
      for (size_t v = 0; v < kVectors; ++v) sums[v] = vbfdotq_f32(sums[v], vreinterpretq_bf16_f32(columns[v]), x);
    });
  }
};

}  // namespace

const Product kHalvesNeon = {kTileRows, multiply_rows<PairProduct, kTileRows>};

}  // namespace pipeedge::decoder
