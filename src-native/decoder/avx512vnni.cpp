#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// Two registers of integers and two of numbers for each row fit the 32 registers.
constexpr size_t kTileRows = 6;

struct VnniQuads : OneUnit<VnniQuads> {
  using Sums = Ints;
  using Columns = Ints;
  static Ints begin(int32_t start) { return Ints{} + start; }
  static __m512i spread(uint32_t four) { return reinterpret_cast<__m512i>(Bits{} + four); }
  static void add(__m512i x, Ints columns, Ints& sums) {
    sums = reinterpret_cast<Ints>(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(columns), x));
  }
  static Ints first(__m512i x, Ints columns) {
    Ints sums = begin(0);
    add(x, columns, sums);
    return sums;
  }
  static Ints total(Ints sums) { return sums; }
};

}  // namespace

const Product kNibblesAvx512 = {kTileRows, multiply_rows<NibbleProduct<VnniQuads>, kTileRows>};
const Product kCodesAvx512 = {kTileRows, multiply_rows<CodeProduct<VnniQuads>, kTileRows>};

}  // namespace pipeedge::decoder
