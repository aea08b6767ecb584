#include "bindings/io_errors.h"

#include "handle/aio_handle.h"

namespace locked_tensor {

namespace py = pybind11;

namespace {

void raise(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

void raise_short_read(const ShortRead& error) {
  raise(py::module_::import("locked_tensor.errors")
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
  raise(first);
}

}  // namespace

void register_io_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const ShortRead& error) {
      raise_short_read(error);
    } catch (const TransfersFailed& failed) {
      raise_first(failed);
    }
  });
}

py::object exception_object(const std::exception_ptr& error) {
  // Raised through a function of ours, so that every translator has its say.
  const py::cpp_function raises([error] { std::rethrow_exception(error); });
  PyObject* result = PyObject_CallNoArgs(raises.ptr());
  LT_CHECK(result == nullptr, "a failure raises");
  return py::error_already_set().value();
}

}  // namespace locked_tensor
