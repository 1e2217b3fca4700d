// Forms in which files hold the rows of a matrix: groups of codes with their scales. Plain C++17, no I/O.
//
// Most are those of GGUF files, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Two are our own, of weights
// that were rounded before they were stored:
//
//   int8     32 weights: scale, bfloat16; 32 codes from -127 to 127
//   int4     32 weights: scale, bfloat16; zero in eighths; 16 bytes with the codes of i and i + 16 in their halves
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"

namespace pipeedge::decoder {

/// Most weights of a unit.
constexpr std::size_t kSuper = kMostGroups * kGroup;

/// A group of weights in 8 bits: code times scale.
struct ByteGroup {
  float scale = 0;
  std::int8_t codes[kGroup] = {};
};

/// A group of weights in 4 bits: (8 code - zero) times scale.
struct NibbleGroup {
  float scale = 0;
  int zero = 0;
  std::uint8_t codes[kGroup] = {};
};

/// A form of rows.
struct Coding {
  const char* name = nullptr;
  std::size_t values = 0, bytes = 0;  // of a unit of the form, whole groups
  /// Writes the values of a unit.
  void (*decode)(const std::uint8_t* unit, float* values) = nullptr;
  /// Writes the codes of a group of a row where the form has codes of 8 bits; else null.
  void (*bytes_of)(const std::uint8_t* row, std::size_t group, ByteGroup& out) = nullptr;
  /// Writes the codes of a group where the form has codes of 4 bits, and returns whether they fit ours; else null.
  bool (*nibbles_of)(const std::uint8_t* row, std::size_t group, NibbleGroup& out) = nullptr;
};

/// Bytes of a group of our own forms.
constexpr std::size_t kByteGroupBytes = sizeof(Half) + kGroup;
constexpr std::size_t kNibbleGroupBytes = sizeof(Half) + 1 + kGroup / 2;

}  // namespace pipeedge::decoder
