// The dispatch half of _C: LockedTensor's __torch_dispatch__, and tagging.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "allocator/allocator_switch.h"
#include "bindings/bindings.h"
#include "bindings/fast_lanes.h"
#include "bindings/open_contexts.h"
#include "bindings/operator_arguments.h"
#include "bindings/tagging.h"
#include "dispatch/locked_dispatch.h"
#include "dispatch/operator_call.h"

namespace locked_tensor {

namespace py = pybind11;

namespace {

// tensor.py's: what is done for operators that have no schema, and for results in other containers.
PyObject* call_in_python = nullptr;
PyObject* tag_in_python = nullptr;

using Wrap = PyObject* (*)(at::Tensor&&);

PyObject* checked(PyObject* result) {
  if (result == nullptr) {
    throw python_error();
  }
  return result;
}

py::object wrap_value(c10::IValue&& value, Wrap wrap) {
  if (value.isTensor()) {
    return py::reinterpret_steal<py::object>(checked(wrap(std::move(value).toTensor())));
  }
  if (value.isTensorList()) {
    auto tensors = std::move(value).toTensorVector();
    py::list list(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      PyList_SET_ITEM(list.ptr(), i, checked(wrap(std::move(tensors[i]))));
    }
    return list;
  }
  const bool may_hold_tensors = value.isList() || value.isTuple() || value.isGenericDict();
  py::object object = torch::jit::toPyObject(std::move(value));
  return may_hold_tensors && wrap == wrap_tagged ? py::handle(tag_in_python)(object) : object;
}

// As an operator returns to Python: nothing, one result, or a tuple.
py::object wrap_results(torch::jit::Stack& stack, Wrap wrap) {
  if (stack.size() == 1) {
    return wrap_value(std::move(stack[0]), wrap);
  }
  if (stack.empty()) {
    return py::none();
  }
  py::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    PyTuple_SET_ITEM(results.ptr(), i, wrap_value(std::move(stack[i]), wrap).release().ptr());
  }
  return results;
}

enum class Tags { kNone, kLocked };

py::object call(PyObject* func, Below below, Tags tags, PyObject* args, PyObject* kwargs) {
  const Operator* op = operator_of(func);
  torch::jit::Stack stack;
  if (op == nullptr || !push_arguments(*op, args, kwargs, &stack)) {
    const bool is_below_python = below == Below::kPython;
    const py::object result =
        py::handle(call_in_python)(py::handle(func), is_below_python, py::handle(args),
                                   kwargs == nullptr ? py::dict() : py::handle(kwargs));
    return tags == Tags::kNone ? result : py::handle(tag_in_python)(result);
  }
  if (op->results == Results::kViews && below == Below::kPython) {
    call_operator(op->handle, below, &stack);  // computes nothing: not worth letting go of the GIL
  } else {
    py::gil_scoped_release no_gil;
    call_operator(op->handle, below, &stack);
  }
  const bool is_asked =
      tags == Tags::kLocked && (op->results != Results::kFresh || allocates_locked());
  return wrap_results(stack, is_asked ? wrap_tagged : wrap_plain);
}

bool is_ours(PyObject* type) {
  PyTypeObject* ours = locked_tensor_type();
  return reinterpret_cast<PyTypeObject*>(type) == ours ||
         PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), ours) != 0;
}

bool are_all_ours(PyObject* types) {
  const py::object sequence = py::reinterpret_steal<py::object>(
      checked(PySequence_Fast(types, "types must be a sequence")));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i) {
    if (!is_ours(PySequence_Fast_GET_ITEM(sequence.ptr(), i))) {
      return false;
    }
  }
  return true;
}

struct DispatchArguments {
  PyObject* func = nullptr;
  PyObject* types = nullptr;
  PyObject* args = nullptr;
  PyObject* kwargs = nullptr;
};

// (func, types, args=(), kwargs=None), by position or name. False with a Python error.
bool parse(PyObject* const* given, Py_ssize_t count, PyObject* names, DispatchArguments* found) {
  static const char* const kNames[] = {"func", "types", "args", "kwargs"};
  PyObject** places[] = {&found->func, &found->types, &found->args, &found->kwargs};
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count > 4) {
    PyErr_Format(PyExc_TypeError, "__torch_dispatch__ takes 2 to 4 arguments, got %zd", count);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    *places[i] = given[i];
  }
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    int place = 0;
    while (place < 4 && PyUnicode_CompareWithASCIIString(name, kNames[place]) != 0) {
      ++place;
    }
    if (place == 4 || *places[place] != nullptr) {
      PyErr_Format(PyExc_TypeError, "__torch_dispatch__ got an unexpected argument %R", name);
      return false;
    }
    *places[place] = given[count + i];
  }
  if (found->kwargs == Py_None) {
    found->kwargs = nullptr;
  }
  if (found->func == nullptr || found->types == nullptr ||
      (found->args != nullptr && !PyTuple_Check(found->args)) ||
      (found->kwargs != nullptr && !PyDict_Check(found->kwargs))) {
    PyErr_SetString(PyExc_TypeError,
                    "__torch_dispatch__ takes an operator, types, a tuple and a dict");
    return false;
  }
  return true;
}

template <typename Work>
PyObject* with_python_errors(Work work) {
  try {
    return work().release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

py::object call_from_class(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  if (!are_all_ours(types)) {
    // Another subclass takes part: it knows its own tensors, and may know ours.
    return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  }
  return call(func, Below::kPython, Tags::kLocked, args, kwargs);
}

py::object call_from_mode(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  follow_logical_context();
  // A mode meets our own tensors on the way: unless others want to see the operator, at once.
  const bool all_ours = are_all_ours(types);
  const bool is_last = all_ours && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  // Where no context decides, the mode is not there: only the class of an argument tags.
  const bool tags = allocates_locked() || (is_last && PySequence_Size(types) > 0);
  return call(func, is_last ? Below::kPython : Below::kMode, tags ? Tags::kLocked : Tags::kNone,
              args, kwargs);
}

using Call = py::object (*)(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs);

PyObject* run(PyObject* const* given, Py_ssize_t count, PyObject* names, Call call) {
  DispatchArguments arguments;
  if (!parse(given, count, names, &arguments)) {
    return nullptr;
  }
  return with_python_errors([&]() -> py::object {
    const py::object none_given = arguments.args == nullptr ? py::tuple() : py::object();
    PyObject* args = arguments.args == nullptr ? none_given.ptr() : arguments.args;
    return call(arguments.func, arguments.types, args, arguments.kwargs);
  });
}

PyObject* torch_dispatch(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  return run(given, count, names, call_from_class);
}

PyObject* dispatch_in_mode(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  if (count == 0) {
    return PyErr_Format(PyExc_TypeError, "dispatch_in_mode is a method of a mode");
  }
  return run(given + 1, count - 1, names, call_from_mode);
}

PyObject* tag(PyObject*, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) {
    return PyErr_Format(PyExc_TypeError, "tag takes a tensor, got %.200s",
                        Py_TYPE(tensor)->tp_name);
  }
  return with_python_errors([&] {
    return py::reinterpret_steal<py::object>(
        checked(wrap_tagged(at::Tensor(THPVariable_Unpack(tensor)))));
  });
}

PyCFunction as_function(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {
    {"torch_dispatch", as_function(torch_dispatch), METH_FASTCALL | METH_KEYWORDS,
     "LockedTensor's __torch_dispatch__: (func, types, args=(), kwargs=None)."},
    {"dispatch_in_mode", as_function(dispatch_in_mode), METH_FASTCALL | METH_KEYWORDS,
     "The same as a mode's method; other modes and subclasses may stand below."},
    {"tag", tag, METH_O, "The tensor as a LockedTensor if its bytes are locked; else itself."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_dispatch(py::module_& module) {
  module.def("is_locked", &is_locked);
  module.def("set_up_dispatch", [](const py::type& locked_tensor, const py::function& call,
                                   const py::function& tag_results) {
    set_locked_tensor_type(reinterpret_cast<PyTypeObject*>(locked_tensor.ptr()));
    Py_XSETREF(call_in_python, call.inc_ref().ptr());
    Py_XSETREF(tag_in_python, tag_results.inc_ref().ptr());
    if (!add_fast_lanes(locked_tensor_type())) {
      throw py::error_already_set();
    }
  });
  PyModule_AddFunctions(module.ptr(), functions);
  // Functions in C do not become methods by themselves.
  const py::object in_mode = module.attr("dispatch_in_mode");
  module.attr("dispatch_in_mode") =
      py::reinterpret_steal<py::object>(checked(PyInstanceMethod_New(in_mode.ptr())));
}

}  // namespace locked_tensor
