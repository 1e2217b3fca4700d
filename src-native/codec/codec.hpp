// Uniform quantisation of rows of values, and the packing of its codes. Plain C++17, no I/O.
//
//   values  x x x x | x x x x | ...        rows of equal length: a token, an item, or the whole tensor
//   ranges  scale, offset | ...            x' = offset + code * scale
//   codes   2048 values at a time, in planes of 8, 4, 2 and 1 bits (7 bits = 4 + 2 + 1)
//
//   a plane of w bits of a block of n values:      byte j = value j, value j + s, value j + 2 s, ...
//   (s = ceil(n w / 8) bytes, the first value in the lowest bits)
//
// Values that lie s apart share a byte, so packing needs no moves across a vector. The result depends
// on neither the instruction set nor the byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace pipeedge::codec {

constexpr std::size_t kBlock = 2048;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

/// What the values are in memory. A bfloat16 is the upper half of a float32.
enum class Element { kFloat32, kBfloat16 };

/// The levels of a row run from max(min, mean - low * deviation) to min(max, mean + high * deviation),
/// both included. Infinite factors give the whole range of the row.
struct Levels {
  double low = std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
};

/// Of one row. The deviation is the mean absolute one, around the mean.
struct Statistics {
  float min = 0;
  float max = 0;
  float mean = 0;
  float deviation = 0;
};

/// Contiguous rows; `count` = rows * length values in all.
struct Values {
  const void* data = nullptr;
  Element element = Element::kFloat32;
  std::size_t rows = 0;
  std::size_t length = 0;
};

/// Whether codes may have this many bits: 2 to 8, and 16.
constexpr bool is_width(int bits) { return (bits >= 2 && bits <= 8) || bits == 16; }

/// Bytes of `count` codes; the last block's planes are rounded up to whole bytes.
std::size_t packed_bytes(std::size_t count, int bits);

/// The codec as compiled for one instruction set. All give the same bytes.
struct Variant {
  const char* name;
  /// Codes and ranges of the values; the first row with a NaN or an infinity, or kNone. `codes` has
  /// room for packed_bytes, `scales` and `offsets` for one number a row.
  std::size_t (*encode)(const Values& values, int bits, const Levels& levels, std::uint8_t* codes, float* scales,
                        float* offsets);
  /// The reverse; `values` has room for rows * length elements.
  void (*decode)(const std::uint8_t* codes, const float* scales, const float* offsets, int bits, Element element,
                 std::size_t rows, std::size_t length, void* values);
  /// Of each row; the first row with a NaN or an infinity, or kNone.
  std::size_t (*statistics)(const Values& values, Statistics* rows);
  /// Sum of (x - x')^2 over all values, if they were encoded so; `statistics` are of these rows.
  double (*squared_error)(const Values& values, const Statistics* statistics, int bits, const Levels& levels);
};

/// The variants that this processor runs, best first; the last is portable.
std::vector<const Variant*> variants();

/// The best of them.
const Variant& best_variant();

}  // namespace pipeedge::codec
