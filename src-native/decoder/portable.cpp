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

struct PortableQuads : OneUnit<PortableQuads> {
  using Sums = Ints;
  using Columns = Ints;
  static Ints begin(int32_t start) { return Ints{} + (kZero == 0 ? 0 : start); }
  static uint32_t spread(uint32_t four) { return four; }
  static void add(uint32_t four, Ints columns, Ints& sums) {
    int8_t x[kUnit];
    memcpy(x, &four, sizeof x);
    for (size_t i = 0; i < kUnit; ++i) {
      const Ints code = columns << static_cast<int32_t>(24 - 8 * i);
      sums += (kZero == 0 ? code >> 24 : reinterpret_cast<Ints>(reinterpret_cast<Bits>(code) >> 24)) * x[i];
    }
  }
  static Ints first(uint32_t x, Ints columns) {
    Ints sums = begin(0);
    add(x, columns, sums);
    return sums;
  }
  static Ints total(Ints sums) { return sums; }
};

}  // namespace

const Variant kPortable = variant_of("portable", {kTileRows, multiply_rows<UnitProduct<FloatUnits>, kTileRows>},
                                     {kTileRows, multiply_rows<UnitProduct<HalfUnits>, kTileRows>},
                                     {kTileRows, multiply_rows<CodeProduct<PortableQuads>, kTileRows>},
                                     {kTileRows, multiply_rows<NibbleProduct<PortableQuads>, kTileRows>});

}  // namespace pipeedge::decoder
