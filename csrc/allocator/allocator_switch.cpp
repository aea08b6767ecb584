#include "allocator/allocator_switch.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <stdexcept>

#include "allocator/locked_allocator.h"

namespace locked_tensor {

namespace {

thread_local AllocationMode mode;
thread_local bool is_mode_asked = false;
ModeHook mode_hook = nullptr;
std::atomic<uint64_t> fall_backs{0};

// Of the allocator that the switch was put in front of.
c10::DeleterFnPtr previous_deleter = nullptr;

// Note [Raw allocations]
void release_any(void* data) {
  if (!give_back_locked(data) && previous_deleter != nullptr) {
    previous_deleter(data);
  }
}

class AllocatorSwitch : public c10::Allocator {
 public:
  explicit AllocatorSwitch(c10::Allocator* previous) : previous_(previous) {}

  c10::DataPtr allocate(size_t nbytes) override {
    if (is_mode_asked) {
      mode_hook();
    }
    if (!mode.is_locked) {
      return previous_->allocate(nbytes);
    }
    if (!mode.falls_back) {
      return allocate_locked(nbytes, mode.pages);
    }
    try {
      return locked_data(nbytes, mode.pages);
    } catch (const LockRefused&) {
      ++fall_backs;
      if (mode.fall_backs != nullptr) {
        ++*mode.fall_backs;
      }
      return previous_->allocate(nbytes);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_any; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    previous_->copy_data(to, from, count);
  }

 private:
  c10::Allocator* previous_;
};

// Leaked: c10 wants static lifetime, and storages remember it.
AllocatorSwitch* installed = nullptr;
std::mutex install_mutex;

}  // namespace

void install_allocator_switch() {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (installed == nullptr) {
    previous_deleter = c10::GetCPUAllocator()->raw_deleter();
    installed = new AllocatorSwitch(c10::GetCPUAllocator());
    c10::SetCPUAllocator(installed);
  }
  if (c10::GetCPUAllocator() != installed) {
    throw std::runtime_error(
        "another library has replaced torch's CPU allocator, so locked_memory() cannot lock what "
        "is allocated; enter locked_memory() once after that library is loaded, or keep it from "
        "calling c10::SetCPUAllocator");
  }
}

bool is_allocator_switch_installed() {
  std::lock_guard<std::mutex> lock(install_mutex);
  return installed != nullptr && c10::GetCPUAllocator() == installed;
}

void set_allocation_mode(const AllocationMode& next) {
  mode = next;
}

void set_mode_hook(ModeHook hook) {
  mode_hook = hook;
}

void ask_for_mode(bool is_asked) {
  is_mode_asked = is_asked;
}

bool allocates_locked() {
  return mode.is_locked;
}

uint64_t fall_back_count() {
  return fall_backs.load();
}

}  // namespace locked_tensor
