// Uniform quantisation of rows of values, and the packing of its codes. Plain C++17, no I/O.
//
//   values  x x x x | x x x x | ...        rows of equal length: a token, an item, or the whole tensor
//   ranges  scale, offset | ...            x' = offset + code * scale
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

/// Number type of the values in memory. A bfloat16 is the upper half of a float32.
enum class Element { kFloat32, kBfloat16 };

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

/// Contiguous rows, with `count` = rows * length values in total.
struct Values {
  const void* data = nullptr;
  Element element = Element::kFloat32;
  std::size_t rows = 0;
  std::size_t length = 0;
};

/// Whether codes may have this number of bits: 2 to 8, and 16.
constexpr bool is_width(int bits) { return (bits >= 2 && bits <= 8) || bits == 16; }

/// Bytes of `count` codes, with the last block's planes rounded up to whole bytes.
std::size_t packed_bytes(std::size_t count, int bits);

/// The codec, compiled for one instruction set. All variants produce the same bytes.
struct Variant {
  const char* name;
  /// Writes codes and ranges of the values. Returns the first row with a NaN or an infinity, or kNone. `codes`
  /// has room for packed_bytes, `scales` and `offsets` for one number per row.
  std::size_t (*encode)(const Values& values, int bits, const Levels& levels, std::uint8_t* codes, float* scales,
                        float* offsets);
  /// Writes the decoded values; `values` has room for rows * length elements.
  void (*decode)(const std::uint8_t* codes, const float* scales, const float* offsets, int bits, Element element,
                 std::size_t rows, std::size_t length, void* values);
  /// Writes the statistics of each row. Returns the first row with a NaN or an infinity, or kNone.
  std::size_t (*statistics)(const Values& values, Statistics* rows);
  /// Sum of (x - x')^2 over all values if they were encoded with these factors; `statistics` are of these rows.
  double (*squared_error)(const Values& values, const Statistics* statistics, int bits, const Levels& levels);
};

/// The variants that this processor supports, best first; the last is portable.
std::vector<const Variant*> variants();

/// The best of them.
const Variant& best_variant();

}  // namespace pipeedge::codec
