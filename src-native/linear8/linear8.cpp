#include "linear8.hpp"

#include <algorithm>
#include <cstring>

#include "../parallel/in_threads.hpp"
#include "../processor/features.hpp"
#include "variants.hpp"

namespace pipeedge::linear8 {

namespace {

using parallel::in_threads;
using parallel::Range;
using parallel::Scratch;

/// Most rows that are quantised before they are multiplied: their codes stay in the second-level cache.
constexpr std::size_t kPanelRows = 84;
std::size_t parts_of(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }

/// Bytes from one row of codes to the next: an odd number of cache lines, so that the rows of a tile do not compete for
/// the same places in the cache.
std::size_t stride_of(std::size_t inputs) {
  constexpr std::size_t kLine = 64;
  return (parts_of(inputs, kLine) | 1) * kLine;
}

std::size_t bytes_of_panel(const Variant& variant, std::size_t inputs) {
  return kColumns * sizeof(std::int32_t) + parts_of(inputs, variant.step) * variant.step * kColumns;
}

/// Memory of one thread.
struct Memory {
  Scratch<float> row, scales;
  Scratch<std::uint8_t> codes;
  Scratch<std::int32_t> sums;

  static Memory& of_thread() {
    thread_local Memory memory;
    return memory;
  }
};

/// Applies the layer to the rows of one panel.
void apply_panel(const Variant& variant, const Half* x, const Range& rows, std::size_t inputs, const Norm& norm,
                 const std::int8_t* packed, const Finish& finish) {
  Memory& memory = Memory::of_thread();
  const std::size_t steps = parts_of(inputs, variant.step);
  const std::size_t count = rows.end - rows.begin, stride = stride_of(inputs);
  const std::size_t tiles = parts_of(count, variant.tile_rows);
  const std::size_t panel_bytes = bytes_of_panel(variant, inputs);
  // Codes behind the last input are any, and have weights of zero.
  std::uint8_t* codes = memory.codes.room(count * stride);
  float* buffer = memory.row.room(inputs);
  float* scales = memory.scales.room(count);
  std::int32_t* sums = memory.sums.room(variant.tile_rows * kColumns);
  for (std::size_t r = 0; r < count; ++r) {
    scales[r] = variant.quantise(x + (rows.begin + r) * inputs, inputs, norm, buffer, codes + r * stride);
  }
  for (std::size_t column = 0; column < finish.outputs; column += kColumns, packed += panel_bytes) {
    const std::size_t columns = std::min(kColumns, finish.outputs - column);
    for (std::size_t t = 0; t < tiles; ++t) {
      const Range tile(count, tiles, t);
      const std::size_t tile_rows = tile.end - tile.begin;
      variant.multiply(codes + tile.begin * stride, stride, tile_rows, packed, steps, sums);
      variant.finish(finish, sums, kColumns, scales + tile.begin, rows.begin + tile.begin, tile_rows, column, columns);
    }
  }
}

}  // namespace

std::vector<const Variant*> variants() {
  std::vector<const Variant*> found;
#ifdef PIPEEDGE_LINEAR8_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
    found.push_back(&kAvx512Vnni);
  }
  if (__builtin_cpu_supports("avx2")) found.push_back(&kAvx2);
#endif
#ifdef PIPEEDGE_LINEAR8_ARM
  const processor::ArmFeatures here = processor::arm_features();
#ifdef PIPEEDGE_ARM_I8MM
  if (here.matrices8) found.push_back(&kNeonI8mm);
#endif
  if (here.dot_products) found.push_back(&kNeonDot);
  found.push_back(&kNeon);
#endif
  found.push_back(&kPortable);
  return found;
}

const Variant& best_variant() {
  static const Variant& best = *variants().front();
  return best;
}

std::size_t packed_bytes(const Variant& variant, std::size_t outputs, std::size_t inputs) {
  return parts_of(outputs, kColumns) * bytes_of_panel(variant, inputs);
}

void pack(const Variant& variant, const std::int8_t* weights, std::size_t outputs, std::size_t inputs,
          std::int8_t* packed) {
  const std::size_t depth = variant.depth;
  std::memset(packed, 0, packed_bytes(variant, outputs, inputs));
  for (std::size_t n = 0; n < outputs; ++n) {
    std::int8_t* panel = packed + n / kColumns * bytes_of_panel(variant, inputs);
    std::int8_t* to = panel + kColumns * sizeof(std::int32_t) + n % kColumns * depth;
    std::int64_t sum = 0;
    for (std::size_t k = 0; k < inputs; ++k) {
      to[k / depth * kColumns * depth + k % depth] = weights[n * inputs + k];
      sum += weights[n * inputs + k];
    }
    const auto start = static_cast<std::int32_t>(-kZero * sum);
    std::memcpy(panel + n % kColumns * sizeof start, &start, sizeof start);
  }
}

void quantise(const Variant& variant, const Half* x, std::size_t rows, std::size_t inputs, const Norm& norm,
              std::uint8_t* codes, float* row_scales, std::size_t threads) {
  in_threads(rows, inputs, threads, [&](const Range& range) {
    float* buffer = Memory::of_thread().row.room(inputs);
    for (std::size_t r = range.begin; r < range.end; ++r) {
      row_scales[r] = variant.quantise(x + r * inputs, inputs, norm, buffer, codes + r * inputs);
    }
  });
}

void finish(const Variant& variant, const Finish& finish, const std::int32_t* sums, const float* row_scales,
            std::size_t rows, std::size_t threads) {
  in_threads(rows, finish.outputs, threads, [&](const Range& range) {
    for (std::size_t r = range.begin; r < range.end; ++r) {
      for (std::size_t column = 0; column < finish.outputs; column += kColumns) {
        const std::size_t columns = std::min(kColumns, finish.outputs - column);
        variant.finish(finish, sums + r * finish.outputs + column, finish.outputs, row_scales + r, r, 1, column,
                       columns);
      }
    }
  });
}

void apply(const Variant& variant, const Half* x, std::size_t rows, std::size_t inputs, const Norm& norm,
           const std::int8_t* packed, const Finish& finish, std::size_t threads) {
  in_threads(rows, inputs * finish.outputs, threads, [&](const Range& range) {
    const std::size_t count = range.end - range.begin;
    const std::size_t panels = parts_of(count, kPanelRows);
    for (std::size_t p = 0; p < panels; ++p) {
      Range panel(count, panels, p);
      panel.begin += range.begin;
      panel.end += range.begin;
      apply_panel(variant, x, panel, inputs, norm, packed, finish);
    }
  });
}

}  // namespace pipeedge::linear8
