#include "vectors_neon.inc"

namespace pipeedge::decoder {
namespace {

/// As those of float32 in neon.cpp.
constexpr size_t kTileRows = 6, kMostSums = 24;

struct PairLanes : ByLane<PairLanes, 4> {
  using Row = bfloat16x8_t;
  static Row read(const char* from) { return read_columns(from); }
  static bfloat16x8_t read_columns(const char* from) { return vreinterpretq_bf16_f32(load<Floats>(from)); }
  template <int kLane>
  static void add(Row x, bfloat16x8_t columns, Floats& sum) {
    sum = vbfdotq_laneq_f32(sum, columns, x, kLane);
  }
};

}  // namespace

const Product kHalvesNeon = {kTileRows, multiply_rows<UnitProduct<PairLanes, kMostSums>, kTileRows>};

}  // namespace pipeedge::decoder
