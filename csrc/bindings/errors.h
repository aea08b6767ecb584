// How failures of the torch-free floors reach Python.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace locked_tensor {

// KernelError -> OSError (errno, filename), LockRefused -> LockLimitError, ShortRead ->
// ShortReadError, TransfersFailed -> its first failure with the rest in `.others`, InternalError ->
// InternalError; and the allocator's hook, so that a refused lock inside torch arrives as the class
// it is.
void register_errors();

// Sets the exception as Python's current one.
void set_error(const pybind11::object& error);

// The Python exception that a function of ours would raise for `error`.
pybind11::object exception_object(const std::exception_ptr& error);

}  // namespace locked_tensor
