// The loops of decoders, compiled once for each instruction set. Plain C++17, no I/O.
//
// Rows do not see each other: whatever computes a row computes each of its sums in one order, alone or in a tile with
// other rows, for any number of threads. Sums of products go through the inputs from the first to the last.
//
//   a panel of the weights     32 outputs: for each unit of 4 bytes of inputs, the units of the 32 outputs
//   a unit                     1 float32, 2 bfloat16, or 4 codes of 8 bits
//   8 bits                     groups of 32 inputs: the scales of the 32 outputs, bfloat16, then 8 units
//   4 bits                     groups of 32 inputs, of 8 units with two codes in a byte: outputs 0 to 15 in the lower
//                              halves, 16 to 31 in the upper ones. Behind all groups their scales, bfloat16, and zeros
//
// The codes of rows have a scale for each group of 32 values. Those of weights are whole numbers, in 8 bits from -127
// to 127, stored plus kZero. In 4 bits a code c from 0 to 15 with the zero z, from 0 to 120, stands for the number 8 c - z
// of 8 bits. The products of a group are summed exactly, and then scaled and added in float32: so 4 bits can be widened
// to 8 without another result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipeedge::decoder {

/// Outputs of a panel, and positions of a page of the cache.
constexpr std::size_t kColumns = 32;
/// Bytes of the inputs that are multiplied at once.
constexpr std::size_t kUnit = 4;
/// Inputs with a common scale in 8 bits.
constexpr std::size_t kGroup = 32;
/// Most groups of a row that are rounded together.
constexpr std::size_t kMostGroups = 8;
/// Codes of 8 bits of weights, and the one that stands for zero: products of x86 take codes without sign, and start with
/// what that adds to the sum of a group, kStart for each of the row's codes. Those of ARM take signed ones.
#if defined(__aarch64__)
using WeightCode = std::int8_t;
constexpr int kZero = 0;
#else
using WeightCode = std::uint8_t;
constexpr int kZero = 128;
#endif
constexpr int kStart = -128;
/// Bytes of a group of a panel in 8 bits.
constexpr std::size_t kGroupBytes = kColumns * sizeof(std::uint16_t) + kGroup * kColumns;
/// Parts that the distance of two codes of 4 bits has, in which their zero is counted, and the largest code and zero.
constexpr int kParts = 8;
constexpr int kMostNibble = 15;
constexpr int kMostZero = kParts * kMostNibble;
/// Bytes of the codes of a group of a panel in 4 bits.
constexpr std::size_t kNibbleBytes = kGroup * kColumns / 2;
/// Most rows that any variant multiplies at once.
constexpr std::size_t kMostRows = 32;

/// The bits of a bfloat16, which are the upper half of a float32's.
using Half = std::uint16_t;
constexpr Half kNotANumber = 0x7fc0;

/// Number types of weights. Those of the cache are the first two.
enum class Type { kFloat32, kBfloat16, kInt8, kInt4 };
constexpr std::size_t kTypes = 4;

enum class Activation { kNone, kGelu, kGeluTanh, kRelu, kSilu };

/// Rows of inputs in a number type, and the panel that they are multiplied by.
struct Tile {
  const char* rows = nullptr;
  std::size_t row_stride = 0;            // bytes
  const float* scales = nullptr;         // of the groups of a row, 8 and 4 bits only
  const std::int32_t* starts = nullptr;  // -128 times the sum of the codes of each group, likewise
  std::size_t group_stride = 0;          // groups from one row to the next
  const char* panel = nullptr;
  const Half* panel_scales = nullptr;  // 4 bits only
  const std::uint8_t* zeros = nullptr;
  std::size_t units = 0;       // of 8 and 4 bits, whole groups
  float* sums = nullptr;       // [rows, kColumns]
  std::size_t sum_stride = 0;  // numbers
  bool onto = false;           // whether products are added to sums that are there
};

/// Products with weights of one number type.
struct Product {
  /// Most rows of a tile.
  std::size_t tile_rows;
  void (*multiply)(const Tile& tile, std::size_t rows);
  /// Called before the first of several products, and after the last one; or null. Tiles then are as large as they can
  /// be, because another size costs time.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

/// Norm of a row of float32; none if `weight` is null.
struct Norm {
  const float* weight = nullptr;
  const float* bias = nullptr;  // of a LayerNorm, or null
  bool centred = false;         // a LayerNorm, not an RMSNorm
  float eps = 0;
};

/// Scores of one row with the keys from a page's beginning on, and how they become weights.
struct Scores {
  float* values = nullptr;  // a multiple of kColumns, replaced by weights
  std::size_t count = 0;
  std::size_t begin = 0, end = 0;  // keys that the row attends to
  float scale = 1;
  float cap = 0;  // or 0
};

/// Weights of some rows on the values of a page.
struct Mixture {
  const float* weights = nullptr;
  std::size_t weight_stride = 0;
  const char* values = nullptr;  // [kColumns, width]
  std::size_t width = 0;         // a multiple of kColumns
  Type type = Type::kFloat32;
  std::size_t begin = 0, end = 0;  // positions of the page
  float* sums = nullptr;
  std::size_t sum_stride = 0;
};

/// Groups of a panel in 4 bits.
struct Nibbles {
  const char* codes = nullptr;
  const Half* scales = nullptr;
  const std::uint8_t* zeros = nullptr;
};

/// A group of inputs of the outputs of a panel, before their codes are mixed.
struct PanelGroup {
  Half scales[kColumns];
  std::uint8_t zeros[kColumns];        // 4 bits only
  WeightCode codes[kColumns][kGroup];  // of 8 bits, or of 4
};

struct Coding;

/// The loops, compiled for one instruction set.
struct Variant {
  const char* name;
  /// By the number type of the weights.
  Product products[kTypes];
  /// Writes the norm of a row.
  void (*normalise)(const Norm& norm, const float* x, std::size_t width, float* out);
  /// Rounds numbers to bfloat16: to their bits, or in place.
  void (*narrow)(const float* x, std::size_t count, Half* out);
  void (*round)(float* x, std::size_t count);
  /// Writes the codes, scales and starts of a row, whose width is a multiple of kGroup.
  void (*quantise)(const float* x, std::size_t width, std::int8_t* codes, float* scales, std::int32_t* starts);
  /// Returns whether all numbers are finite.
  bool (*finite)(const float* x, std::size_t count);
  /// Writes the scales and codes of 8 bits of at most kMostGroups groups of weights of a column; the scale is NaN where
  /// a weight of its group is not finite. Returns whether all are finite. The same in every variant.
  bool (*encode)(const float* weights, std::size_t groups, std::size_t column, PanelGroup* out);
  /// Finds codes of 4 bits for a group of inputs [kGroup, kColumns], with their scales and zeros. The same in every
  /// variant.
  void (*fit)(const float* weights, std::uint8_t* codes, Half* scales, std::uint8_t* zeros);
  /// Writes groups of 4 bits as they are in 8 bits.
  void (*expand)(const Nibbles& nibbles, std::size_t groups, char* out);
  /// Applies an activation in place, and multiplies by `factor` unless it is null.
  void (*activate)(Activation activation, float* x, const float* factor, std::size_t count);
  /// Replaces each x by cap * tanh(x / cap).
  void (*cap)(float* x, float cap, std::size_t count);
  /// Replaces scores by weights, of which the largest is 1, and returns their sum.
  float (*weigh)(const Scores& scores);
  /// Adds weighted values to the sums of `rows` rows.
  void (*mix)(const Mixture& mixture, std::size_t rows);
  /// The forms of files; behind the last one is one without a name. The same in every variant.
  const Coding* codings;
};

}  // namespace pipeedge::decoder
