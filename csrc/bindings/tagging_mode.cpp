#include "bindings/tagging_mode.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include <memory>
#include <vector>

namespace locked_tensor {

namespace {

using c10::impl::TorchDispatchModeTLS;
using Mode = c10::impl::PyObject_TorchDispatchMode;

PyObject* tagging_mode = nullptr;

// The place of its topmost entry; -1 where there is none.
int64_t place_of_tagging_mode() {
  int64_t place = TorchDispatchModeTLS::stack_len() - 1;
  while (place >= 0 &&
         TorchDispatchModeTLS::get_stack_at(place)->ptr(getPyInterpreter()) != tagging_mode) {
    --place;
  }
  return place;
}

// Modes that torch keeps in places of their own, beneath the others.
int64_t infra_modes() {
  int64_t count = 0;
  for (int key = 0; key < static_cast<int>(c10::impl::TorchDispatchModeKey::NUM_MODE_KEYS); ++key) {
    count += TorchDispatchModeTLS::get_mode(static_cast<c10::impl::TorchDispatchModeKey>(key))
                     .has_value()
                 ? 1
                 : 0;
  }
  return count;
}

// While it lives, the modes above the first `remaining` are off the stack.
class AsidePut {
 public:
  explicit AsidePut(int64_t remaining) {
    while (TorchDispatchModeTLS::stack_len() > remaining) {
      modes_.push_back(TorchDispatchModeTLS::pop_stack());
    }
  }
  AsidePut(const AsidePut&) = delete;
  ~AsidePut() {
    for (; !modes_.empty(); modes_.pop_back()) {
      TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(modes_.back()));
    }
  }

 private:
  std::vector<std::shared_ptr<Mode>> modes_;
};

}  // namespace

void set_tagging_mode(PyObject* mode) {
  Py_XINCREF(mode);
  Py_XSETREF(tagging_mode, mode);
}

bool is_tagging_mode_on() {
  return place_of_tagging_mode() >= 0;
}

void push_tagging_mode() {
  // Not through TorchDispatchMode.__enter__: it keeps a stack of flags that only leaving in order
  // puts back.
  const AsidePut others(infra_modes());
  Py_INCREF(tagging_mode);
  TorchDispatchModeTLS::push_non_infra_mode_onto_stack(
      std::make_shared<Mode>(tagging_mode, getPyInterpreter()));
}

bool remove_tagging_mode() {
  const int64_t place = place_of_tagging_mode();
  if (place < 0) {
    return false;
  }
  const AsidePut above(place + 1);
  TorchDispatchModeTLS::pop_stack();
  return true;
}

}  // namespace locked_tensor
