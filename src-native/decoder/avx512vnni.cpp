#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// Two registers of integers and two of numbers for each row fit the 32 registers.
constexpr size_t kTileRows = 6;

struct VnniQuads {
  using Sums = Ints;
  using Codes = __m512i;
  static Ints begin(int32_t start) { return Ints{} + start; }
  static Codes spread(int32_t four) { return _mm512_set1_epi32(four); }
  static void add(const Codes& x, Ints columns, Ints& sums) {
    sums = reinterpret_cast<Ints>(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(columns), x));
  }
  static Ints total(Ints sums) { return sums; }
};

}  // namespace

const Product kNibblesAvx512 = {kTileRows, multiply_rows<NibbleProduct<VnniQuads>, kTileRows>};
const Product kCodesAvx512 = {kTileRows, multiply_rows<CodeProduct<VnniQuads>, kTileRows>};

}  // namespace pipeedge::decoder
