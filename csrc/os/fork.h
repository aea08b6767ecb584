// After fork the child is a stranger: one place where every floor says what that means for it.
//
// Note [Fork] What the kernel does at fork(2): locks (mlock) and io_uring requests stay the
// parent's; the child's copies of locked pages are ordinary, copy-on-write. Pages that a ring has
// registered are long-term held and would be copied whole into the child at once, and huge pages
// split in the parent: 1.8 s for 1 GiB, measured; so fixed buffers are cleared before. Requests in
// flight hold their pages, which are copied too. Descriptors and mappings of rings would keep the
// parent's registered pages: the child closes the ones and does not inherit the others. Threads do
// not exist in the child, and mutexes are as they were at the moment of the fork: what they guard
// is replaced or leaked there, never locked.
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
