// The parts of pipeedge._native. Only the files in this directory include pybind11.
#pragma once

#include <pybind11/pybind11.h>

void bind_scheduler(pybind11::module_& module);
void bind_codec(pybind11::module_& module);
void bind_linear8(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_decoder(pybind11::module_& module);
