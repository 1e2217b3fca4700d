#include <stddef.h>

namespace pipeedge::codec {
namespace {

constexpr size_t kTile = 4;

/// Multiplies kTile values by the Hadamard matrix of that order, from the largest distance to 1.
inline void multiply_tile(float* tile) {
  const float even_sum = tile[0] + tile[2], even_difference = tile[0] - tile[2];
  const float odd_sum = tile[1] + tile[3], odd_difference = tile[1] - tile[3];
  tile[0] = even_sum + odd_sum;
  tile[1] = even_sum - odd_sum;
  tile[2] = even_difference + odd_difference;
  tile[3] = even_difference - odd_difference;
}

}  // namespace
}  // namespace pipeedge::codec

#define PIPEEDGE_VARIANT kPortable
#define PIPEEDGE_VARIANT_NAME "portable"
#include "kernels.inc"
