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

/// Products of four codes, for each column.
struct PortableQuads {
  static int32_t start(int32_t start) { return start; }
  static void add(int32_t four, const Ints* columns, Ints* totals) {
    int8_t x[kUnit];
    memcpy(x, &four, sizeof x);
    for (size_t v = 0; v < kVectors; ++v) {
      const Bits codes = reinterpret_cast<Bits>(columns[v]);
      for (size_t i = 0; i < kUnit; ++i) {
        totals[v] += reinterpret_cast<Ints>((codes >> static_cast<uint32_t>(8 * i)) & 0xffU) * x[i];
      }
    }
  }
};

struct PortableNibbles : PortableQuads {
  using Sums = Ints;
  static Ints total(Ints sums) { return sums; }
};

}  // namespace

const Variant kPortable = {"portable",
                           {{kTileRows, multiply_rows<FloatProduct, kTileRows>},
                            {kTileRows, multiply_rows<HalfProduct, kTileRows>},
                            {kTileRows, multiply_rows<CodeProduct<PortableQuads>, kTileRows>},
                            {kTileRows, multiply_rows<NibbleProduct<PortableNibbles>, kTileRows>}},
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
