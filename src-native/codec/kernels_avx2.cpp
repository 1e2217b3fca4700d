#define PIPEEDGE_VARIANT kAvx2
#define PIPEEDGE_VARIANT_NAME "avx2"
#include "kernels.inc"
