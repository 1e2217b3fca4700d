#include "features.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace pipeedge::processor {

ArmFeatures arm_features() {
  ArmFeatures found;
#if defined(__aarch64__) && defined(__linux__)
  // Bits of the kernel's interface, under names of our own because older headers lack some.
  constexpr unsigned long kHalfArithmetic = 1UL << 10, kDotProducts = 1UL << 20;
  constexpr unsigned long kMatrices8 = 1UL << 13, kBfloat16 = 1UL << 14;
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  found.half_arithmetic = (first & kHalfArithmetic) != 0;
  found.dot_products = (first & kDotProducts) != 0;
  found.matrices8 = (second & kMatrices8) != 0;
  found.bfloat16 = (second & kBfloat16) != 0;
#endif
  return found;
}

std::vector<std::string> arm_feature_names() {
  std::vector<std::string> names;
#if defined(__aarch64__) && defined(__linux__)
  names.emplace_back("neon");
#endif
  const ArmFeatures here = arm_features();
  if (here.dot_products) names.emplace_back("dot");
  if (here.matrices8) names.emplace_back("i8mm");
  if (here.bfloat16) names.emplace_back("bf16");
  if (here.half_arithmetic) names.emplace_back("fp16_arith");
  return names;
}

}  // namespace pipeedge::processor
