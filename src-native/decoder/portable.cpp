#define PIPEEDGE_VECTOR_BYTES 16

namespace pipeedge::decoder {
namespace {

typedef float Floats __attribute__((vector_size(PIPEEDGE_VECTOR_BYTES)));

inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }

}  // namespace
}  // namespace pipeedge::decoder

#include "kernels.inc"
#include "variants.hpp"

namespace pipeedge::decoder {
namespace {

constexpr size_t kTileRows = 2;

struct PortableQuads {
  using Sums = Ints;
  using Codes = int32_t;
  static Ints begin(int32_t start) { return Ints{} + start; }
  static Codes spread(int32_t four) { return four; }
  static void add(Codes four, Ints columns, Ints& sums) {
    int8_t x[kUnit];
    memcpy(x, &four, sizeof x);
    const Bits codes = reinterpret_cast<Bits>(columns);
    for (size_t i = 0; i < kUnit; ++i) {
      sums += reinterpret_cast<Ints>((codes >> static_cast<uint32_t>(8 * i)) & 0xffU) * x[i];
    }
  }
  static Ints total(Ints sums) { return sums; }
};

}  // namespace

const Variant kPortable = variant_of("portable", {kTileRows, multiply_rows<FloatProduct, kTileRows>},
                                     {kTileRows, multiply_rows<HalfProduct, kTileRows>},
                                     {kTileRows, multiply_rows<CodeProduct<PortableQuads>, kTileRows>},
                                     {kTileRows, multiply_rows<NibbleProduct<PortableQuads>, kTileRows>});

}  // namespace pipeedge::decoder
