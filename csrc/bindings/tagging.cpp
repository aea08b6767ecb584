#include "bindings/tagging.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include "allocator/locked_allocator.h"
#include "dispatch/locked_dispatch.h"

namespace locked_tensor {

namespace {

PyTypeObject* type_of_ours = nullptr;

at::Tensor alias_of(const at::Tensor& tensor) {
  c10::impl::ExcludeDispatchKeyGuard no_mode_sees_it(c10::python_ks);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::VariableVersion version =
      impl->is_inference() ? c10::VariableVersion() : impl->version_counter();
  return at::Tensor(impl->shallow_copy_and_detach(version, true));
}

}  // namespace

PyTypeObject* locked_tensor_type() {
  return type_of_ours;
}

void set_locked_tensor_type(PyTypeObject* type) {
  Py_XINCREF(type);
  Py_XSETREF(type_of_ours, type);
}

PyObject* wrap_plain(at::Tensor&& tensor) {
  return THPVariable_Wrap(std::move(tensor));
}

PyObject* wrap_tagged(at::Tensor&& tensor) {
  if (!tensor.defined()) {
    return wrap_plain(std::move(tensor));
  }
  PyObject* known = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  const bool is_plain = known == nullptr || Py_TYPE(known) == (PyTypeObject*)THPVariableClass;
  if (!is_plain || !is_locked(tensor)) {
    return wrap_plain(std::move(tensor));
  }
  return wrap_locked(is_ours_alone(tensor) ? std::move(tensor) : alias_of(tensor));
}

bool is_ours_alone(const at::Tensor& tensor) {
  return tensor.use_count() == 1 &&
         tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr;
}

PyObject* wrap_locked(at::Tensor&& tensor) {
  keep_locked(tensor.storage().unsafeGetStorageImpl());
  tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  return THPVariable_Wrap(tensor, type_of_ours);
}

}  // namespace locked_tensor
