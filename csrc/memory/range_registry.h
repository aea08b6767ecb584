// RangeRegistry: the process's one answer to "is this whole byte span locked memory?".
//
// Entries are arena segments (or what is left of them) and lock_ ranges, byte-exact. Ranges that
// touch count as one span for contains(); ranges may overlap (two lock_ calls), and a byte is
// locked while at least one range covers it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace locked_tensor {

// One stretch of locked memory as the registry knows it now. `id` is never used twice, so
// that a table keyed by it (an io_uring fixed-buffer table) cannot mistake reused addresses.
struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  uint64_t id = 0;
  bool is_registrable = true;  // false: file maps, which io_uring refuses to register
};

// Told before locked memory is unlocked or unmapped. Called under no lock of the registry or the
// arena; may be called by any thread; must not throw; must not allocate locked memory.
class ReleaseListener {
 public:
  virtual ~ReleaseListener() = default;
  virtual void on_release(uintptr_t begin, uintptr_t end) noexcept = 0;
};

class RangeRegistry {
 public:
  // The process's registry. Leaked on purpose: tensors may outlive static destruction. A forked
  // child gets a fresh, empty one.
  static RangeRegistry& process();

  RangeRegistry();
  ~RangeRegistry();
  RangeRegistry(const RangeRegistry&) = delete;
  RangeRegistry& operator=(const RangeRegistry&) = delete;

  // Adds [begin, end). `is_registrable` as in Range. Thread-safe.
  void add(uintptr_t begin, uintptr_t end, bool is_registrable = true);
  // Takes back one earlier add of every byte of [begin, end): a segment may be removed piecewise.
  // When the memory is about to be unlocked or unmapped, call announce_release after this and
  // before that.
  void remove(uintptr_t begin, uintptr_t end);

  // Does every byte of [data, data + bytes) lie in live locked memory? bytes == 0 asks for the
  // position: true when data lies inside a range (or at the end of one). Lock-free for readers,
  // cost independent of the number of ranges. Never allocates.
  bool contains(const void* data, size_t bytes) const noexcept;

  // The range that holds `data`, or nullopt. Same manners as contains.
  std::optional<Range> find(const void* data) const noexcept;

  size_t range_count() const;
  uint64_t locked_bytes() const;  // bytes covered by at least one range

  void add_release_listener(ReleaseListener* listener);
  // Returns once no call to the listener is running.
  void remove_release_listener(ReleaseListener* listener);
  void announce_release(uintptr_t begin, uintptr_t end) noexcept;

 private:
  struct Impl;
  Impl* impl_;
};

}  // namespace locked_tensor
