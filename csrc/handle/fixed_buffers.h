// FixedBuffers: an engine's table of registered memory, kept in step with the range registry.
//
// Note [Fixed buffers] A registered buffer spares the kernel pinning and unpinning its pages at
// every request. Ranges are entered on first use, in slots of at most 1 GiB; whole huge pages get
// slots of their own, because one small page in a slot ends their coalescing. What is about to be
// unmapped is cleared first (a stale slot would keep its pages), and everything before a fork
// (registered pages would be copied into the child). A request that still names a cleared slot is
// refused with EFAULT and goes again unregistered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "io/engine.h"
#include "memory/range_registry.h"

namespace locked_tensor {

class FixedBuffers : public ReleaseListener {
 public:
  explicit FixedBuffers(Engine& engine);
  ~FixedBuffers() override;
  FixedBuffers(const FixedBuffers&) = delete;
  FixedBuffers& operator=(const FixedBuffers&) = delete;

  // Where memory is registered: `slot` (-1: nowhere) holds for `bytes` from the address on.
  struct Place {
    int32_t slot = -1;
    uint64_t bytes = UINT64_MAX;
  };
  // The place of locked memory, registered now if it was not. Thread-safe; the first use of a range
  // costs its registration.
  Place find(const std::byte* data);

  void on_release(uintptr_t begin, uintptr_t end) noexcept override;

  // Empties the table and holds it empty until after_fork, in the parent.
  void before_fork();
  void after_fork();

 private:
  struct Entry {
    uintptr_t end;
    int32_t slot;  // -1: the kernel refused it
  };

  Place enter(const Range& range, uintptr_t address);
  void clear(std::map<uintptr_t, Entry>::iterator place);

  Engine& engine_;
  std::mutex mutex_;
  std::map<uintptr_t, Entry> entries_;  // by begin
  std::vector<int32_t> free_slots_;
};

}  // namespace locked_tensor
