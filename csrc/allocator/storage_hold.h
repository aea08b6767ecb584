// StorageHold: a reference on the bytes of a storage, whatever happens to the storage meanwhile.
#pragma once

#include <c10/core/Storage.h>

#include <functional>
#include <utility>

#include "memory/locked_arena.h"

namespace locked_tensor {

// Note [Owned data] resize_, untyped_storage().resize_(0) and share_memory_ free a storage's bytes
// under a live tensor. Locked blocks count references themselves; other storages get their DataPtr
// wrapped, once, in a counted owner, which also carries what is to happen when the bytes die.
// Storages in shared memory are left as they are (torch knows them by their deleter) and held as a
// whole.
class OwnedData;

// Move-only. While it lives, the storage's present bytes stay where they are.
class StorageHold {
 public:
  StorageHold() = default;
  StorageHold(StorageHold&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)),
        owned_(std::exchange(other.owned_, nullptr)),
        storage_(std::move(other.storage_)),
        is_foreign_(other.is_foreign_) {}
  StorageHold& operator=(StorageHold&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(owned_, other.owned_);
    std::swap(storage_, other.storage_);
    std::swap(is_foreign_, other.is_foreign_);
    return *this;
  }
  ~StorageHold();

  // May dropping it run Python code? Then only a thread with the GIL may.
  bool needs_python() const { return block_ == nullptr; }

  // Was the memory not made by an allocator of torch's or ours, but mapped or lent by others? It
  // may be of a file, or not writable.
  bool is_foreign() const { return is_foreign_; }

 private:
  friend StorageHold hold_storage(const c10::Storage& storage);

  Block* block_ = nullptr;
  OwnedData* owned_ = nullptr;
  c10::Storage storage_;
  bool is_foreign_ = false;
};

StorageHold hold_storage(const c10::Storage& storage);

// Has `at_death` run when the storage's present bytes die, before they are freed. With the GIL.
// False (and nothing done) where that would make torch forget that the storage is shared memory;
// `is_mapped_shared` tells that from a private map of a file, for which torch has the same deleter.
bool when_bytes_die(const c10::Storage& storage, bool is_mapped_shared,
                    std::function<void()> at_death);

}  // namespace locked_tensor
