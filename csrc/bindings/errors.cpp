#include "bindings/errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/extension.h>

#include <cstring>

#include "allocator/locked_allocator.h"
#include "handle/aio_handle.h"
#include "os/status.h"

namespace locked_tensor {

namespace py = pybind11;

namespace {

void raise_os_error(const KernelError& error) {
  // OSError picks its subclass (FileNotFoundError, ...) by errno.
  const py::object os_error = py::reinterpret_borrow<py::object>(PyExc_OSError);
  const std::string what = error.what();
  if (error.path().empty()) {
    set_error(os_error(error.errno_value(), what));
    return;
  }
  const std::string tried = "cannot " + error.tried() + ": " + std::strerror(error.errno_value());
  const auto name = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefaultAndSize(
      error.path().data(), static_cast<Py_ssize_t>(error.path().size())));
  set_error(os_error(error.errno_value(), tried, name));
}

py::object lock_limit_error(const LockRefused& refused) {
  const MemlockLimit& limit = refused.limit();
  return py::module_::import("locked_tensor.errors")
      .attr("LockLimitError")(refused.what(), refused.bytes_asked(), limit.locked, limit.soft,
                              limit.hard, refused.errno_value());
}

void raise_short_read(const ShortRead& error) {
  set_error(py::module_::import("locked_tensor.errors")
                .attr("ShortReadError")(error.what(), error.wanted_bytes(), error.found_bytes(),
                                        error.path()));
}

void raise_first(const TransfersFailed& failed) {
  const py::object first = exception_object(failed.failures().front());
  py::list others;
  for (size_t i = 1; i < failed.failures().size(); ++i) {
    others.append(exception_object(failed.failures()[i]));
  }
  py::setattr(first, "others", others);
  set_error(first);
}

// c10 turns what an allocator throws into types of its own, but lets a python_error through.
void throw_lock_limit_error(const LockRefused& refused) {
  python_error error;
  {
    py::gil_scoped_acquire gil;
    set_error(lock_limit_error(refused));
    error.persist();
  }
  throw error;
}

}  // namespace

void set_error(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

py::object exception_object(const std::exception_ptr& error) {
  // Raised through a function of ours, so that every translator has its say.
  const py::cpp_function raises([error] { std::rethrow_exception(error); });
  PyObject* result = PyObject_CallNoArgs(raises.ptr());
  LT_CHECK(result == nullptr, "a failure raises");
  return py::error_already_set().value();
}

void register_errors() {
  set_lock_failure_hook(&throw_lock_limit_error);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (python_error& error) {
      error.restore();
    } catch (const KernelError& error) {
      raise_os_error(error);
    } catch (const LockRefused& refused) {
      set_error(lock_limit_error(refused));
    } catch (const ShortRead& error) {
      raise_short_read(error);
    } catch (const TransfersFailed& failed) {
      raise_first(failed);
    } catch (const InternalError& error) {
      set_error(py::module_::import("locked_tensor.errors").attr("InternalError")(error.what()));
    }
  });
}

}  // namespace locked_tensor
