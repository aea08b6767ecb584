// LockedAllocator: torch's way to the arena. The first floor that knows c10.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include "memory/locked_arena.h"

namespace locked_tensor {

// The allocator whose every block is locked, in pages of this kind. A storage that is to stay
// locked when it is resized remembers it. Throws what the lock-failure hook throws, else
// LockRefused.
c10::Allocator* locked_allocator(const PageOptions& options);

// Is it one of these?
bool is_locked_allocator(const c10::Allocator* allocator);

// A locked block of `nbytes` (0: a null DataPtr). Its deleter gives the block back to the arena,
// whatever allocator is current then. Throws LockRefused.
//
// Note [Raw allocations] Parts of torch (oneDNN's scratch memory) take memory by
// c10::Allocator::raw_allocate, which insists that a DataPtr's context is its data, and give it
// back by raw_deleter, perhaps outside the mode that it was taken in. So the context is the data,
// blocks are found by address, and the switch's raw deleter takes whatever the switch has given.
c10::DataPtr locked_data(size_t nbytes, const PageOptions& options);
// The same; throws what the lock-failure hook throws.
c10::DataPtr allocate_locked(size_t nbytes, const PageOptions& options);

// Gives back what locked_data gave. False, and nothing done, for memory that is no live block of
// this process: another allocator's, or a block that a forked child inherited, which is only
// forgotten.
bool give_back_locked(void* data);

// The block behind such a DataPtr, not retained; else nullptr.
Block* block_of(const c10::DataPtr& data);

// Has a storage that was allocated locked stay so when it is resized, wherever that happens. Others
// are left as they are.
void keep_locked(c10::StorageImpl* storage);

// Called when memory cannot be locked; may throw something that c10 lets through unchanged.
// Installed once, by bindings.
using LockFailureHook = void (*)(const LockRefused&);
void set_lock_failure_hook(LockFailureHook hook);

}  // namespace locked_tensor
