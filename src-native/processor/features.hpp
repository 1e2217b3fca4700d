// What the processor can do beyond the instruction set that everything is compiled for. Plain C++17, no I/O.
#pragma once

#include <string>
#include <vector>

namespace pipeedge::processor {

/// Instructions of ARM processors that not all have.
struct ArmFeatures {
  bool dot_products = false;     // SDOT: four products of 8 bits for each sum
  bool matrices8 = false;        // I8MM: SMMLA, products of matrices of 8 bits
  bool bfloat16 = false;         // BF16: BFDOT, BFMMLA
  bool half_arithmetic = false;  // FP16: sums and products of float16
};

/// Those of this processor; none on other processors, and where the system does not tell.
ArmFeatures arm_features();

/// Their names, as torch calls them: "dot", "i8mm", "bf16", "fp16_arith", behind "neon", which all have. Empty if the
/// processor is no ARM, or the system does not tell.
std::vector<std::string> arm_feature_names();

}  // namespace pipeedge::processor
