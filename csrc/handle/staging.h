// Staging: the bounded set of locked, aligned chunks that bytes pass through when they cannot go
// straight: unlocked, unaligned or scattered memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "memory/locked_arena.h"

namespace locked_tensor {

// Thread-safe. Chunks come in slabs from the arena, taken on first need, given back by release().
class Staging {
 public:
  // At most limit_bytes in chunks of chunk_bytes (rounded to whole pages), and at least two chunks.
  Staging(uint64_t chunk_bytes, uint64_t limit_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  uint64_t chunk_bytes() const { return chunk_bytes_; }

  // Reserves a chunk without any system call: false when all are taken.
  bool reserve();
  // The chunk that reserve() promised; may map and lock a slab. Where the lock limit leaves no
  // room, ordinary page-aligned memory serves (slower, still direct). Throws std::bad_alloc.
  std::byte* take();
  void give_back(std::byte* chunk);
  // Frees the slabs; no chunk may be out.
  void release();

 private:
  struct Slab {
    Block* block;         // locked, or nullptr
    std::byte* ordinary;  // else this
  };

  std::byte* add_slab();

  const uint64_t chunk_bytes_;
  const uint64_t chunks_per_slab_;
  const uint64_t limit_;
  std::mutex mutex_;
  uint64_t reserved_ = 0;  // chunks promised or out
  std::vector<std::byte*> free_;
  std::vector<Slab> slabs_;
};

}  // namespace locked_tensor
