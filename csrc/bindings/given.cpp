#include "bindings/given.h"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace locked_tensor {

namespace {

constexpr size_t kMostShown = 60;  // bytes

py::type_error wrong_type(const char* name, const char* wanted, py::handle given) {
  return py::type_error(std::string(name) + " must be " + wanted + ", got " + show(given));
}

std::string shortened(std::string text) {
  if (text.size() > kMostShown) {
    size_t end = kMostShown;
    while ((static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) {
      --end;  // whole characters of UTF-8
    }
    text.resize(end);
    text += "...";
  }
  return text;
}

// Has the current Python exception this type? Then it is cleared.
bool take_error(PyObject* type) {
  if (PyErr_ExceptionMatches(type) == 0) {
    return false;
  }
  PyErr_Clear();
  return true;
}

std::string digits_of(py::handle number) {
  const auto text = py::reinterpret_steal<py::object>(PyObject_Str(number.ptr()));
  if (!text) {
    PyErr_Clear();  // Python shows no more than 4300 digits
    return "a number of thousands of digits";
  }
  return shortened(text.cast<std::string>());
}

bool is_uninitialized(py::handle tensor) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> lazy;
  lazy.call_once_and_store_result(
      [] { return py::module_::import("torch.nn.parameter").attr("UninitializedTensorMixin"); });
  return py::isinstance(tensor, lazy.get_stored());
}

}  // namespace

std::string show(py::handle given) {
  if (given.is_none()) {
    return "None";
  }
  const std::string type = Py_TYPE(given.ptr())->tp_name;
  if (!PyBool_Check(given.ptr()) && !PyFloat_CheckExact(given.ptr()) &&
      !PyLong_CheckExact(given.ptr()) && !PyUnicode_CheckExact(given.ptr())) {
    return type;
  }
  return type + " " +
         (PyLong_CheckExact(given.ptr()) ? digits_of(given)
                                         : shortened(py::repr(given).cast<std::string>()));
}

at::Tensor tensor_of(const char* name, py::handle given) {
  if (!THPVariable_Check(given.ptr())) {
    const bool is_array = py::hasattr(given, "__array_interface__");
    throw wrong_type(
        name, is_array ? "a torch.Tensor (torch.from_numpy() makes one)" : "a torch.Tensor", given);
  }
  const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
  if (tensor.defined() && tensor.numel() == 0 && is_uninitialized(given)) {
    throw py::type_error(std::string(name) + " has no bytes yet: an " + show(given));
  }
  return tensor;
}

std::vector<at::Tensor> tensors_of(const char* name, py::handle given) {
  std::vector<at::Tensor> tensors;
  if (THPVariable_Check(given.ptr()) || py::isinstance<py::str>(given) ||
      !py::isinstance<py::iterable>(given)) {
    throw wrong_type(name, "a list of torch.Tensor", given);
  }
  for (const py::handle each : py::reinterpret_borrow<py::iterable>(given)) {
    if (!THPVariable_Check(each.ptr())) {
      const std::string its_name = std::string(name) + "[" + std::to_string(tensors.size()) + "]";
      throw wrong_type(its_name.c_str(), "a torch.Tensor", each);
    }
    tensors.push_back(tensor_of(name, each));
  }
  return tensors;
}

int64_t whole_of(const char* name, py::handle given) {
  if (PyBool_Check(given.ptr()) || PyIndex_Check(given.ptr()) == 0) {
    throw wrong_type(name, "a whole number", given);
  }
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(given.ptr()));
  if (!number) {
    if (take_error(PyExc_TypeError)) {
      throw wrong_type(name, "a whole number", given);
    }
    throw py::error_already_set();
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) {
    throw py::value_error(std::string(name) + " must be from 0 to 2**63 - 1, got " +
                          digits_of(number));
  }
  return value;
}

bool flag_of(const char* name, py::handle given) {
  py::detail::make_caster<bool> caster;
  if (!caster.load(given, true)) {
    throw wrong_type(name, "a bool", given);
  }
  return py::detail::cast_op<bool>(caster);
}

std::string text_of(const char* name, py::handle given) {
  if (!py::isinstance<py::str>(given)) {
    throw wrong_type(name, "a str", given);
  }
  return given.cast<std::string>();
}

std::optional<int64_t> nanoseconds_of(const char* name, py::handle given) {
  if (given.is_none()) {
    return std::nullopt;
  }
  const double seconds = PyFloat_AsDouble(given.ptr());
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) {
    if (take_error(PyExc_TypeError)) {
      throw wrong_type(name, "a number of seconds or None", given);
    }
    if (take_error(PyExc_OverflowError)) {
      throw py::value_error(std::string(name) + " is more than a float can be");
    }
    throw py::error_already_set();
  }
  if (!(seconds >= 0)) {
    throw py::value_error(std::string(name) + " must not be negative, got " +
                          std::to_string(seconds));
  }
  return static_cast<int64_t>(std::min(seconds, 1e9) * 1e9);
}

}  // namespace locked_tensor
