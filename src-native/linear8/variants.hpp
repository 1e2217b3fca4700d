// Variants of passes.inc with their products, compiled for several instruction sets.
#pragma once

#include "linear8.hpp"

namespace pipeedge::linear8 {

extern const Variant kPortable;
#ifdef PIPEEDGE_LINEAR8_X86
extern const Variant kAvx2;
extern const Variant kAvx512Vnni;
#endif

}  // namespace pipeedge::linear8
