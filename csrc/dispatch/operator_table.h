// The operator table: what is known of an operator's results before it runs.
#pragma once

#include <ATen/core/function_schema.h>

namespace locked_tensor {

// Whatever is said here, a result is tagged only if the registry knows its bytes.
enum class Results {
  // Lie in an argument's memory, and nothing is computed: narrows, transposes, splits.
  kViews,
  // Lie in memory of their own, which is locked inside a locked context only: arithmetic, copies,
  // new_empty and its like. Outside there is nothing to ask.
  kFresh,
  // Whatever the schema writes to or aliases, and operators that alias though their schema does not
  // say so (broadcast_tensors, or whole composites in inference mode).
  kAsk,
};

Results results_of(const c10::FunctionSchema& schema);

}  // namespace locked_tensor
