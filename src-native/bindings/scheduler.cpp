// What Python needs of the scheduler's core to read profiles and to write them: sizes of number types, and of
// what auctions need, seconds of links. Plans and costs are asked of the program, sched-pipeline.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "../core/links.hpp"
#include "../core/number_types.hpp"
#include "module.hpp"

namespace py = pybind11;

void bind_scheduler(py::module_& module) {
  module.def(
      "element_bytes",
      [] {
        py::dict found;
        for (const pipeedge::NumberType& type : pipeedge::number_types()) {
          found[type.name] = static_cast<int>(type.element_bytes);
        }
        return found;
      },
      "Return the bytes of a value that crosses a cut, by number type (see _native.pyi).");
  module.def(
      "link_seconds",
      [](std::vector<double> sizes, double bw_bytes_per_s, double latency_s) {
        for (double& bytes : sizes) bytes = pipeedge::link_seconds(bytes, bw_bytes_per_s, latency_s);
        return sizes;
      },
      "Return the seconds that a link takes (see _native.pyi).", py::arg("sizes"), py::arg("bw_bytes_per_s"),
      py::arg("latency_s"));
  module.def(
      "scaled_weights",
      [](const std::string& dtype, std::vector<double> float32_bytes) {
        const pipeedge::NumberType* type = pipeedge::find_number_type(dtype);
        if (type == nullptr) throw py::value_error("unknown number type '" + dtype + "'");
        return pipeedge::scaled_weights(*type, std::move(float32_bytes));
      },
      "Estimate the bytes of weights in a number type (see _native.pyi).", py::arg("dtype"), py::arg("float32_bytes"));
}
