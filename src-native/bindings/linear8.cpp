// Linear layers in 8 bits for numpy arrays, without copies, and without the interpreter lock while they compute.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../linear8/linear8.hpp"
#include "arrays.hpp"
#include "module.hpp"

namespace py = pybind11;
namespace linear8 = pipeedge::linear8;

namespace {

using linear8::Half;
using pipeedge::bindings::require;

using OptionalArray = std::optional<py::array>;
using OptionalNorm = std::optional<std::tuple<py::array, py::array, float>>;

constexpr const char* kHalfType = "uint16 (the bits of bfloat16)";

struct Shape {
  std::size_t rows, width;
};

Shape shape_of(const py::array& array, const char* name) {
  if (array.ndim() != 2)
    throw py::value_error(std::string(name) + " has " + std::to_string(array.ndim()) + " dimensions, not 2");
  return {static_cast<std::size_t>(array.shape(0)), static_cast<std::size_t>(array.shape(1))};
}

const Half* halves(const OptionalArray& array, const char* name, std::size_t size) {
  if (!array) return nullptr;
  require<Half>(*array, name, kHalfType, size, false);
  return static_cast<const Half*>(array->data());
}

linear8::Norm norm_of(const OptionalNorm& norm, std::size_t width) {
  if (!norm) return {};
  const auto& [weight, bias, eps] = *norm;
  require<Half>(weight, "the norm's weight", kHalfType, width, false);
  require<Half>(bias, "the norm's bias", kHalfType, width, false);
  return {static_cast<const Half*>(weight.data()), static_cast<const Half*>(bias.data()), eps};
}

linear8::Activation activation_of(const std::string& name) {
  if (name == "none") return linear8::Activation::kNone;
  if (name == "gelu") return linear8::Activation::kGelu;
  if (name == "gelu_tanh") return linear8::Activation::kGeluTanh;
  throw py::value_error("there is no activation '" + name + "' here: none, gelu and gelu_tanh are possible");
}

linear8::Finish finish_of(const py::array& scales, const OptionalArray& bias, const std::string& activation,
                          const OptionalArray& residual, py::array& out, std::size_t rows) {
  linear8::Finish finish;
  finish.outputs = static_cast<std::size_t>(scales.size());
  require<float>(scales, "scales", "float32", finish.outputs, false);
  require<Half>(out, "out", kHalfType, rows * finish.outputs, true);
  finish.scales = static_cast<const float*>(scales.data());
  finish.bias = halves(bias, "bias", finish.outputs);
  finish.activation = activation_of(activation);
  finish.residual = halves(residual, "residual", rows * finish.outputs);
  finish.out = static_cast<Half*>(out.mutable_data());
  return finish;
}

const linear8::Variant& variant_of(const std::optional<std::string>& name) {
  if (!name) return linear8::best_variant();
  for (const linear8::Variant* variant : linear8::variants()) {
    if (variant->name == *name) return *variant;
  }
  throw py::value_error("this processor has no variant '" + *name + "' of the 8-bit layers");
}

std::size_t threads_of(py::ssize_t threads) {
  if (threads < 1) throw py::value_error(std::to_string(threads) + " threads: at least 1 is needed");
  return static_cast<std::size_t>(threads);
}

std::size_t packed_bytes(py::ssize_t outputs, py::ssize_t inputs, const std::optional<std::string>& name) {
  if (outputs < 0 || inputs < 0) throw py::value_error("a size is not negative");
  return linear8::packed_bytes(variant_of(name), static_cast<std::size_t>(outputs), static_cast<std::size_t>(inputs));
}

void pack(const py::array& weights, py::array& packed, const std::optional<std::string>& name) {
  const linear8::Variant& variant = variant_of(name);
  const auto [outputs, inputs] = shape_of(weights, "weights");
  require<std::int8_t>(weights, "weights", "int8", outputs * inputs, false);
  require<std::int8_t>(packed, "packed", "int8", linear8::packed_bytes(variant, outputs, inputs), true);
  const auto* from = static_cast<const std::int8_t*>(weights.data());
  auto* to = static_cast<std::int8_t*>(packed.mutable_data());
  py::gil_scoped_release unlocked;
  linear8::pack(variant, from, outputs, inputs, to);
}

void apply(const py::array& x, const OptionalNorm& norm, const py::array& packed, const py::array& scales,
           const OptionalArray& bias, const std::string& activation, const OptionalArray& residual, py::array& out,
           py::ssize_t threads, const std::optional<std::string>& name) {
  const auto [rows, inputs] = shape_of(x, "x");
  require<Half>(x, "x", kHalfType, rows * inputs, false);
  const linear8::Norm before = norm_of(norm, inputs);
  const linear8::Finish after = finish_of(scales, bias, activation, residual, out, rows);
  const linear8::Variant& variant = variant_of(name);
  if (variant.tile_rows == 0) {
    throw py::value_error("the variant '" + std::string(variant.name) + "' of the 8-bit layers has no product");
  }
  require<std::int8_t>(packed, "packed", "int8", linear8::packed_bytes(variant, after.outputs, inputs), false);
  const std::size_t count = threads_of(threads);
  const auto* values = static_cast<const Half*>(x.data());
  const auto* weights = static_cast<const std::int8_t*>(packed.data());
  py::gil_scoped_release unlocked;
  linear8::apply(variant, values, rows, inputs, before, weights, after, count);
}

void quantise(const py::array& x, const OptionalNorm& norm, py::array& codes, py::array& row_scales,
              py::ssize_t threads, const std::optional<std::string>& name) {
  const auto [rows, inputs] = shape_of(x, "x");
  require<Half>(x, "x", kHalfType, rows * inputs, false);
  require<std::uint8_t>(codes, "codes", "uint8", rows * inputs, true);
  require<float>(row_scales, "row_scales", "float32", rows, true);
  const linear8::Norm before = norm_of(norm, inputs);
  const linear8::Variant& variant = variant_of(name);
  const std::size_t count = threads_of(threads);
  const auto* values = static_cast<const Half*>(x.data());
  auto* to = static_cast<std::uint8_t*>(codes.mutable_data());
  auto* scales = static_cast<float*>(row_scales.mutable_data());
  py::gil_scoped_release unlocked;
  linear8::quantise(variant, values, rows, inputs, before, to, scales, count);
}

void finish(const py::array& sums, const py::array& row_scales, const py::array& scales, const OptionalArray& bias,
            const std::string& activation, const OptionalArray& residual, py::array& out, py::ssize_t threads,
            const std::optional<std::string>& name) {
  const auto rows = static_cast<std::size_t>(row_scales.size());
  require<float>(row_scales, "row_scales", "float32", rows, false);
  const linear8::Finish after = finish_of(scales, bias, activation, residual, out, rows);
  require<std::int32_t>(sums, "sums", "int32", rows * after.outputs, false);
  const linear8::Variant& variant = variant_of(name);
  const std::size_t count = threads_of(threads);
  const auto* from = static_cast<const std::int32_t*>(sums.data());
  const auto* of_rows = static_cast<const float*>(row_scales.data());
  py::gil_scoped_release unlocked;
  linear8::finish(variant, after, from, of_rows, rows, count);
}

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const linear8::Variant* variant : linear8::variants()) names.emplace_back(variant->name);
  return names;
}

}  // namespace

void bind_linear8(py::module_& module) {
  module.def("linear8_variants", &variants, "Return the instruction sets that this processor supports, best first.");
  module.def("linear8_packed_bytes", &packed_bytes, "Return the bytes of packed weights.", py::arg("outputs"),
             py::arg("inputs"), py::arg("variant") = py::none());
  module.def("linear8_pack", &pack, "Pack weights.", py::kw_only(), py::arg("weights"), py::arg("packed"),
             py::arg("variant") = py::none());
  module.def("linear8_apply", &apply, "Apply a linear layer.", py::kw_only(), py::arg("x"), py::arg("norm"),
             py::arg("packed"), py::arg("scales"), py::arg("bias"), py::arg("activation"), py::arg("residual"),
             py::arg("out"), py::arg("threads"), py::arg("variant") = py::none());
  module.def("linear8_quantise", &quantise, "Quantise rows.", py::kw_only(), py::arg("x"), py::arg("norm"),
             py::arg("codes"), py::arg("row_scales"), py::arg("threads"), py::arg("variant") = py::none());
  module.def("linear8_finish", &finish, "Compute results from sums.", py::kw_only(), py::arg("sums"),
             py::arg("row_scales"), py::arg("scales"), py::arg("bias"), py::arg("activation"), py::arg("residual"),
             py::arg("out"), py::arg("threads"), py::arg("variant") = py::none());
}
