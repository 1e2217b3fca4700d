// The Python module pipeedge._native (see _native.pyi).
#include "module.hpp"

#include <pybind11/stl.h>

#include "../processor/features.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "PipeEdge's compiled core";
  module.def("arm_features", &pipeedge::processor::arm_feature_names, "Return the instructions of an ARM processor.");
  bind_scheduler(module);
  bind_codec(module);
  bind_linear8(module);
  bind_attention(module);
  bind_decoder(module);
}
