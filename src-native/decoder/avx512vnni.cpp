#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// Two registers of integers and two of numbers for each row fit the 32 registers.
constexpr size_t kTileRows = 6;

struct VnniQuads {
  static int32_t start(int32_t start) { return start; }
  static void add(int32_t four, const Ints* columns, Ints* totals) {
    const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 2
    for (size_t v = 0; v < kVectors; ++v) {
      totals[v] = reinterpret_cast<Ints>(
          _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(totals[v]), reinterpret_cast<__m512i>(columns[v]), x));
    }
  }
};

/// The sums of codes of 4 bits need no start.
struct NibbleQuads : VnniQuads {
  using Sums = Ints;
  static Ints total(Ints sums) { return sums; }
};

}  // namespace

const Product kNibblesAvx512 = {kTileRows, multiply_rows<NibbleProduct<NibbleQuads>, kTileRows>};
const Product kCodesAvx512 = {kTileRows, multiply_rows<CodeProduct<VnniQuads>, kTileRows>};

}  // namespace pipeedge::decoder
