#define PIPEEDGE_VARIANT kAvx512
#define PIPEEDGE_VARIANT_NAME "avx512"
#include "kernels.inc"
