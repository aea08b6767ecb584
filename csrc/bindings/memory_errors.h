// How refusals of the torch-free floors reach Python.
#pragma once

namespace locked_tensor {

// KernelError -> OSError (errno, filename), LockRefused -> LockLimitError, InternalError ->
// InternalError; and the allocator's hook, so that a refused lock inside torch arrives as the class
// it is.
void register_memory_errors();

}  // namespace locked_tensor
