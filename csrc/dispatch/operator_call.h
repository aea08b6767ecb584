// Calling an operator from within a __torch_dispatch__.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace locked_tensor {

enum class Below {
  kMode,   // other modes and subclasses still see the operator
  kPython  // nothing in Python sees it
};

// Replaces the arguments on the stack by the results. See Note [Lazy conjugation].
void call_operator(const c10::OperatorHandle& op, Below below, torch::jit::Stack* stack);

}  // namespace locked_tensor
