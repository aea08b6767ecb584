// After fork the child is a stranger: one place where every floor says what that means for it.
#pragma once

#include <cstdint>
#include <functional>

namespace locked_tensor {

// Run around every fork(2) of this process (pthread_atfork): `before` in reverse order of
// registration, the other two in order. Hooks are never removed: register once per process.
// They must not allocate through our arena and must not run Python.
struct ForkHooks {
  std::function<void()> before;
  std::function<void()> in_parent;
  std::function<void()> in_child;
};
void add_fork_hooks(ForkHooks hooks);

// Grows by one in every forked child. Kept by what must not be used in a child (handles, rings).
uint64_t fork_generation();

}  // namespace locked_tensor
