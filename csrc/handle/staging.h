// Staging: the bounded set of locked, aligned chunks that bytes pass through when they cannot go
// straight: unlocked, unaligned or scattered memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "memory/locked_arena.h"

namespace locked_tensor {

// Note [Share of the limit] Where RLIMIT_MEMLOCK binds, staging locks at most half of what it would
// leave without it, so that tensors have room; the rest is ordinary page-aligned memory (slower,
// still direct). What is idle is given back when the arena is refused memory.
//
// Thread-safe. Chunks come in slabs from the arena, taken on first need.
class Staging : public BlockKeeper {
 public:
  // At most limit_bytes in chunks of chunk_bytes (rounded to whole pages), and at least two chunks.
  Staging(uint64_t chunk_bytes, uint64_t limit_bytes);
  // No chunk may be out.
  ~Staging() override;
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  uint64_t chunk_bytes() const { return chunk_bytes_; }

  // Reserves a chunk without any system call: false when all are taken.
  bool reserve();
  // The chunk that reserve() promised; may map and lock a slab: see Note [Share of the limit].
  // Throws std::bad_alloc.
  std::byte* take();
  void give_back(std::byte* chunk);

  // Frees the slabs of which no chunk is out.
  void release_idle() noexcept override;
  uint64_t kept_bytes() noexcept override;
  std::string kept_as() const override;

 private:
  // By address; a block of locked memory, or nullptr for ordinary memory.
  using Slabs = std::map<std::byte*, Block*>;

  uint64_t slab_bytes() const { return chunk_bytes_ * chunks_per_slab_; }
  std::byte* take_free();
  Block* lock_slab();
  std::byte* add_slab();

  LockedArena& arena_;
  const uint64_t chunk_bytes_;
  const uint64_t chunks_per_slab_;
  const uint64_t limit_;
  std::mutex growth_mutex_;  // one slab at a time, so that no more are added than limit_ needs
  std::mutex mutex_;         // taken after it
  uint64_t reserved_ = 0;    // chunks promised or out
  std::vector<std::byte*> free_;
  Slabs slabs_;
  uint64_t locked_bytes_ = 0;  // of the slabs
};

}  // namespace locked_tensor
