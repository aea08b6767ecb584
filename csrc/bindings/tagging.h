// Tagging: tensors as Python sees them, LockedTensors where the registry knows their bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

namespace locked_tensor {

// The Python class; nullptr until tensor.py has given it.
PyTypeObject* locked_tensor_type();
void set_locked_tensor_type(PyTypeObject* type);

// New references; nullptr with a Python error. With the GIL.

// The tensor as it is: the object that it has in Python already, else a plain one.
PyObject* wrap_plain(at::Tensor&& tensor);
// A LockedTensor if the bytes are locked, else as wrap_plain. A tensor that is known to Python as a
// plain one stays that, and gets a LockedTensor beside it.
PyObject* wrap_tagged(at::Tensor&& tensor);

// May the tensor itself become a LockedTensor: does nobody but the caller know it?
bool is_ours_alone(const at::Tensor& tensor);
// Makes it one. The tensor must be ours alone, and locked.
PyObject* wrap_locked(at::Tensor&& tensor);

}  // namespace locked_tensor
