#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// Two registers of sums for each row, two of weights and one of the row fit the 32 registers.
constexpr size_t kTileRows = 12;
constexpr size_t kCodeRows = 4;

/// As in avx2.cpp.
struct SignedQuads : OneUnit<SignedQuads> {
  using Sums = Ints;
  using Columns = Ints;
  struct Spread {
    __m512i sizes;
    __mmask64 negative;
  };
  static Ints begin(int32_t) { return Ints{}; }
  static Spread spread(uint32_t four) {
    const __m512i all = reinterpret_cast<__m512i>(Bits{} + four);
    return {_mm512_abs_epi8(all), _mm512_movepi8_mask(all)};
  }
  static void add(const Spread& x, Ints columns, Ints& sums) {
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(kZero)), ones = _mm512_set1_epi16(1);
    const __m512i w = _mm512_xor_si512(reinterpret_cast<__m512i>(columns), zero);
    const __m512i with_sign = _mm512_mask_sub_epi8(w, x.negative, _mm512_setzero_si512(), w);
    sums += reinterpret_cast<Ints>(_mm512_madd_epi16(_mm512_maddubs_epi16(x.sizes, with_sign), ones));
  }
  static Ints total(Ints sums) { return sums; }
};

/// As in avx2.cpp.
struct ShortQuads {
  using Sums = __m512i;
  static __m512i spread(uint32_t four) { return reinterpret_cast<__m512i>(Bits{} + four); }
  static Sums first(__m512i x, Ints columns) { return _mm512_maddubs_epi16(reinterpret_cast<__m512i>(columns), x); }
  static void add(__m512i x, Ints columns, Sums& sums) { sums = _mm512_add_epi16(sums, first(x, columns)); }
  static Ints total(Sums sums) { return reinterpret_cast<Ints>(_mm512_madd_epi16(sums, _mm512_set1_epi16(1))); }
};

}  // namespace

const Variant kAvx512 = variant_of("avx512", {kTileRows, multiply_rows<UnitProduct<FloatUnits>, kTileRows>},
                                   {kTileRows, multiply_rows<UnitProduct<HalfUnits>, kTileRows>},
                                   {kCodeRows, multiply_rows<CodeProduct<SignedQuads>, kCodeRows>},
                                   {kCodeRows, multiply_rows<NibbleProduct<ShortQuads>, kCodeRows>});

}  // namespace pipeedge::decoder
