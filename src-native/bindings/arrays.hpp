// Checks of numpy arrays whose memory native code reads or writes in place.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

namespace pipeedge::bindings {

/// Throws ValueError unless the array is contiguous.
inline void require_contiguous(const pybind11::array& array, const char* name) {
  if (!(array.flags() & pybind11::array::c_style)) {
    throw pybind11::value_error(std::string(name) + " is not contiguous");
  }
}

/// Throws ValueError unless the array is contiguous, of type T, of `size` values, and writeable if it is `written`.
template <typename T>
void require(const pybind11::array& array, const char* name, const char* type, std::size_t size, bool written) {
  if (!pybind11::isinstance<pybind11::array_t<T>>(array)) {
    throw pybind11::value_error(std::string(name) + " is not " + type);
  }
  require_contiguous(array, name);
  if (static_cast<std::size_t>(array.size()) != size) {
    throw pybind11::value_error(std::string(name) + " has " + std::to_string(array.size()) + " values, not " +
                                std::to_string(size));
  }
  if (written && !array.writeable()) throw pybind11::value_error(std::string(name) + " is read-only");
}

}  // namespace pipeedge::bindings
