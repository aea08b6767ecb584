// Fast lanes: LockedTensor's own methods for the views that are taken most.
#pragma once

#include <Python.h>

namespace locked_tensor {

// Note [Fast lanes] A lane runs torch's own operator below Python's and autograd's dispatch keys
// and makes the result a LockedTensor. It is taken only where nobody could tell: the exact class,
// no mode, transform or tracing on this thread, no autograd history to keep, arguments of the
// common exact types. In all other cases, and whenever the operator refuses, torch.Tensor's own
// method is called as if there were no lane: views have no side effects, so nothing has happened
// before.

// Gives the class its lanes, in front of the methods of torch.Tensor. False with a Python error.
bool add_fast_lanes(PyTypeObject* locked_tensor);

}  // namespace locked_tensor
