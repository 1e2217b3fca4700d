// The Python module pipeedge._native (see _native.pyi).
#include "module.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "PipeEdge's compiled core";
  bind_scheduler(module);
  bind_codec(module);
  bind_linear8(module);
  bind_attention(module);
  bind_decoder(module);
}
