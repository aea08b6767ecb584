// LockedArena: where locked blocks come from: segments, reuse, the cache limit, statistics.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "os/locked_pages.h"

namespace locked_tensor {

class LockedArena;

// A live block, owned by counted references (retain, release).
struct Block {
  LockedArena* owner;
  std::byte* data;
  size_t size_bytes;  // as asked
  PageOptions pages;
  // A handle's claim, by new_cpu_locked_tensor, that free_cpu_locked_tensor has not given up yet.
  std::atomic<bool> is_claimed{false};
  // lock_ calls that unlock_ has not undone. They change nothing: the block is locked anyway.
  std::atomic<uint32_t> in_place_locks{0};
};

struct ArenaStats {
  uint64_t allocated_bytes = 0;  // in live blocks, as asked
  uint64_t reserved_bytes = 0;   // mapped and locked: live, cached and slack
  uint64_t cached_bytes = 0;     // free and kept for reuse
  uint64_t peak_allocated_bytes = 0;
  uint64_t peak_reserved_bytes = 0;
  uint64_t allocations = 0;  // since the start
  uint64_t frees = 0;
  uint64_t cache_hits = 0;
  uint64_t segments_mapped = 0;  // since the start
  uint64_t segments_unmapped = 0;
  uint64_t live_blocks = 0;
  uint64_t segments = 0;         // mapped now
  uint64_t huge_page_bytes = 0;  // of reserved, in segments that ask for huge pages
  uint64_t lock_failures = 0;
};

// Keeps blocks to use them again, and can do without those that are idle.
class BlockKeeper {
 public:
  virtual ~BlockKeeper() = default;
  // Releases the blocks that nothing uses now. Called by any thread, under no lock of the arena but
  // that of its keepers; must not throw, allocate locked memory, nor add or remove a keeper.
  virtual void release_idle() noexcept = 0;
  // Locked bytes kept now, in use or idle. Same manners.
  virtual uint64_t kept_bytes() noexcept = 0;
  // What they are and how to have less of them, for messages: it follows the number of bytes.
  virtual std::string kept_as() const = 0;
};

// Thread-safe. A block of 512 bytes or more is 512-aligned, of a page or more page-aligned, every
// other 64-aligned. No system call is made under the arena's mutex.
class LockedArena {
 public:
  // The process's arena. Leaked on purpose. A forked child gets a fresh one; blocks of the parent
  // stay readable there and are released as nothing.
  static LockedArena& process();

  LockedArena();
  ~LockedArena();
  LockedArena(const LockedArena&) = delete;
  LockedArena& operator=(const LockedArena&) = delete;

  // A block with one reference. bytes > 0. Throws LockRefused as retry_with_room does; then nothing
  // has changed.
  Block* allocate(size_t bytes, const PageOptions& options);

  // Runs `lock`; where that throws LockRefused, empties the cache and runs it once more. What that
  // throws then tells what the keepers still hold.
  void retry_with_room(const std::function<void()>& lock);

  // Counted references. The memory is given back when the last one goes, by the block's owner.
  static void retain(Block* block) noexcept;
  static void release(Block* block) noexcept;

  // The live block that holds `address`, retained, or nullptr.
  Block* hold(const void* address) noexcept;
  // The same, not retained: for a caller that has a reference anyway.
  Block* find(const void* address) noexcept;

  // Free bytes kept for reuse at most; what exceeds is unlocked and unmapped now.
  void set_cache_limit(uint64_t bytes);
  uint64_t cache_limit() const;
  // Has the keepers release what is idle, and unlocks and unmaps all that is free.
  void empty_cache();
  // What the limit leaves this process to lock, the free bytes of the cache among it; nullopt: as
  // much as there is.
  std::optional<uint64_t> lockable_bytes() const;

  void add_keeper(BlockKeeper* keeper);
  // Returns once no call to the keeper is running.
  void remove_keeper(BlockKeeper* keeper);

  ArenaStats stats() const;
  // Of the stats, at the cost of one lock.
  uint64_t reserved_bytes() const;
  void reset_peak_stats();

 private:
  struct Impl;
  Impl* impl_;
};

}  // namespace locked_tensor
