#define PIPEEDGE_VARIANT kPortable
#define PIPEEDGE_VARIANT_NAME "portable"
#include "kernels.inc"
