// Variants of kernels.inc, compiled for several instruction sets. What the compiler does not make vectors of, each
// variant defines itself before it includes kernels.inc: `kTile` and `multiply_tile`, for hadamard.inc.
#pragma once

#include "codec.hpp"

namespace pipeedge::codec {

extern const Variant kPortable;
#ifdef PIPEEDGE_CODEC_X86
extern const Variant kAvx2;
extern const Variant kAvx512;
#endif
#ifdef PIPEEDGE_CODEC_ARM
extern const Variant kNeon;
#endif

}  // namespace pipeedge::codec
