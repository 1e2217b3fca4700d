// The variants that are compiled, each in a file of its own with the options of its instruction set.
#pragma once

#include "kernels.hpp"

namespace pipeedge::decoder {

extern const Variant kPortable;
extern const Variant kAvx2;
extern const Variant kAvx512;
/// Products of bfloat16 by AMX, and by AVX512-BF16, and of 8 and 4 bits by AVX512-VNNI.
extern const Product kHalvesAmx;
extern const Product kHalvesAvx512;
extern const Product kCodesAvx512;
extern const Product kNibblesAvx512;
extern const Variant kNeon;
/// Products of 8 and 4 bits by SDOT, and of bfloat16 by BFDOT.
extern const Product kCodesNeonDot;
extern const Product kNibblesNeonDot;
extern const Product kHalvesNeon;

}  // namespace pipeedge::decoder
