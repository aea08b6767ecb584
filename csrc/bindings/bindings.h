// The parts of _C, each bound in its own file.
#pragma once

#include <pybind11/pybind11.h>

namespace locked_tensor {

void bind_contexts(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_io(pybind11::module_& module);
void bind_dispatch(pybind11::module_& module);

}  // namespace locked_tensor
