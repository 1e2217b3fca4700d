#include "vectors_neon.inc"
// Behind the vectors that it uses.
#include "heads.inc"

namespace pipeedge::attention {
namespace {

/// BFDOT adds the products of two pairs of bfloat16 to each sum.
struct Bfloat16Pairs {
  using Stored = Bfloat16;
  using Packed = Bfloat16;
  static constexpr size_t kInUnit = 2;

  template <int kUnit>
  static Floats multiply_add(Floats sum, Units a, Floats b) {
    return vbfdotq_laneq_f32(sum, vreinterpretq_bf16_f32(b), vreinterpretq_bf16_f32(a), kUnit);
  }

  static Floats load(const char* from, size_t) { return widen(from); }

  static void store(Floats values, char* to, size_t) {
    const bfloat16x4_t halves = vcvt_bf16_f32(values);
    memcpy(to, &halves, sizeof halves);
  }

  static uint16x4_t load_bits(const char* from) {
    uint16_t bits[kLanes];
    memcpy(bits, from, sizeof bits);
    return vld1_u16(bits);
  }

  /// Puts the values of two tokens beside each other; zero behind the last one.
  static void pack_values(const char* from, size_t stride, size_t tokens, Column to) {
    for (size_t j = 0; j < tokens; j += 2, to.at += to.stride) {
      const uint16x4_t odd = j + 1 < tokens ? load_bits(from + (j + 1) * stride) : vdup_n_u16(0);
      const uint16x4x2_t both = vzip_u16(load_bits(from + j * stride), odd);
      memcpy(to.at, &both, sizeof both);
    }
  }

  static void store_weights(Floats weights, char* to) { store(weights, to, kLanes); }

  static void store_results(Floats results, char* to) { store(results, to, kLanes); }
};

}  // namespace

void attend_neonbf16(const Problem<Bfloat16>& problem, size_t item, size_t head, const HeadMemory& memory) {
  attend_head_in<Bfloat16Pairs>(problem, item, head, memory);
}

}  // namespace pipeedge::attention
