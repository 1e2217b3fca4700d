#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// Two registers of sums for each row, two of weights and one of the row fit the 32 registers.
constexpr size_t kTileRows = 12;
constexpr size_t kCodeRows = 4;

/// As in avx2.cpp.
struct SignedQuads {
  static int32_t start(int32_t) { return 0; }
  static void add(int32_t four, const Ints* columns, Ints* totals) {
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(kZero));
    const __m512i x = _mm512_set1_epi32(four), size = _mm512_abs_epi8(x), ones = _mm512_set1_epi16(1);
    const __mmask64 negative = _mm512_movepi8_mask(x);
#pragma GCC unroll 2
    for (size_t v = 0; v < kVectors; ++v) {
      const __m512i w = _mm512_xor_si512(reinterpret_cast<__m512i>(columns[v]), zero);
      const __m512i with_sign = _mm512_mask_sub_epi8(w, negative, _mm512_setzero_si512(), w);
      totals[v] += reinterpret_cast<Ints>(_mm512_madd_epi16(_mm512_maddubs_epi16(size, with_sign), ones));
    }
  }
};

/// As in avx2.cpp.
struct ShortQuads {
  using Sums = __m512i;
  static void add(int32_t four, const Ints* columns, Sums* totals) {
    const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 2
    for (size_t v = 0; v < kVectors; ++v) {
      totals[v] = _mm512_add_epi16(totals[v], _mm512_maddubs_epi16(reinterpret_cast<__m512i>(columns[v]), x));
    }
  }
  static Ints total(Sums sums) { return reinterpret_cast<Ints>(_mm512_madd_epi16(sums, _mm512_set1_epi16(1))); }
};

}  // namespace

const Variant kAvx512 = {"avx512",
                         {{kTileRows, multiply_rows<FloatProduct, kTileRows>},
                          {kTileRows, multiply_rows<HalfProduct, kTileRows>},
                          {kCodeRows, multiply_rows<CodeProduct<SignedQuads>, kCodeRows>},
                          {kCodeRows, multiply_rows<NibbleProduct<ShortQuads>, kCodeRows>}},
                         normalise,
                         narrow,
                         round,
                         quantise,
                         fit,
                         expand,
                         activate,
                         cap,
                         weigh,
                         mix};

}  // namespace pipeedge::decoder
