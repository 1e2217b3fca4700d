#define PIPEEDGE_VECTOR_BYTES 16
#include "passes.inc"

namespace pipeedge::linear8 {

const Variant kPortable = {"portable", 0, 1, 1, nullptr, quantise, finish};

}  // namespace pipeedge::linear8
