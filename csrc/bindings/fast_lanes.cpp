#include "bindings/fast_lanes.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <vector>

#include "bindings/tagging.h"
#include "dispatch/locked_dispatch.h"

namespace locked_tensor {

namespace {

using Ints = c10::SmallVector<int64_t, 8>;

struct Arguments {
  PyObject* const* values;
  Py_ssize_t count;
};

// Throws what nobody sees: the lane is left.
struct NotForTheLane {};

int64_t to_int(PyObject* object) {
  int overflow = 0;
  if (!PyLong_CheckExact(object)) {
    throw NotForTheLane();
  }
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) {
    throw NotForTheLane();
  }
  return value;
}

Ints to_ints(PyObject* const* values, Py_ssize_t count) {
  Ints ints;
  for (Py_ssize_t i = 0; i < count; ++i) {
    ints.push_back(to_int(values[i]));
  }
  return ints;
}

bool is_sequence(PyObject* object) {
  return PyTuple_Check(object) || PyList_CheckExact(object);
}

Ints to_ints(PyObject* sequence) {
  return to_ints(PySequence_Fast_ITEMS(sequence), PySequence_Fast_GET_SIZE(sequence));
}

void expect(bool is_expected) {
  if (!is_expected) {
    throw NotForTheLane();
  }
}

bool may_take_lane(PyObject* self) {
  if (Py_TYPE(self) != locked_tensor_type()) {
    return false;
  }
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  if (local.included_ != c10::default_included_set ||
      local.excluded_ != c10::default_excluded_set) {
    return false;  // a dispatch mode, a transform, tracing, inference mode, autocast
  }
  if (at::impl::torch_function_mode_enabled() ||
      at::impl::PythonTorchFunctionTLS::peek_skip_next()) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(self);
  if (tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr) {
    return true;
  }
  const bool has_history = tensor.requires_grad() && at::GradMode::is_enabled();
  return !has_history && !tensor._fw_grad(0).defined();
}

const c10::DispatchKeySet kAboveTheLane =
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PreDispatch,
                         c10::DispatchKey::PythonTLSSnapshot}) |
    c10::autograd_dispatch_keyset;

PyObject* wrap(at::Tensor&& view) {
  expect(is_ours_alone(view));
  PyObject* result = is_locked(view) ? wrap_locked(std::move(view)) : wrap_plain(std::move(view));
  expect(result != nullptr);
  return result;
}

PyObject* wrap(std::vector<at::Tensor>&& views) {
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(views.size()));
  expect(result != nullptr);
  try {
    for (size_t i = 0; i < views.size(); ++i) {
      PyTuple_SET_ITEM(result, i, wrap(std::move(views[i])));
    }
  } catch (...) {
    Py_DECREF(result);
    throw;
  }
  return result;
}

// --- the methods, below dispatch ---

PyObject* narrow(const at::Tensor& self, const Arguments& given) {
  expect(given.count == 3);
  return wrap(
      self.narrow(to_int(given.values[0]), to_int(given.values[1]), to_int(given.values[2])));
}

PyObject* view(const at::Tensor& self, const Arguments& given) {
  expect(given.count > 0);
  return wrap(self.view(given.count == 1 && is_sequence(given.values[0])
                            ? to_ints(given.values[0])
                            : to_ints(given.values, given.count)));
}

PyObject* select(const at::Tensor& self, const Arguments& given) {
  expect(given.count == 2);
  return wrap(self.select(to_int(given.values[0]), to_int(given.values[1])));
}

PyObject* transpose(const at::Tensor& self, const Arguments& given) {
  expect(given.count == 2);
  return wrap(self.transpose(to_int(given.values[0]), to_int(given.values[1])));
}

int64_t dim_at(const Arguments& given, Py_ssize_t i) {
  expect(given.count <= i + 1);
  return given.count > i ? to_int(given.values[i]) : 0;
}

PyObject* chunk(const at::Tensor& self, const Arguments& given) {
  expect(given.count > 0);
  return wrap(self.chunk(to_int(given.values[0]), dim_at(given, 1)));
}

PyObject* split(const at::Tensor& self, const Arguments& given) {
  expect(given.count > 0);
  const int64_t dim = dim_at(given, 1);
  return wrap(is_sequence(given.values[0]) ? self.split_with_sizes(to_ints(given.values[0]), dim)
                                           : self.split(to_int(given.values[0]), dim));
}

PyObject* unbind(const at::Tensor& self, const Arguments& given) {
  return wrap(self.unbind(dim_at(given, 0)));
}

int64_t slice_bound(PyObject* bound, int64_t otherwise) {
  return bound == Py_None ? otherwise : to_int(bound);
}

// torch.Tensor.__getitem__ for ints and slices. Within a tuple it skips slices of everything.
at::Tensor sliced(const at::Tensor& self, int64_t dim, PyObject* slice, bool is_in_tuple) {
  auto* bounds = reinterpret_cast<PySliceObject*>(slice);
  const int64_t step = slice_bound(bounds->step, 1);
  const int64_t start = slice_bound(bounds->start, 0);
  const int64_t stop = slice_bound(bounds->stop, INT64_MAX);
  expect(step > 0);
  if (is_in_tuple && step == 1 && start == 0 && stop >= self.size(dim)) {
    return self;
  }
  return self.slice(dim, start, stop, step);
}

PyObject* getitem(const at::Tensor& self, const Arguments& given) {
  expect(given.count == 1);
  PyObject* index = given.values[0];
  if (PyLong_CheckExact(index)) {
    return wrap(self.select(0, to_int(index)));
  }
  expect(self.dim() > 0);
  if (PySlice_Check(index)) {
    return wrap(sliced(self, 0, index, false));
  }
  expect(PyTuple_CheckExact(index) && PyTuple_GET_SIZE(index) <= self.dim());
  at::Tensor result = self;
  int64_t dim = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(index); ++i) {
    PyObject* item = PyTuple_GET_ITEM(index, i);
    if (PySlice_Check(item)) {
      result = sliced(result, dim++, item, true);
    } else {
      result = result.select(dim, to_int(item));
    }
  }
  if (result.is_same(self)) {
    result = at::alias(self);
  }
  return wrap(std::move(result));
}

// --- in front of torch's methods ---

struct Lane {
  const char* name;
  PyObject* (*run)(const at::Tensor&, const Arguments&);
  Py_ssize_t place_of_dim;  // where `dim=` by name stands; -1: no names
};

constexpr Lane kLanes[] = {{"narrow", narrow, -1}, {"view", view, -1},
                           {"select", select, -1}, {"transpose", transpose, -1},
                           {"chunk", chunk, 1},    {"split", split, 1},
                           {"unbind", unbind, 0},  {"__getitem__", getitem, -1}};
constexpr size_t kCount = std::size(kLanes);

// torch.Tensor's. Kept, as the class is.
std::array<PyObject*, kCount> ordinary_methods{};

PyObject* call_ordinary(size_t lane, PyObject* self, const Arguments& given, PyObject* names) {
  c10::SmallVector<PyObject*, 8> values{self};
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  values.append(given.values, given.values + given.count + named);
  return PyObject_Vectorcall(ordinary_methods[lane], values.data(), given.count + 1, names);
}

// New reference, or nullptr and nothing has happened.
PyObject* try_lane(const Lane& lane, PyObject* self, Arguments given, PyObject* names) {
  if (!may_take_lane(self)) {
    return nullptr;
  }
  if (names != nullptr) {
    const bool is_dim = PyTuple_GET_SIZE(names) == 1 && given.count == lane.place_of_dim &&
                        PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "dim") == 0;
    if (!is_dim) {
      return nullptr;
    }
    ++given.count;
  }
  try {
    c10::impl::ExcludeDispatchKeyGuard guard(kAboveTheLane);
    return lane.run(THPVariable_Unpack(self), given);
  } catch (...) {
    // Not for the lane, or an error: the ordinary method raises it in its own words.
    PyErr_Clear();
    return nullptr;
  }
}

template <size_t kLane>
PyObject* method(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const Arguments given{values, count};
  PyObject* result = try_lane(kLanes[kLane], self, given, names);
  return result != nullptr ? result : call_ordinary(kLane, self, given, names);
}

template <size_t... kLane>
std::array<PyMethodDef, kCount> definitions(std::index_sequence<kLane...>) {
  return {PyMethodDef{kLanes[kLane].name,
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method<kLane>)),
                      METH_FASTCALL | METH_KEYWORDS, "As the method of torch.Tensor."}...};
}

}  // namespace

bool add_fast_lanes(PyTypeObject* locked_tensor) {
  static std::array<PyMethodDef, kCount> methods = definitions(std::make_index_sequence<kCount>());
  for (size_t i = 0; i < kCount; ++i) {
    PyObject* ordinary = PyObject_GetAttrString(THPVariableClass, kLanes[i].name);
    PyObject* own = ordinary == nullptr ? nullptr : PyDescr_NewMethod(locked_tensor, &methods[i]);
    const bool is_set =
        own != nullptr && PyObject_SetAttrString(reinterpret_cast<PyObject*>(locked_tensor),
                                                 kLanes[i].name, own) == 0;
    Py_XDECREF(own);
    Py_XSETREF(ordinary_methods[i], ordinary);
    if (!is_set) {
      return false;
    }
  }
  return true;
}

}  // namespace locked_tensor
