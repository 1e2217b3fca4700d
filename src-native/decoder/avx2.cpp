#include <immintrin.h>

#define PIPEEDGE_VECTOR_BYTES 32
#define PIPEEDGE_PREFETCH 2048

namespace pipeedge::decoder {
namespace {

typedef float Floats __attribute__((vector_size(PIPEEDGE_VECTOR_BYTES)));

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace pipeedge::decoder

#include "kernels.inc"
#include "variants.hpp"

namespace pipeedge::decoder {
namespace {

constexpr size_t kTileRows = 2;

/// vpmaddubsw needs one factor without sign and adds two products in 16 bits: |x| and w with the sign of x, of at most
/// 127 each, cannot overflow it. The codes are made signed, so the sums begin with 0.
struct SignedQuads : OneUnit<SignedQuads> {
  using Sums = Ints;
  using Columns = Ints;
  struct Spread {
    __m256i all, sizes;
  };
  static Ints begin(int32_t) { return Ints{}; }
  static Spread spread(uint32_t four) {
    const __m256i all = reinterpret_cast<__m256i>(Bits{} + four);
    return {all, _mm256_abs_epi8(all)};
  }
  static void add(const Spread& x, Ints columns, Ints& sums) {
    const __m256i zero = _mm256_set1_epi8(static_cast<char>(kZero)), ones = _mm256_set1_epi16(1);
    const __m256i w = _mm256_xor_si256(reinterpret_cast<__m256i>(columns), zero);
    const __m256i pairs = _mm256_maddubs_epi16(x.sizes, _mm256_sign_epi8(w, x.all));
    sums += reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, ones));
  }
  static Ints total(Ints sums) { return sums; }
};

/// All products of a group, of at most 15 * 127 each, are added in 16 bits: 16 of them in a lane are below 2^15.
struct ShortQuads {
  using Sums = __m256i;
  static __m256i spread(uint32_t four) { return reinterpret_cast<__m256i>(Bits{} + four); }
  static Sums first(__m256i x, Ints columns) { return _mm256_maddubs_epi16(reinterpret_cast<__m256i>(columns), x); }
  static void add(__m256i x, Ints columns, Sums& sums) { sums = _mm256_add_epi16(sums, first(x, columns)); }
  static Ints total(Sums sums) { return reinterpret_cast<Ints>(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }
};

}  // namespace

const Variant kAvx2 =
    variant_of("avx2", {kTileRows, multiply_rows<UnitProduct<FloatUnits>, kTileRows>},
               {kTileRows, multiply_rows<UnitProduct<HalfUnits>, kTileRows>},
               {1, multiply_rows<CodeProduct<SignedQuads>, 1>}, {1, multiply_rows<NibbleProduct<ShortQuads>, 1>});

}  // namespace pipeedge::decoder
