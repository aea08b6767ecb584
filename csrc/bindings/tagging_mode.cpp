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
  Py_INCREF(tagging_mode);
  TorchDispatchModeTLS::push_non_infra_mode_onto_stack(
      std::make_shared<Mode>(tagging_mode, getPyInterpreter()));
}

bool remove_tagging_mode() {
  const int64_t place = place_of_tagging_mode();
  if (place < 0) {
    return false;
  }
  std::vector<std::shared_ptr<Mode>> above;
  while (TorchDispatchModeTLS::stack_len() > place + 1) {
    above.push_back(TorchDispatchModeTLS::pop_stack());
  }
  TorchDispatchModeTLS::pop_stack();
  for (; !above.empty(); above.pop_back()) {
    TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(above.back()));
  }
  return true;
}

}  // namespace locked_tensor
