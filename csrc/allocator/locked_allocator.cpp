#include "allocator/locked_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <mutex>
#include <vector>

namespace locked_tensor {

namespace {

LockFailureHook lock_failure_hook = nullptr;

void release_locked(void* data) {
  give_back_locked(data);
}

class LockedAllocator : public c10::Allocator {
 public:
  explicit LockedAllocator(const PageOptions& options) : options_(options) {}

  c10::DataPtr allocate(size_t nbytes) override { return allocate_locked(nbytes, options_); }
  c10::DeleterFnPtr raw_deleter() const override { return &release_locked; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
  const PageOptions& options() const { return options_; }

 private:
  const PageOptions options_;
};

}  // namespace

c10::Allocator* locked_allocator(const PageOptions& options) {
  // Leaked: storages remember them until the process ends. A handful of kinds at most.
  static std::mutex* mutex = new std::mutex;
  static auto* allocators = new std::vector<LockedAllocator*>;
  std::lock_guard<std::mutex> lock(*mutex);
  for (LockedAllocator* allocator : *allocators) {
    if (allocator->options() == options) {
      return allocator;
    }
  }
  allocators->push_back(new LockedAllocator(options));
  return allocators->back();
}

bool is_locked_allocator(const c10::Allocator* allocator) {
  return allocator != nullptr && allocator->raw_deleter() == &release_locked;
}

c10::DataPtr allocate_locked(size_t nbytes, const PageOptions& options) {
  try {
    return locked_data(nbytes, options);
  } catch (const LockRefused& refused) {
    if (lock_failure_hook != nullptr) {
      lock_failure_hook(refused);
    }
    throw;
  }
}

c10::DataPtr locked_data(size_t nbytes, const PageOptions& options) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (nbytes == 0) {
    return c10::DataPtr(nullptr, cpu);
  }
  Block* block = LockedArena::process().allocate(nbytes, options);
  c10::profiledCPUMemoryReporter().New(block->data, nbytes);
  return c10::DataPtr(block->data, block->data, &release_locked, cpu);
}

bool give_back_locked(void* data) {
  Block* block = LockedArena::process().find(data);
  if (block == nullptr) {
    return false;
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  LockedArena::release(block);
  return true;
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release_locked ? LockedArena::process().find(data.get()) : nullptr;
}

void keep_locked(c10::StorageImpl* storage) {
  if (is_locked_allocator(storage->allocator())) {
    return;
  }
  if (Block* block = block_of(storage->_mutable_data_ptr_no_checks())) {
    storage->set_allocator(locked_allocator(block->pages));
  }
}

void set_lock_failure_hook(LockFailureHook hook) {
  lock_failure_hook = hook;
}

}  // namespace locked_tensor
