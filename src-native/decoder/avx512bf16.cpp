#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// As in avx512.cpp.
constexpr size_t kTileRows = 12;

struct PairUnits : OneUnit<PairUnits> {
  using Columns = Floats;
  static __m512bh spread(uint32_t pair) { return reinterpret_cast<__m512bh>(all_bits(pair)); }
  static void add(__m512bh x, Floats columns, Floats& sum) {
    sum = _mm512_dpbf16_ps(sum, x, reinterpret_cast<__m512bh>(columns));
  }
};

}  // namespace

const Product kHalvesAvx512 = {kTileRows, multiply_rows<UnitProduct<PairUnits>, kTileRows>};

}  // namespace pipeedge::decoder
