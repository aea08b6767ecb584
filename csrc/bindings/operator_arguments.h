// Operators as Python names them, and their arguments on the way from Python to the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <Python.h>

#include <vector>

#include "dispatch/operator_table.h"

namespace locked_tensor {

// How an argument is recognised; anything else goes by torch's own conversion.
enum class ArgumentKind { kTensor, kOptionalTensor, kInt, kIntList, kBool, kScalar, kOther };

struct OperatorArgument {
  ArgumentKind kind;
  PyObject* name;
  c10::TypePtr type;
  std::optional<int32_t> length;
  std::optional<c10::IValue> default_value;
  bool is_keyword_only;
};

struct Operator {
  c10::OperatorHandle handle;
  Results results;
  std::vector<OperatorArgument> arguments;
};

// The operator behind a torch._ops.OpOverload, found once and then remembered; nullptr for anything
// else that a __torch_dispatch__ may be given (higher-order operators, script objects' methods).
const Operator* operator_of(PyObject* overload);

// Puts the arguments on the stack, with defaults. `kwargs` may be null. False where they do not fit
// the schema as they are: then the Python way knows what to do or to say, and no error is set.
bool push_arguments(const Operator& op, PyObject* args, PyObject* kwargs, torch::jit::Stack* stack);

}  // namespace locked_tensor
