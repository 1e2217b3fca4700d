#include "codec.hpp"

#include "variants.hpp"

namespace pipeedge::codec {

std::size_t packed_bytes(std::size_t count, int bits) {
  const auto plane = [](std::size_t values, int width) { return (values * static_cast<std::size_t>(width) + 7) / 8; };
  const std::size_t whole = count / kBlock * kBlock;
  std::size_t bytes = whole / 8 * static_cast<std::size_t>(bits);
  for (const int width : {8, 8, 4, 2, 1}) {
    if (bits < width) continue;
    bytes += plane(count - whole, width);
    bits -= width;
  }
  return bytes;
}

std::vector<const Variant*> variants() {
  std::vector<const Variant*> found;
#ifdef PIPEEDGE_CODEC_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back(&kAvx512);
  }
  if (__builtin_cpu_supports("avx2")) found.push_back(&kAvx2);
#endif
#ifdef PIPEEDGE_CODEC_ARM
  found.push_back(&kNeon);
#endif
  found.push_back(&kPortable);
  return found;
}

const Variant& best_variant() {
  static const Variant& best = *variants().front();
  return best;
}

}  // namespace pipeedge::codec
