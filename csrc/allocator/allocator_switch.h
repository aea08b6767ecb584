// The allocator switch: torch's one CPU allocator, locked on threads that ask for it.
#pragma once

#include <atomic>
#include <cstdint>

#include "os/locked_pages.h"

namespace locked_tensor {

// What this thread's allocations are.
struct AllocationMode {
  bool is_locked = false;
  bool falls_back = false;  // ordinary memory when the lock is refused
  PageOptions pages;
  std::atomic<uint64_t>* fall_backs = nullptr;  // counts them too, if it is there
};

// Puts the switch in front of the CPU allocator that is there, once. Afterwards outside of locked
// modes an allocation costs one thread-local look more. Throws std::runtime_error when another
// allocator stands where ours was put.
void install_allocator_switch();
bool is_allocator_switch_installed();

// This thread's mode.
void set_allocation_mode(const AllocationMode& mode);
// A thread whose mode depends on more than the thread has the hook run before each allocation, to
// set the mode that holds now. The hook is installed once, by bindings, and must not allocate.
using ModeHook = void (*)();
void set_mode_hook(ModeHook hook);
void ask_for_mode(bool is_asked);
// May what this thread allocates now be locked?
bool allocates_locked();

// How often an allocation of this process fell back to ordinary memory.
uint64_t fall_back_count();

}  // namespace locked_tensor
