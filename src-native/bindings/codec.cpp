// The codec for numpy arrays, without copies.
//
// The caller's arrays are read and written in place with the interpreter lock released. If the caller changes
// them meanwhile, the result is a mixture.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "../codec/codec.hpp"
#include "arrays.hpp"
#include "module.hpp"

namespace py = pybind11;
namespace codec = pipeedge::codec;

namespace {

using pipeedge::bindings::require;
using pipeedge::bindings::require_contiguous;

template <typename T>
codec::Rows<const T> rows_of(const py::array& values, py::ssize_t rows) {
  require_contiguous(values, "values");
  const py::ssize_t size = values.size();
  if (rows < 0 || (rows == 0 ? size != 0 : size % rows != 0)) {
    throw py::value_error(std::to_string(size) + " values are not " + std::to_string(rows) + " equal rows");
  }
  const auto length = static_cast<std::size_t>(rows == 0 ? 0 : size / rows);
  return {static_cast<const T*>(values.data()), static_cast<std::size_t>(rows), length};
}

/// Returns visit(rows of the values), in the type that they have.
template <typename Visit>
auto with_rows(const py::array& values, py::ssize_t rows, Visit visit) {
  if (py::isinstance<py::array_t<float>>(values)) return visit(rows_of<float>(values, rows));
  if (py::isinstance<py::array_t<std::uint16_t>>(values)) return visit(rows_of<codec::Bfloat16>(values, rows));
  throw py::value_error("values are neither float32 nor uint16 (the bits of bfloat16)");
}

void require_width(int bits) {
  if (!codec::is_width(bits)) throw py::value_error(std::to_string(bits) + " bits: 2 to 8 and 16 are possible");
}

codec::Levels levels_of(double low, double high) {
  if (std::isnan(low) || low < 0 || std::isnan(high) || high < 0) {
    throw py::value_error("the factors low and high are numbers of 0 or more");
  }
  return {low, high};
}

/// The row is memory in `room`, aligned to vectors.
codec::Transform transform_of(py::ssize_t block, std::uint64_t seed, std::size_t length, std::vector<float>& room) {
  if (block < 0 || !codec::is_transform_block(static_cast<std::size_t>(block))) {
    throw py::value_error("a block of " + std::to_string(block) + ": powers of two from 2 to " +
                          std::to_string(codec::kMaxTransformBlock) + " are possible, and 0");
  }
  if (block == 0) return {};
  constexpr std::size_t alignment = 64;
  std::size_t space = length * sizeof(float) + alignment;
  room.resize(length + alignment / sizeof(float));
  void* row = room.data();
  std::align(alignment, length * sizeof(float), row, space);
  return {static_cast<std::size_t>(block), seed, static_cast<float*>(row)};
}

const codec::Variant& variant_of(const std::optional<std::string>& name) {
  if (!name) return codec::best_variant();
  for (const codec::Variant* variant : codec::variants()) {
    if (variant->name == *name) return *variant;
  }
  throw py::value_error("this processor has no variant '" + *name + "' of the codec");
}

std::optional<std::size_t> row_or_none(std::size_t row) {
  return row == codec::kNone ? std::nullopt : std::optional<std::size_t>(row);
}

std::optional<std::size_t> encode(const py::array& values, py::ssize_t rows, int bits, double low, double high,
                                  py::array& codes, py::array& ranges, py::ssize_t block, std::uint64_t seed,
                                  const std::optional<std::string>& name) {
  require_width(bits);
  return with_rows(values, rows, [&](const auto& input) {
    const codec::Levels levels = levels_of(low, high);
    std::vector<float> room;
    const codec::Transform transform = transform_of(block, seed, input.length, room);
    require<std::uint8_t>(codes, "codes", "uint8", codec::packed_bytes(input.rows * input.length, bits), true);
    require<float>(ranges, "ranges", "float32", 2 * input.rows, true);
    auto* bytes = static_cast<std::uint8_t*>(codes.mutable_data());
    auto* scales = static_cast<float*>(ranges.mutable_data());
    const auto& kernels = variant_of(name).kernels(input.data);
    py::gil_scoped_release unlocked;
    return row_or_none(kernels.encode(input, bits, levels, transform, bytes, scales, scales + input.rows));
  });
}

void decode(const py::array& codes, const py::array& ranges, int bits, py::array& values, py::ssize_t block,
            std::uint64_t seed, const std::optional<std::string>& name) {
  require_width(bits);
  with_rows(values, ranges.size() / 2, [&](const auto& known) {
    using Value = std::remove_const_t<std::remove_pointer_t<decltype(known.data)>>;
    std::vector<float> room;
    const codec::Transform transform = transform_of(block, seed, known.length, room);
    require<std::uint8_t>(codes, "codes", "uint8", codec::packed_bytes(known.rows * known.length, bits), false);
    require<float>(ranges, "ranges", "float32", 2 * known.rows, false);
    if (!values.writeable()) throw py::value_error("values are read-only");
    const auto* bytes = static_cast<const std::uint8_t*>(codes.data());
    const auto* scales = static_cast<const float*>(ranges.data());
    const codec::Rows<Value> output{static_cast<Value*>(values.mutable_data()), known.rows, known.length};
    const auto& kernels = variant_of(name).kernels(known.data);
    py::gil_scoped_release unlocked;
    kernels.decode(bytes, scales, scales + output.rows, bits, transform, output);
  });
}

py::array_t<float> transform_rows(const py::array& values, py::ssize_t rows, py::ssize_t block, std::uint64_t seed,
                                  const std::optional<std::string>& name) {
  return with_rows(values, rows, [&](const auto& input) {
    if (block == 0) throw py::value_error("a transform needs a block");
    std::vector<float> room;
    const codec::Transform transform = transform_of(block, seed, input.length, room);
    py::array_t<float> found(std::vector<py::ssize_t>{rows, static_cast<py::ssize_t>(input.length)});
    float* to = found.mutable_data();
    const auto& kernels = variant_of(name).kernels(input.data);
    py::gil_scoped_release unlocked;
    kernels.transform(input, transform, to);
    return found;
  });
}

py::array_t<float> row_statistics(const py::array& values, py::ssize_t rows) {
  return with_rows(values, rows, [&](const auto& input) {
    static_assert(sizeof(codec::Statistics) == 4 * sizeof(float), "rows of four floats");
    py::array_t<float> found(std::vector<py::ssize_t>{rows, 4});
    auto* to = reinterpret_cast<codec::Statistics*>(found.mutable_data());
    std::size_t bad;
    {
      py::gil_scoped_release unlocked;
      bad = codec::best_variant().kernels(input.data).statistics(input, to);
    }
    if (bad != codec::kNone) throw py::value_error("row " + std::to_string(bad) + " holds a NaN or an infinity");
    return found;
  });
}

double squared_error(const py::array& values, const py::array& statistics, int bits, double low, double high) {
  require_width(bits);
  return with_rows(values, statistics.size() / 4, [&](const auto& input) {
    require<float>(statistics, "statistics", "float32", 4 * input.rows, false);
    const codec::Levels levels = levels_of(low, high);
    const auto* rows = reinterpret_cast<const codec::Statistics*>(statistics.data());
    py::gil_scoped_release unlocked;
    return codec::best_variant().kernels(input.data).squared_error(input, rows, bits, levels);
  });
}

std::vector<std::string> codec_variants() {
  std::vector<std::string> names;
  for (const codec::Variant* variant : codec::variants()) names.emplace_back(variant->name);
  return names;
}

std::size_t packed_bytes(py::ssize_t count, int bits) {
  require_width(bits);
  if (count < 0) throw py::value_error("a count is not negative");
  return codec::packed_bytes(static_cast<std::size_t>(count), bits);
}

}  // namespace

void bind_codec(py::module_& module) {
  module.def("packed_bytes", &packed_bytes, "Return the bytes of `count` packed codes.", py::arg("count"),
             py::arg("bits"));
  module.def("encode", &encode, "Quantise and pack values, with a range for each row.", py::kw_only(),
             py::arg("values"), py::arg("rows"), py::arg("bits"), py::arg("low"), py::arg("high"), py::arg("codes"),
             py::arg("ranges"), py::arg("block") = 0, py::arg("seed") = 0, py::arg("variant") = py::none());
  module.def("decode", &decode, "Write the values of packed codes.", py::kw_only(), py::arg("codes"), py::arg("ranges"),
             py::arg("bits"), py::arg("values"), py::arg("block") = 0, py::arg("seed") = 0,
             py::arg("variant") = py::none());
  module.def("transform_rows", &transform_rows, "Return the transformed rows.", py::kw_only(), py::arg("values"),
             py::arg("rows"), py::arg("block"), py::arg("seed"), py::arg("variant") = py::none());
  module.def("row_statistics", &row_statistics, "Return the statistics of rows.", py::arg("values"), py::arg("rows"));
  module.def("squared_error", &squared_error, "Return the sum of squared errors that quantisation would cause.",
             py::kw_only(), py::arg("values"), py::arg("statistics"), py::arg("bits"), py::arg("low"), py::arg("high"));
  module.def("codec_variants", &codec_variants,
             "Return the instruction sets that this processor supports, best first.");
}
