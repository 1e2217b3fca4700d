// Uniform quantisation of rows of values, and the packing of its codes. Plain C++17, no I/O.
//
//   values  x x x x | x x x x | ...        rows of equal length: a token, an item, or the whole tensor
//   ranges  scale, offset | ...            x' = offset + code * scale
//           (of the transformed row, if there is a transform)
//   codes   blocks of 2048 values, in planes of 8, 4, 2 and 1 bits (7 bits = 4 + 2 + 1)
//
//   plane of w bits for a block of n values:       byte j = value j, value j + s, value j + 2 s, ...
//   (s = ceil(n w / 8) bytes, the first value in the lowest bits)
//
// Values at a distance of s share a byte, so packing needs no moves across a vector. The result depends
// neither on the instruction set nor on the byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace pipeedge::codec {

constexpr std::size_t kBlock = 2048;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

/// The bits of a bfloat16, which is the upper half of a float32. Values are float or Bfloat16.
struct Bfloat16 {
  std::uint16_t bits;
};

/// The levels of a row run from max(min, mean - low * deviation) to min(max, mean + high * deviation),
/// inclusive. Infinite factors give the whole range of the row.
struct Levels {
  double low = std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
};

/// Statistics of one row. The deviation is the mean absolute deviation from the mean.
struct Statistics {
  float min = 0;
  float max = 0;
  float mean = 0;
  float deviation = 0;
};

/// Contiguous rows, with rows * length values in total; T is const where they are only read.
template <typename T>
struct Rows {
  T* data = nullptr;
  std::size_t rows = 0;
  std::size_t length = 0;
};

/// Longest block of a transform. Fits the first-level cache several times.
constexpr std::size_t kMaxTransformBlock = 1024;

/// A randomised Hadamard transform of every row, before its levels are computed: see hadamard.inc.
struct Transform {
  /// Length of a block, a power of two, halved until it is at most the length of a row; 0 for no transform.
  std::size_t block = 0;
  /// Determines the signs.
  std::uint64_t seed = 0;
  /// Memory for one row of floats, best aligned to 64 bytes; needed to encode and decode with a transform.
  float* row = nullptr;
};

/// Whether a transform may have blocks of this length: 0 (none), and powers of two from 2 to 1024.
constexpr bool is_transform_block(std::size_t block) {
  return block == 0 || (block >= 2 && block <= kMaxTransformBlock && (block & (block - 1)) == 0);
}

/// Whether codes may have this number of bits: 2 to 8, and 16.
constexpr bool is_width(int bits) { return (bits >= 2 && bits <= 8) || bits == 16; }

/// Bytes of `count` codes, with the last block's planes rounded up to whole bytes.
std::size_t packed_bytes(std::size_t count, int bits);

/// The codec for values of one type.
template <typename T>
struct Kernels {
  /// Writes codes and ranges of the values. Returns the first row that cannot be encoded, or kNone: a row with a
  /// NaN or an infinity, or, with a transform, with values above 1e34, whose transform may overflow. `codes` has
  /// room for packed_bytes, `scales` and `offsets` for one number per row.
  std::size_t (*encode)(const Rows<const T>& values, int bits, const Levels& levels, const Transform& transform,
                        std::uint8_t* codes, float* scales, float* offsets);
  /// Writes the decoded values.
  void (*decode)(const std::uint8_t* codes, const float* scales, const float* offsets, int bits,
                 const Transform& transform, const Rows<T>& values);
  /// Writes the transformed rows, with room for rows * length numbers.
  void (*transform)(const Rows<const T>& values, const Transform& transform, float* rows);
  /// Writes the statistics of each row. Returns the first row with a NaN or an infinity, or kNone.
  std::size_t (*statistics)(const Rows<const T>& values, Statistics* rows);
  /// Sum of (x - x')^2 over all values if they were encoded with these factors; `statistics` are of these rows.
  double (*squared_error)(const Rows<const T>& values, const Statistics* statistics, int bits, const Levels& levels);
};

/// The codec, compiled for one instruction set. All variants produce the same bytes.
struct Variant {
  const char* name;
  Kernels<float> floats;
  Kernels<Bfloat16> bfloats;

  const Kernels<float>& kernels(const float* /* of which values */) const { return floats; }
  const Kernels<Bfloat16>& kernels(const Bfloat16* /* of which values */) const { return bfloats; }
};

/// The variants that this processor supports, best first; the last is portable.
std::vector<const Variant*> variants();

/// The best of them.
const Variant& best_variant();

}  // namespace pipeedge::codec
