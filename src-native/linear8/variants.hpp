// Variants of passes.inc with their products, compiled for several instruction sets.
#pragma once

#include "linear8.hpp"

namespace pipeedge::linear8 {

extern const Variant kPortable;
#ifdef PIPEEDGE_LINEAR8_X86
extern const Variant kAvx2;
extern const Variant kAvx512Vnni;
#endif
#ifdef PIPEEDGE_LINEAR8_ARM
extern const Variant kNeon;
extern const Variant kNeonDot;
#ifdef PIPEEDGE_ARM_I8MM
extern const Variant kNeonI8mm;
#endif
#endif

}  // namespace pipeedge::linear8
