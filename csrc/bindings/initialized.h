// InitializedCaster: Python objects as C++ sees them, refused where nothing was constructed in
// them.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace locked_tensor {

// `Class.__new__(Class)` makes an object whose __init__ has not run, and pybind11 would give raw
// memory for it. A class bound with this caster (a specialization of pybind11::detail::type_caster)
// raises TypeError instead.
template <typename T>
class InitializedCaster : public pybind11::detail::type_caster_base<T> {
 public:
  bool load(pybind11::handle source, bool convert) {
    using Base = pybind11::detail::type_caster_base<T>;
    if (source.is_none() || !Base::load(source, convert)) {
      return false;
    }
    auto* instance = reinterpret_cast<pybind11::detail::instance*>(source.ptr());
    if (!instance->get_value_and_holder().holder_constructed()) {
      throw pybind11::type_error("this " + std::string(Py_TYPE(source.ptr())->tp_name) +
                                 " was never initialized: its __init__() has not run");
    }
    return true;
  }
};

}  // namespace locked_tensor
