// Attention for numpy arrays, without copies, and without the interpreter lock while it computes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../attention/attention.hpp"
#include "arrays.hpp"
#include "module.hpp"

namespace py = pybind11;
namespace attention = pipeedge::attention;

namespace {

using pipeedge::bindings::require;

template <typename Value>
const char* name_of() {
  return std::is_same_v<Value, float> ? "float32" : "uint16 (the bits of bfloat16)";
}

using Rotation = std::pair<py::array, py::array>;

void set_rotation(attention::Shape& problem, const Rotation& rotation) {
  const auto& [cosines, sines] = rotation;
  if (cosines.ndim() != 2 || static_cast<std::size_t>(cosines.shape(0)) > problem.tokens) {
    throw py::value_error("the rotation is not of angles for each of at most " + std::to_string(problem.tokens) +
                          " tokens");
  }
  problem.rotated = static_cast<std::size_t>(cosines.shape(0));
  const std::size_t angles = problem.rotated * problem.head_size / 2;
  require<float>(cosines, "cosines", "float32", angles, false);
  require<float>(sines, "sines", "float32", angles, false);
  problem.cosines = static_cast<const float*>(cosines.data());
  problem.sines = static_cast<const float*>(sines.data());
}

template <typename Value>
void attend_in(const py::array& qkv, attention::Problem<Value> problem, py::array& out, py::ssize_t threads) {
  if (!attention::supports<Value>()) throw py::value_error("this processor has no attention for this number type");
  const std::size_t results = problem.items * problem.tokens * problem.heads * problem.head_size;
  require<Value>(qkv, "qkv", name_of<Value>(), 3 * results, false);
  require<Value>(out, "out", name_of<Value>(), results, true);
  problem.qkv = static_cast<const Value*>(qkv.data());
  problem.out = static_cast<Value*>(out.mutable_data());
  py::gil_scoped_release unlocked;
  attention::attend(problem, static_cast<std::size_t>(threads));
}

void attend(const py::array& qkv, py::ssize_t heads, const std::optional<py::array>& bias,
            const std::optional<py::array>& distances, const std::optional<Rotation>& rotation,
            std::optional<py::ssize_t> reach, py::array& out, py::ssize_t threads) {
  if (qkv.ndim() != 3) throw py::value_error("qkv has " + std::to_string(qkv.ndim()) + " dimensions, not 3");
  const auto width = static_cast<std::size_t>(qkv.shape(2));
  if (heads < 1 || width % (3 * static_cast<std::size_t>(heads) * attention::kHeadMultiple) != 0) {
    throw py::value_error(std::to_string(width) + " values a token are not queries, keys and values of " +
                          std::to_string(heads) + " heads, each a multiple of " +
                          std::to_string(attention::kHeadMultiple));
  }
  if (threads < 1) throw py::value_error(std::to_string(threads) + " threads: at least 1 is needed");
  attention::Shape shape;
  shape.items = static_cast<std::size_t>(qkv.shape(0));
  shape.tokens = static_cast<std::size_t>(qkv.shape(1));
  shape.heads = static_cast<std::size_t>(heads);
  shape.head_size = width / 3 / shape.heads;
  if (bias) {
    require<float>(*bias, "bias", "float32", shape.items * shape.tokens, false);
    shape.bias = static_cast<const float*>(bias->data());
  }
  if (distances) {
    const std::size_t count = shape.tokens == 0 ? 0 : 2 * shape.tokens - 1;
    require<float>(*distances, "distances", "float32", shape.heads * count, false);
    shape.distances = static_cast<const float*>(distances->data());
  }
  if (rotation) set_rotation(shape, *rotation);
  if (reach) {
    if (*reach < 0) throw py::value_error("a reach of " + std::to_string(*reach) + ": at least 0 is needed");
    shape.reach = static_cast<std::size_t>(*reach);
  }
  if (py::isinstance<py::array_t<float>>(qkv)) {
    attend_in<float>(qkv, {shape, nullptr, nullptr}, out, threads);
  } else {
    attend_in<attention::Bfloat16>(qkv, {shape, nullptr, nullptr}, out, threads);
  }
}

std::vector<std::string> attention_types() {
  std::vector<std::string> names;
  if (attention::supports<float>()) names.emplace_back("float32");
  if (attention::supports<attention::Bfloat16>()) names.emplace_back("bfloat16");
  return names;
}

}  // namespace

void bind_attention(py::module_& module) {
  module.attr("ATTENTION_HEAD_MULTIPLE") = attention::kHeadMultiple;
  module.def("attention_types", &attention_types, "Return the number types for which this processor has attention.");
  module.def("attend", &attend, "Compute multi-head attention.", py::kw_only(), py::arg("qkv"), py::arg("heads"),
             py::arg("bias"), py::arg("distances"), py::arg("rotation"), py::arg("reach"), py::arg("out"),
             py::arg("threads"));
}
