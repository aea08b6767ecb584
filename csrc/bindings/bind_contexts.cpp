// The contexts' half of _C: what locked_memory is made of.
#include <torch/extension.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "bindings/given.h"
#include "bindings/open_contexts.h"
#include "bindings/tagging_mode.h"
#include "os/locked_pages.h"

namespace locked_tensor {

namespace py = pybind11;

namespace {

HugePages huge_pages_of(const std::string& name) {
  if (name == "auto") {
    return HugePages::kAuto;
  }
  if (name == "2M") {
    return HugePages::k2M;
  }
  if (name == "off") {
    return HugePages::kOff;
  }
  throw py::value_error("huge_pages must be \"auto\", \"2M\" or \"off\", got \"" + name + "\"");
}

// contexts.py's: done before the first context of the process is entered.
PyObject* prepare_in_python = nullptr;

class LockedContext {
 public:
  LockedContext(const std::string& huge_pages, const GivenWhole& numa_node, bool falls_back) {
    mode_.is_locked = true;
    mode_.falls_back = falls_back;
    mode_.pages.huge_pages = huge_pages_of(huge_pages);
    if (!numa_node.is_none()) {
      const int64_t node = whole_of("numa_node", numa_node);
      check_numa_node(node);
      mode_.pages.numa_node = static_cast<int>(node);
    }
  }

  void enter() {
    install_allocator_switch();
    if (prepare_in_python != nullptr) {
      py::handle prepare = prepare_in_python;
      prepare();
      Py_CLEAR(prepare_in_python);
    }
    enter_context(id_, mode_);
    ++times_entered_;
  }

  // How many allocations inside fell back.
  uint64_t leave() {
    const Left left = leave_context(id_);
    if (left.is_left) {
      --times_entered_;
      return left.fall_backs;
    }
    throw std::runtime_error(times_entered_ > 0
                                 ? "this locked_memory() was entered on another thread; only that "
                                   "thread can leave it"
                                 : "this locked_memory() is left without having been entered");
  }

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  const uint64_t id_ = next_id();
  AllocationMode mode_;
  uint64_t times_entered_ = 0;  // and not left yet, by all threads; with the GIL
};

// In C++, so that no signal's exception comes between what is changed and the with statement.
void exit_context(const py::object& self, const py::object&, const py::object&, const py::object&) {
  const uint64_t fall_backs = self.cast<LockedContext&>().leave();
  self.attr("_has_left")(fall_backs);
}

}  // namespace

void bind_contexts(py::module_& module) {
  set_up_contexts();
  py::class_<LockedContext>(module, "LockedContextBase")
      .def(py::init<const std::string&, const GivenWhole&, bool>(), py::arg("huge_pages"),
           py::arg("numa_node"), py::arg("falls_back"))
      .def("__enter__", &LockedContext::enter, "From here on what is allocated is locked.")
      .def("__exit__", &exit_context, py::arg("error_type").none(true), py::arg("error").none(true),
           py::arg("traceback").none(true), "What is allocated is again as it was.");
  module.def("set_up_contexts", [](const py::object& tagging_mode, const py::function& prepare) {
    set_tagging_mode(tagging_mode.ptr());
    Py_XSETREF(prepare_in_python, prepare.inc_ref().ptr());
  });
}

}  // namespace locked_tensor
