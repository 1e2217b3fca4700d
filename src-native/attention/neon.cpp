#include "vectors_neon.inc"
// Behind the vectors that it uses.
#include "heads.inc"

namespace pipeedge::attention {
namespace {

struct Float32 {
  using Stored = float;
  using Packed = float;
  static constexpr size_t kInUnit = 1;

  template <int kUnit>
  static Floats multiply_add(Floats sum, Units a, Floats b) {
    return vfmaq_laneq_f32(sum, b, a, kUnit);
  }

  static Floats load(const char* from, size_t) { return vld1q_f32(reinterpret_cast<const float*>(from)); }

  static void store(Floats values, char* to, size_t) { vst1q_f32(reinterpret_cast<float*>(to), values); }

  static void pack_values(const char* from, size_t stride, size_t tokens, Column to) {
    for (size_t j = 0; j < tokens; ++j) store(load(from + j * stride, kLanes), to.at + j * to.stride, kLanes);
  }

  static void store_weights(Floats weights, char* to) { store(weights, to, kLanes); }

  static void store_results(Floats results, char* to) { store(results, to, kLanes); }
};

/// bfloat16 in memory, float32 in all products.
struct Widened : Float32 {
  using Stored = Bfloat16;

  static Floats load(const char* from, size_t) { return widen(from); }

  static void pack_values(const char* from, size_t stride, size_t tokens, Column to) {
    for (size_t j = 0; j < tokens; ++j) store(widen(from + j * stride), to.at + j * to.stride, kLanes);
  }

  /// Rounds to the nearest bfloat16, ties to even.
  static void store_results(Floats results, char* to) {
    const uint32x4_t bits = vreinterpretq_u32_f32(results);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t number = vceqq_f32(results, results);
    const uint16x4_t halves = vshrn_n_u32(vbslq_u32(number, up, vdupq_n_u32(0x7fc00000)), 16);
    memcpy(to, &halves, sizeof halves);
  }
};

}  // namespace

void attend_neon(const Problem<float>& problem, size_t item, size_t head, const HeadMemory& memory) {
  attend_head_in<Float32>(problem, item, head, memory);
}

void attend_neon(const Problem<Bfloat16>& problem, size_t item, size_t head, const HeadMemory& memory) {
  attend_head_in<Widened>(problem, item, head, memory);
}

}  // namespace pipeedge::attention
