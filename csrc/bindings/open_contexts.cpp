#include "bindings/open_contexts.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "bindings/tagging_mode.h"

namespace locked_tensor {

namespace py = pybind11;

namespace {

struct OpenContext;
using Shared = std::shared_ptr<OpenContext>;

struct OpenContext {
  uint64_t owner = 0;
  uint64_t thread = 0;
  AllocationMode mode;
  std::atomic<uint64_t> fall_backs{0};
  Shared outer;
  bool is_open = true;
  bool has_pushed_mode = false;

  OpenContext() = default;
  OpenContext(const OpenContext&) = delete;
  ~OpenContext() {
    // One after the other: the depth of contexts is nobody's limit.
    for (Shared next = std::move(outer); next != nullptr && next.use_count() == 1;) {
      next = Shared(std::move(next->outer));
    }
  }
};

struct Thread {
  const uint64_t id = [] {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }();
  std::vector<Shared> open;  // in the order of entering
  // The variable's value when it was last looked at, and the count of changes then.
  PyObject* seen = nullptr;
  uint64_t seen_changes = 0;
};
thread_local Thread thread;

PyObject* innermost_variable = nullptr;
// Of any thread's contexts: a value that was seen may mean another context since.
uint64_t changes = 0;

// The variable's value in this logical context, borrowed from it; nullptr where it has none.
PyObject* innermost_value() {
  PyObject* value = nullptr;
  if (PyContextVar_Get(innermost_variable, nullptr, &value) < 0) {
    throw py::error_already_set();
  }
  Py_XDECREF(value);
  return value;
}

// This one, or the next around it that is open on this thread.
Shared open_one(Shared context) {
  while (context != nullptr && !(context->is_open && context->thread == thread.id)) {
    context = Shared(context->outer);
  }
  return context;
}

Shared context_in(PyObject* value) {
  if (value == nullptr || value == Py_None) {
    return nullptr;
  }
  return *static_cast<Shared*>(PyCapsule_GetPointer(value, nullptr));
}

void set_innermost(Shared context) {
  py::object value = py::none();
  if (context != nullptr) {
    value = py::capsule(new Shared(std::move(context)),
                        [](void* held) { delete static_cast<Shared*>(held); });
  }
  PyObject* token = PyContextVar_Set(innermost_variable, value.ptr());
  if (token == nullptr) {
    throw py::error_already_set();
  }
  Py_DECREF(token);
}

void follow_if_possible() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    follow_logical_context();
  }
}

Shared find_open(uint64_t owner) {
  Shared here = open_one(context_in(innermost_value()));
  while (here != nullptr && here->owner != owner) {
    here = open_one(here->outer);
  }
  if (here != nullptr) {
    return here;
  }
  const auto place = std::find_if(thread.open.rbegin(), thread.open.rend(),
                                  [owner](const Shared& each) { return each->owner == owner; });
  return place == thread.open.rend() ? nullptr : *place;
}

// Takes it off the thread, and the mode off the stack unless one that was entered later needs it.
void close(const Shared& context) {
  context->is_open = false;
  ++changes;
  const auto place = std::find(thread.open.rbegin(), thread.open.rend(), context).base() - 1;
  const auto later = thread.open.erase(place);
  if (context->has_pushed_mode) {
    const auto heir = std::find_if(later, thread.open.end(),
                                   [](const Shared& each) { return !each->has_pushed_mode; });
    if (heir != thread.open.end()) {
      (*heir)->has_pushed_mode = true;
    } else {
      remove_tagging_mode();
    }
  }
  if (thread.open.empty()) {
    ask_for_mode(false);
    while (remove_tagging_mode()) {
      // torch had put one of them aside when its context was left
    }
  }
}

// Has the variable, and what it leads to, forget a context that is closed.
void forget(const Shared& closed) {
  const Shared known = context_in(innermost_value());
  const Shared innermost = open_one(known);
  if (known != innermost) {
    set_innermost(innermost);
  }
  if (known == closed) {
    return;  // left in order: none is around those that are open
  }
  for (Shared each = innermost; each != nullptr; each = each->outer) {
    each->outer = open_one(each->outer);
  }
}

}  // namespace

void set_up_contexts() {
  innermost_variable = PyContextVar_New("locked_tensor.innermost_context", nullptr);
  if (innermost_variable == nullptr) {
    throw py::error_already_set();
  }
  set_mode_hook(follow_if_possible);
}

void enter_context(uint64_t owner, const AllocationMode& mode) {
  auto context = std::make_shared<OpenContext>();
  context->owner = owner;
  context->thread = thread.id;
  context->mode = mode;
  context->mode.fall_backs = &context->fall_backs;
  context->outer = open_one(context_in(innermost_value()));
  thread.open.push_back(context);
  try {
    set_innermost(context);
  } catch (...) {
    thread.open.pop_back();
    throw;
  }
  ++changes;
  if (!is_tagging_mode_on()) {
    push_tagging_mode();
    context->has_pushed_mode = true;
  }
  ask_for_mode(true);
  follow_logical_context();
}

Left leave_context(uint64_t owner) {
  const Shared context = find_open(owner);
  if (context == nullptr) {
    return {};
  }
  close(context);
  forget(context);
  follow_logical_context();
  return {true, context->fall_backs};
}

void follow_logical_context() {
  PyObject* value = innermost_value();
  if (value == thread.seen && changes == thread.seen_changes) {
    return;
  }
  const Shared context = open_one(context_in(value));
  set_allocation_mode(context == nullptr ? AllocationMode{} : context->mode);
  thread.seen = value;
  thread.seen_changes = changes;
}

}  // namespace locked_tensor
