#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// As in avx512.cpp.
constexpr size_t kTileRows = 12;

struct PairProduct {
  template <size_t kRows>
  static void multiply(const Tile& tile) {
    multiply_units<kRows>(tile, [](Floats* sums, uint32_t pair, const Floats* columns) {
      const __m512bh x = reinterpret_cast<__m512bh>(all_bits(pair));
#pragma GCC unroll 2
      for (size_t v = 0; v < kVectors; ++v) {
        sums[v] = _mm512_dpbf16_ps(sums[v], x, reinterpret_cast<__m512bh>(columns[v]));
      }
    });
  }
};

}  // namespace

const Product kHalvesAvx512 = {kTileRows, multiply_rows<PairProduct, kTileRows>};

}  // namespace pipeedge::decoder
