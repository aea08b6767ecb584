// Which locked_memory() contexts are open, and which of them decides what is allocated now.
//
// Note [Logical contexts] A context belongs to the thread and to the logical context (contextvars:
// an asyncio task, a Context.run) that entered it. A context variable holds the innermost one; each
// knows the one around it; whatever is closed is passed over, so they may be left in any order. A
// task that is made inside one has it too, while it is open. Generators share their caller's
// logical context.
//
// torch's allocator and its stack of modes know threads only. So while a thread has any context
// open, the tagging mode is on its stack, once, and asks which context decides, before each
// operator; the allocator asks before each allocation, if the thread has the GIL. Without the GIL
// what was found last holds: no Python has run since the operator began. Where no context decides,
// the mode calls the operator as if it were not there.
#pragma once

#include <cstdint>

#include "allocator/allocator_switch.h"

namespace locked_tensor {

// All with the GIL.

// Makes the context variable. Once, before all others. Throws py::error_already_set.
void set_up_contexts();

// Enters a context. `owner` tells the objects apart that are entered, and may be entered again.
void enter_context(uint64_t owner, const AllocationMode& mode);

struct Left {
  bool is_left = false;     // false: this thread has none of this owner open, and nothing happened
  uint64_t fall_backs = 0;  // allocations inside that fell back to ordinary memory
};
// Leaves the one of the owner's that was entered last in this logical context; else on this thread.
Left leave_context(uint64_t owner);

// Sets this thread's allocation mode to what holds in this logical context.
void follow_logical_context();

}  // namespace locked_tensor
