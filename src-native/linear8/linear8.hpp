// Linear layers with 8-bit weights, from bfloat16 to bfloat16. Plain C++17, no I/O.
//
//   y[m, n] = f(b[n] + s[m] * t[n] * sum_k X[m, k] * W[n, k]) + residual[m, n]
//
//   W  whole numbers from -127 to 127, with a scale t for each output
//   X  whole numbers in the same range, with a scale s for each row of the input: the row, or its LayerNorm,
//      divided by its largest value and rounded
//   f  the identity or GELU
//
// Rows are processed in panels that fit the cache: quantise the panel, then multiply it by 32 columns of the weights
// at a time, and finish these columns while the sums are in the cache.
//
//   codes of a row              [K]                          X + 128, so that they are positive
//   32 columns of the weights   [32] int32, then [ceil(K / depth)][32][depth] int8
//
// The int32 are -128 times the sum of each column's weights, with which the sums begin if codes are X + 128. The depth
// is that of the instruction which multiplies: those for 8-bit products often multiply four codes by four weights and
// add them to one sum, for many columns at once.
//
// A row that contains NaN or infinity gives NaN. All variants give the same bits, for any number of threads: sums are
// exact or use a fixed number of lanes, and every other operation is one that IEEE 754 defines exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipeedge::linear8 {

/// Columns of the weights that are multiplied at once.
constexpr std::size_t kColumns = 32;
/// Code that stands for zero.
constexpr int kZero = 128;

/// The bits of a bfloat16, which are the upper half of a float32's.
using Half = std::uint16_t;

enum class Activation { kNone, kGelu, kGeluTanh };

/// A LayerNorm applied to each row of the input, or none if `weight` is null.
struct Norm {
  const Half* weight = nullptr;
  const Half* bias = nullptr;
  float eps = 0;
};

/// What follows the sums of integers.
struct Finish {
  const float* scales = nullptr;  // t [outputs]
  const Half* bias = nullptr;     // [outputs], or null
  Activation activation = Activation::kNone;
  const Half* residual = nullptr;  // [rows, outputs], or null
  Half* out = nullptr;             // [rows, outputs]
  std::size_t outputs = 0;
};

/// The loops, compiled for one instruction set.
struct Variant {
  const char* name;
  /// Largest number of rows of a tile, 0 if there is no product.
  std::size_t tile_rows;
  /// Inputs of a column that lie side by side in the packed weights.
  std::size_t depth;
  /// Inputs that are multiplied in a step, a multiple of `depth`; packed weights are zero behind the last input.
  std::size_t step;
  /// Writes the sums [rows, kColumns] of a tile with one panel of the weights. Rows of codes lie `stride` bytes apart.
  void (*multiply)(const std::uint8_t* codes, std::size_t stride, std::size_t rows, const std::int8_t* panel,
                   std::size_t steps, std::int32_t* sums);
  /// Writes the codes of one row and returns its scale. `buffer` has room for `width` floats.
  float (*quantise)(const Half* row, std::size_t width, const Norm& norm, float* buffer, std::uint8_t* codes);
  /// Writes the results [rows, columns] from `first_row` and `first_column` on. The sums of consecutive rows lie
  /// `stride` numbers apart.
  void (*finish)(const Finish& finish, const std::int32_t* sums, std::size_t stride, const float* row_scales,
                 std::size_t first_row, std::size_t rows, std::size_t first_column, std::size_t columns);
};

/// The variants that this processor supports, best first; the last is portable, and has no product.
std::vector<const Variant*> variants();

/// The best of them.
const Variant& best_variant();

/// Bytes of the packed weights of a layer.
std::size_t packed_bytes(const Variant& variant, std::size_t outputs, std::size_t inputs);

/// Packs weights [outputs, inputs] in the order in which the variant reads them.
void pack(const Variant& variant, const std::int8_t* weights, std::size_t outputs, std::size_t inputs,
          std::int8_t* packed);

/// Quantises rows [rows, inputs] to codes in the same order, and writes the scale of each.
void quantise(const Variant& variant, const Half* x, std::size_t rows, std::size_t inputs, const Norm& norm,
              std::uint8_t* codes, float* row_scales, std::size_t threads);

/// Computes results from the sums [rows, outputs] and the scale of each row.
void finish(const Variant& variant, const Finish& finish, const std::int32_t* sums, const float* row_scales,
            std::size_t rows, std::size_t threads);

/// Applies a whole layer to x [rows, inputs]. The variant must have a product.
void apply(const Variant& variant, const Half* x, std::size_t rows, std::size_t inputs, const Norm& norm,
           const std::int8_t* packed, const Finish& finish, std::size_t threads);

}  // namespace pipeedge::linear8
