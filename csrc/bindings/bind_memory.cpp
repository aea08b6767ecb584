// The memory half of _C: locks, claims, statistics.
#include <ATen/EmptyTensor.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <limits>

#include "allocator/allocator_switch.h"
#include "allocator/locked_allocator.h"
#include "allocator/storage_hold.h"
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "bindings/given.h"
#include "bindings/initialized.h"
#include "dispatch/locked_dispatch.h"
#include "memory/in_place_lock.h"
#include "memory/range_registry.h"
#include "os/mapping.h"

namespace locked_tensor {

namespace py = pybind11;

namespace {

// --- claims: new_cpu_locked_tensor and free_cpu_locked_tensor -----------------------------------

// Without elements it is an empty view of locked memory, as which it is locked, and can be given
// up.
at::Tensor new_claimed_tensor(const GivenWhole& num_elem, py::object dtype) {
  const int64_t count = whole_of("num_elem", num_elem);
  if (count < 0) {
    throw py::value_error("num_elem must not be negative, got " + std::to_string(count));
  }
  const auto scalar_type = torch::python::detail::py_object_to_dtype(std::move(dtype));
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(scalar_type));
  if (count > std::numeric_limits<int64_t>::max() / item_bytes) {
    throw py::value_error("num_elem is more than memory can have: " + std::to_string(count) +
                          " elements of " + std::to_string(item_bytes) + " bytes");
  }
  at::Tensor tensor;
  {
    py::gil_scoped_release no_gil;
    tensor = at::Tensor(at::detail::empty_generic(
        {std::max<int64_t>(count, 1)}, locked_allocator(PageOptions{}),
        c10::DispatchKeySet(c10::DispatchKey::CPU), scalar_type, std::nullopt));
  }
  if (count == 0) {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  }
  if (Block* block = block_of(tensor.storage().data_ptr())) {
    block->is_claimed = true;
  }
  return tensor;
}

bool free_claimed_tensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) {
    return false;
  }
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  Block* block = block_of(storage->_mutable_data_ptr_no_checks());
  if (block == nullptr || !block->is_claimed.exchange(false)) {
    return false;
  }
  // The caller's own reference apart, does anything else see the bytes: another tensor or storage
  // object (use count of the storage), an export (use count of the tensor)? What is in flight holds
  // the block.
  const bool is_alone = tensor.storage().use_count() == 1 && tensor.use_count() <= 2;
  if (is_alone) {
    tensor.unsafeGetTensorImpl()->set_storage_and_dtype(
        c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, at::kCPU),
                     locked_allocator(PageOptions{}), true),
        tensor.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  }
  return true;
}

// The same for who kept only the address that a claimed tensor begins at. Nothing is freed here: a
// live tensor keeps the block, so an address that was used again loses no more than its claim.
bool free_claimed_at(uintptr_t address) {
  LockedArena& arena = LockedArena::process();
  Block* block = arena.hold(reinterpret_cast<const void*>(address));
  if (block == nullptr) {
    return false;
  }
  const bool is_its_begin = reinterpret_cast<uintptr_t>(block->data) == address;
  const bool was_claimed = is_its_begin && block->is_claimed.exchange(false);
  LockedArena::release(block);
  return was_claimed;
}

// --- in place -----------------------------------------------------------------------------------

bool is_strided(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested();
}

std::string describe(const at::Tensor& tensor) {
  return "device " + tensor.device().str() + ", layout " + c10::str(tensor.layout()) +
         (tensor.is_nested() ? ", nested" : "");
}

// A FakeTensor says that it is somewhere else than its storage is; a functorch wrapper has none.
bool has_own_storage(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().device_type() == tensor.device().type();
}

// Of lock: may be anywhere, with bytes or none.
void check_copyable(const at::Tensor& tensor) {
  if (!is_strided(tensor)) {
    throw py::type_error("lock() copies strided tensors (to_dense() makes one), got " +
                         describe(tensor));
  }
  if (!has_own_storage(tensor) || tensor.device().is_meta()) {
    throw py::type_error(
        "lock() copies a tensor's bytes, and this one has none (fake, meta or a "
        "wrapper?), got " +
        describe(tensor));
  }
}

struct StorageSpan {
  void* data;
  size_t bytes;
};

StorageSpan storage_span(const at::Tensor& tensor) {
  if (!is_strided(tensor) || !tensor.device().is_cpu()) {
    throw py::value_error("only a strided CPU tensor's storage can be locked, got " +
                          describe(tensor));
  }
  if (!has_own_storage(tensor)) {
    throw py::type_error(
        "only a tensor with bytes of its own can be locked, not a fake or a "
        "wrapper, got " +
        describe(tensor));
  }
  const c10::Storage& storage = tensor.storage();
  void* data = storage.mutable_data();
  if (data == nullptr || storage.nbytes() == 0) {
    throw py::value_error("the tensor has no bytes to lock");
  }
  return {data, storage.nbytes()};
}

// The block that was allocated locked and holds the storage; nullptr where it is no such storage.
Block* block_around(const StorageSpan& span) {
  Block* block = LockedArena::process().find(span.data);
  if (block == nullptr) {
    return nullptr;
  }
  const std::byte* end = static_cast<const std::byte*>(span.data) + span.bytes;
  if (end > block->data + block->size_bytes) {
    throw py::value_error(
        "the storage begins in memory that was allocated locked and ends outside of it");
  }
  return block;
}

void lock_storage(const at::Tensor& tensor) {
  const StorageSpan span = storage_span(tensor);
  if (Block* block = block_around(span)) {
    ++block->in_place_locks;
    return;
  }
  const Mapping mapping = mapping_of(span.data);
  auto was_locked = std::make_shared<std::atomic<bool>>(false);
  const bool is_watched = when_bytes_die(tensor.storage(), mapping.is_shared, [span, was_locked] {
    if (!was_locked->load()) {
      return;  // the lock was refused
    }
    try {
      unlock_in_place(span.data, span.bytes);
    } catch (const std::invalid_argument&) {
      // unlock_ was faster
    }
  });
  if (!is_watched) {
    throw py::value_error(
        "a tensor in shared memory cannot be locked in place: torch would no longer know that it "
        "is shared; lock() makes a locked copy");
  }
  py::gil_scoped_release no_gil;
  lock_in_place(span.data, span.bytes, !mapping.is_file);
  *was_locked = true;
}

void unlock_storage(const at::Tensor& tensor) {
  const StorageSpan span = storage_span(tensor);
  if (Block* block = block_around(span)) {
    uint32_t locks = block->in_place_locks;
    while (locks > 0 && !block->in_place_locks.compare_exchange_weak(locks, locks - 1)) {
    }
    if (locks == 0) {
      throw py::value_error(
          "unlock_() undoes a lock_(), and there is none: this memory was allocated locked and "
          "stays so");
    }
    return;
  }
  py::gil_scoped_release no_gil;
  unlock_in_place(span.data, span.bytes);
}

// --- statistics ---------------------------------------------------------------------------------

py::dict arena_stats() {
  const ArenaStats stats = LockedArena::process().stats();
  py::dict result;
  result["allocated_bytes.all.current"] = stats.allocated_bytes;
  result["allocated_bytes.all.peak"] = stats.peak_allocated_bytes;
  result["reserved_bytes.all.current"] = stats.reserved_bytes;
  result["reserved_bytes.all.peak"] = stats.peak_reserved_bytes;
  result["cached_bytes.current"] = stats.cached_bytes;
  result["cached_bytes.limit"] = LockedArena::process().cache_limit();
  result["huge_page_bytes.current"] = stats.huge_page_bytes;
  result["active.all.current"] = stats.live_blocks;
  result["active.all.allocated"] = stats.allocations;
  result["active.all.freed"] = stats.frees;
  result["num_cache_hits"] = stats.cache_hits;
  result["segment.all.current"] = stats.segments;
  result["segment.all.allocated"] = stats.segments_mapped;
  result["segment.all.freed"] = stats.segments_unmapped;
  result["num_alloc_retries"] = stats.lock_failures;
  result["num_fall_backs"] = fall_back_count();
  result["ranges.current"] = RangeRegistry::process().range_count();
  result["ranges.bytes"] = RangeRegistry::process().locked_bytes();
  return result;
}

}  // namespace

void bind_memory(py::module_& module) {
  register_errors();
  module.def("is_switch_installed", &is_allocator_switch_installed);
  module.def("new_claimed_tensor", &new_claimed_tensor, py::arg("num_elem"), py::arg("dtype"));
  module.def("free_claimed_tensor", &free_claimed_tensor);
  module.def("free_claimed_at", &free_claimed_at, py::arg("address"));
  module.def("check_copyable", &check_copyable);
  module.def("lock_storage", &lock_storage);
  module.def("unlock_storage", &unlock_storage);
  module.def("memory_stats", &arena_stats);
  module.def("memory_reserved", [] { return LockedArena::process().reserved_bytes(); });
  module.def("reset_peak_memory_stats", [] { LockedArena::process().reset_peak_stats(); });
  module.def(
      "empty_cache", [] { LockedArena::process().empty_cache(); },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "set_cache_limit", [](uint64_t bytes) { LockedArena::process().set_cache_limit(bytes); },
      py::call_guard<py::gil_scoped_release>());
  module.def("memlock_limit", [] {
    const MemlockLimit limit = memlock_limit();
    return py::make_tuple(limit.soft, limit.hard, limit.locked);
  });
}

}  // namespace locked_tensor
