#include "allocator/storage_hold.h"

#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <libshm.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "memory/range_registry.h"

namespace locked_tensor {

class OwnedData {
 public:
  explicit OwnedData(c10::DataPtr original) : original_(std::move(original)) {}

  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }

  static void release(void* context) {
    auto* owned = static_cast<OwnedData*>(context);
    if (owned->references_.fetch_sub(1, std::memory_order_acq_rel) > 1) {
      return;
    }
    for (const std::function<void()>& each : owned->at_death_) {
      each();
    }
    delete owned;  // and with it the original, by its own deleter
  }

  void add(std::function<void()> at_death) {
    std::lock_guard<std::mutex> lock(mutex_);
    at_death_.push_back(std::move(at_death));
  }

  c10::DeleterFnPtr original_deleter() const { return original_.get_deleter(); }

  static OwnedData* of(const c10::DataPtr& data) {
    return data.get_deleter() == &release ? static_cast<OwnedData*>(data.get_context()) : nullptr;
  }

 private:
  c10::DataPtr original_;
  std::atomic<int> references_{1};
  std::mutex mutex_;
  std::vector<std::function<void()>> at_death_;
};

namespace {

// Does torch know the storage by its deleter?
bool must_keep_deleter(const c10::DataPtr& data) {
  return at::MapAllocator::fromDataPtr(data) != nullptr ||
         at::RefcountedMapAllocator::fromDataPtr(data) != nullptr ||
         THManagedMapAllocator::fromDataPtr(data) != nullptr;
}

bool is_allocated(const c10::Storage& storage, c10::DeleterFnPtr deleter) {
  static const c10::DeleterFnPtr ordinary = c10::GetDefaultCPUAllocator()->raw_deleter();
  const c10::Allocator* allocator = storage.allocator();
  return deleter == ordinary || (allocator != nullptr && deleter == allocator->raw_deleter());
}

// The owner of a storage's bytes, made on first use; nullptr where there can be none. With the GIL.
OwnedData* owned_data(const c10::Storage& storage, bool may_replace_map) {
  c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (OwnedData* owned = OwnedData::of(data)) {
    return owned;
  }
  if (data.get() == nullptr || (must_keep_deleter(data) && !may_replace_map)) {
    return nullptr;
  }
  void* bytes = data.get();
  const c10::Device device = data.device();
  auto* owned = new OwnedData(std::move(data));
  data = c10::DataPtr(bytes, owned, &OwnedData::release, device);
  return owned;
}

}  // namespace

StorageHold::~StorageHold() {
  if (block_ != nullptr) {
    LockedArena::release(block_);
  }
  if (owned_ != nullptr) {
    OwnedData::release(owned_);
  }
}

StorageHold hold_storage(const c10::Storage& storage) {
  StorageHold hold;
  // Copy-on-write bytes are shared with storages that may let go of them: have them copied now.
  const c10::DataPtr& data = storage.unsafeGetStorageImpl()->mutable_data_ptr();
  if (RangeRegistry::process().contains(data.get(), 1)) {
    hold.block_ =
        LockedArena::process().hold(data.get());  // whoever's storage it is: ours, dlpack's
  }
  if (hold.block_ != nullptr) {
    return hold;
  }
  if (OwnedData* owned = owned_data(storage, false)) {
    owned->retain();
    hold.owned_ = owned;
    hold.is_foreign_ = !is_allocated(storage, owned->original_deleter());
  } else {
    hold.storage_ = storage;
    hold.is_foreign_ = true;
  }
  return hold;
}

bool when_bytes_die(const c10::Storage& storage, bool is_mapped_shared,
                    std::function<void()> at_death) {
  OwnedData* owned = owned_data(storage, !is_mapped_shared);
  if (owned == nullptr) {
    return false;
  }
  owned->add(std::move(at_death));
  return true;
}

}  // namespace locked_tensor
