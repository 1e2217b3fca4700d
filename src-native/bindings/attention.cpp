// Attention for numpy arrays, without copies, and without the interpreter lock while it computes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../attention/attention.hpp"
#include "arrays.hpp"
#include "module.hpp"

namespace py = pybind11;
namespace attention = pipeedge::attention;

namespace {

using pipeedge::bindings::require;

void require_element(const py::array& array, const char* name, attention::Element element, std::size_t size,
                     bool written) {
  if (element == attention::Element::kFloat32) return require<float>(array, name, "float32", size, written);
  require<std::uint16_t>(array, name, "uint16 (the bits of bfloat16)", size, written);
}

using Rotation = std::pair<py::array, py::array>;

void set_rotation(attention::Problem& problem, const Rotation& rotation) {
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

void attend(const py::array& qkv, py::ssize_t heads, const std::optional<py::array>& bias,
            const std::optional<py::array>& distances, const std::optional<Rotation>& rotation,
            std::optional<py::ssize_t> reach, py::array& out, py::ssize_t threads) {
  const bool wide = py::isinstance<py::array_t<float>>(qkv);
  const attention::Element element = wide ? attention::Element::kFloat32 : attention::Element::kBfloat16;
  if (!attention::supports(element)) throw py::value_error("this processor has no attention for this number type");
  if (qkv.ndim() != 3) throw py::value_error("qkv has " + std::to_string(qkv.ndim()) + " dimensions, not 3");
  const auto width = static_cast<std::size_t>(qkv.shape(2));
  if (heads < 1 || width % (3 * static_cast<std::size_t>(heads) * attention::kHeadMultiple) != 0) {
    throw py::value_error(std::to_string(width) + " values a token are not queries, keys and values of " +
                          std::to_string(heads) + " heads, each a multiple of " +
                          std::to_string(attention::kHeadMultiple));
  }
  if (threads < 1) throw py::value_error(std::to_string(threads) + " threads: at least 1 is needed");
  attention::Problem problem;
  problem.items = static_cast<std::size_t>(qkv.shape(0));
  problem.tokens = static_cast<std::size_t>(qkv.shape(1));
  problem.heads = static_cast<std::size_t>(heads);
  problem.head_size = width / 3 / problem.heads;
  const std::size_t rows = problem.items * problem.tokens;
  require_element(qkv, "qkv", element, rows * width, false);
  require_element(out, "out", element, rows * width / 3, true);
  if (bias) {
    require<float>(*bias, "bias", "float32", rows, false);
    problem.bias = static_cast<const float*>(bias->data());
  }
  if (distances) {
    const std::size_t count = problem.tokens == 0 ? 0 : 2 * problem.tokens - 1;
    require<float>(*distances, "distances", "float32", problem.heads * count, false);
    problem.distances = static_cast<const float*>(distances->data());
  }
  if (rotation) set_rotation(problem, *rotation);
  if (reach) {
    if (*reach < 0) throw py::value_error("a reach of " + std::to_string(*reach) + ": at least 0 is needed");
    problem.reach = static_cast<std::size_t>(*reach);
  }
  problem.qkv = qkv.data();
  problem.out = out.mutable_data();
  py::gil_scoped_release unlocked;
  attention::attend(element, problem, static_cast<std::size_t>(threads));
}

std::vector<std::string> attention_types() {
  std::vector<std::string> names;
  if (attention::supports(attention::Element::kFloat32)) names.emplace_back("float32");
  if (attention::supports(attention::Element::kBfloat16)) names.emplace_back("bfloat16");
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
