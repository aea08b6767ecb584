// The tagging mode on torch's stack of dispatch modes, of which each thread has its own.
#pragma once

#include <Python.h>

namespace locked_tensor {

// The object that Python made: a TorchDispatchMode whose __torch_dispatch__ is dispatch_in_mode. It
// has no state, so one serves every thread. Kept.
void set_tagging_mode(PyObject* mode);

// Of this thread, with the GIL.
bool is_tagging_mode_on();
// Puts it beneath the user's other modes. Leaving one of those takes whatever is on top, so that,
// left in any order, each takes its own.
void push_tagging_mode();
// Takes its topmost entry out, from under the others. False where there is none.
bool remove_tagging_mode();

}  // namespace locked_tensor
