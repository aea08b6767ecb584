#include "bindings/operator_arguments.h"

#include <ATen/ScalarOps.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <unordered_map>

namespace locked_tensor {

namespace {

namespace py = pybind11;

ArgumentKind kind_of(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.real_type();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return ArgumentKind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ArgumentKind::kInt;
    case c10::TypeKind::BoolType:
      return ArgumentKind::kBool;
    case c10::TypeKind::NumberType:
      return ArgumentKind::kScalar;
    case c10::TypeKind::OptionalType:
      return type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
                     c10::TypeKind::TensorType
                 ? ArgumentKind::kOptionalTensor
                 : ArgumentKind::kOther;
    case c10::TypeKind::ListType: {
      const auto element = type->castRaw<c10::ListType>()->getElementType()->kind();
      return element == c10::TypeKind::IntType || element == c10::TypeKind::SymIntType
                 ? ArgumentKind::kIntList
                 : ArgumentKind::kOther;
    }
    default:
      return ArgumentKind::kOther;
  }
}

std::unique_ptr<Operator> find_operator(PyObject* overload) {
  const py::object schema = py::handle(overload).attr("_schema");
  const auto name = schema.attr("name").cast<std::string>();
  const auto overload_name = schema.attr("overload_name").cast<std::string>();
  const auto handle =
      c10::Dispatcher::singleton().findSchema({name.c_str(), overload_name.c_str()});
  if (!handle.has_value()) {
    return nullptr;
  }
  auto found = std::make_unique<Operator>(Operator{*handle, results_of(handle->schema()), {}});
  for (const c10::Argument& argument : handle->schema().arguments()) {
    found->arguments.push_back(
        {kind_of(argument), PyUnicode_InternFromString(argument.name().c_str()),
         argument.real_type(), argument.N(), argument.default_value(), argument.kwarg_only()});
  }
  return found;
}

bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ||
         PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

bool push_int(PyObject* object, torch::jit::Stack* stack) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) {
    return false;
  }
  stack->emplace_back(value);
  return true;
}

bool push_int_list(PyObject* list, torch::jit::Stack* stack) {
  const bool is_list = PyList_CheckExact(list);
  if (!is_list && !PyTuple_CheckExact(list)) {
    return false;
  }
  const Py_ssize_t size = Py_SIZE(list);
  c10::List<int64_t> values;
  values.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = is_list ? PyList_GET_ITEM(list, i) : PyTuple_GET_ITEM(list, i);
    int overflow = 0;
    if (!PyLong_CheckExact(item)) {
      return false;
    }
    values.push_back(PyLong_AsLongLongAndOverflow(item, &overflow));
    if (overflow != 0) {
      return false;
    }
  }
  stack->emplace_back(std::move(values));
  return true;
}

// The common cases, without torch's conversion; false for all others.
bool push_common(const OperatorArgument& argument, PyObject* object, torch::jit::Stack* stack) {
  switch (argument.kind) {
    case ArgumentKind::kOptionalTensor:
      if (object == Py_None) {
        stack->emplace_back();
        return true;
      }
      [[fallthrough]];
    case ArgumentKind::kTensor:
      if (is_tensor(object)) {
        stack->emplace_back(THPVariable_Unpack(object));
        return true;
      }
      return false;
    case ArgumentKind::kInt:
      if (THPDtype_Check(object)) {  // ScalarType is an int in schemas
        const auto scalar_type = reinterpret_cast<THPDtype*>(object)->scalar_type;
        stack->emplace_back(static_cast<int64_t>(scalar_type));
        return true;
      }
      return PyLong_CheckExact(object) && push_int(object, stack);
    case ArgumentKind::kIntList:
      return push_int_list(object, stack);
    case ArgumentKind::kBool:
      if (PyBool_Check(object)) {
        stack->emplace_back(object == Py_True);
        return true;
      }
      return false;
    case ArgumentKind::kScalar:
      if (PyFloat_CheckExact(object)) {
        stack->emplace_back(PyFloat_AS_DOUBLE(object));
        return true;
      }
      return PyLong_CheckExact(object) && push_int(object, stack);
    case ArgumentKind::kOther:
      return false;
  }
  return false;
}

void push(const OperatorArgument& argument, PyObject* object, torch::jit::Stack* stack) {
  if (!push_common(argument, object, stack)) {
    stack->push_back(torch::jit::toIValue(object, argument.type, argument.length));
  }
}

}  // namespace

const Operator* operator_of(PyObject* overload) {
  // Leaked, and so are the overloads in it: an address is never another operator's.
  static auto* known = new std::unordered_map<PyObject*, std::unique_ptr<Operator>>;
  const auto place = known->find(overload);
  if (place != known->end()) {
    return place->second.get();
  }
  static PyObject* overload_class =
      py::object(py::module_::import("torch._ops").attr("OpOverload")).release().ptr();
  std::unique_ptr<Operator> found;
  if (reinterpret_cast<PyObject*>(Py_TYPE(overload)) == overload_class) {
    found = find_operator(overload);
  }
  Py_INCREF(overload);
  return known->emplace(overload, std::move(found)).first->second.get();
}

bool push_arguments(const Operator& op, PyObject* args, PyObject* kwargs,
                    torch::jit::Stack* stack) {
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(args));
  const Py_ssize_t named = kwargs == nullptr ? 0 : PyDict_GET_SIZE(kwargs);
  if (count + named > op.arguments.size()) {
    return false;
  }
  stack->reserve(op.arguments.size());
  Py_ssize_t taken = 0;
  // Numbers stand for tensors where the dispatcher took them out of wrapped ones.
  torch::jit::ToIValueAllowNumbersAsTensors allow_numbers(true);
  try {
    for (size_t i = 0; i < op.arguments.size(); ++i) {
      const OperatorArgument& argument = op.arguments[i];
      if (i < count) {
        if (argument.is_keyword_only) {
          return false;
        }
        push(argument, PyTuple_GET_ITEM(args, i), stack);
        continue;
      }
      PyObject* value = named == 0 ? nullptr : PyDict_GetItemWithError(kwargs, argument.name);
      if (value != nullptr) {
        ++taken;
        push(argument, value, stack);
      } else if (PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return false;
      } else if (argument.default_value.has_value()) {
        stack->push_back(*argument.default_value);
      } else {
        return false;
      }
    }
  } catch (const std::exception&) {
    return false;  // torch says it better
  }
  return taken == named;
}

}  // namespace locked_tensor
