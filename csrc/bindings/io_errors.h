// How the failures of transfers reach Python.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace locked_tensor {

// ShortRead -> ShortReadError; TransfersFailed -> its first failure, the rest in `.others`.
void register_io_errors();

// The Python exception that a function of ours would raise for `error`.
pybind11::object exception_object(const std::exception_ptr& error);

}  // namespace locked_tensor
