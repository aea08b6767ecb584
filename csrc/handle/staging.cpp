#include "handle/staging.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <optional>

#include "os/align.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// A larger chunk would be no faster, and lock more than one small tensor is worth.
constexpr uint64_t kMostChunkBytes = uint64_t{32} << 20;

}  // namespace

Staging::Staging(uint64_t chunk_bytes, uint64_t limit_bytes)
    : arena_(LockedArena::process()),
      chunk_bytes_(
          align_up(std::min({chunk_bytes, limit_bytes / 8, kMostChunkBytes}), page_bytes())),
      chunks_per_slab_(std::max<uint64_t>(1, kHugePageBytes / chunk_bytes_)),
      limit_(std::max<uint64_t>(2, limit_bytes / chunk_bytes_)) {
  arena_.add_keeper(this);
}

Staging::~Staging() {
  arena_.remove_keeper(this);
  LT_CHECK(reserved_ == 0, "staging goes when no chunk is out");
  release_idle();
}

bool Staging::reserve() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (reserved_ == limit_) {
    return false;
  }
  ++reserved_;
  return true;
}

std::byte* Staging::take() {
  if (std::byte* chunk = take_free()) {
    return chunk;
  }
  std::lock_guard<std::mutex> growing(growth_mutex_);
  std::byte* chunk = take_free();  // another thread may have added a slab meanwhile
  return chunk != nullptr ? chunk : add_slab();
}

std::byte* Staging::take_free() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    return nullptr;
  }
  std::byte* chunk = free_.back();
  free_.pop_back();
  return chunk;
}

// Locked memory for a slab, or nullptr: see Note [Share of the limit].
Block* Staging::lock_slab() {
  if (const std::optional<uint64_t> left = arena_.lockable_bytes()) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (2 * (locked_bytes_ + slab_bytes()) > locked_bytes_ + *left) {
      return nullptr;
    }
  }
  try {
    return arena_.allocate(slab_bytes(), PageOptions{});
  } catch (const LockRefused&) {
    return nullptr;
  }
}

std::byte* Staging::add_slab() {
  Block* block = lock_slab();
  std::byte* data = block != nullptr
                        ? block->data
                        : static_cast<std::byte*>(std::aligned_alloc(page_bytes(), slab_bytes()));
  std::lock_guard<std::mutex> lock(mutex_);
  if (data == nullptr) {
    --reserved_;
    throw std::bad_alloc();
  }
  slabs_.emplace(data, block);
  locked_bytes_ += block != nullptr ? slab_bytes() : 0;
  for (uint64_t i = 1; i < chunks_per_slab_; ++i) {
    free_.push_back(data + i * chunk_bytes_);
  }
  return data;
}

void Staging::give_back(std::byte* chunk) {
  std::lock_guard<std::mutex> lock(mutex_);
  LT_CHECK(reserved_ > 0, "a staging chunk is given back once");
  --reserved_;
  free_.push_back(chunk);
}

void Staging::release_idle() noexcept {
  Slabs idle;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto slab_of = [this](std::byte* chunk) {
      return std::prev(slabs_.upper_bound(chunk))->first;
    };
    std::map<std::byte*, uint64_t> free_chunks;  // by slab
    for (std::byte* chunk : free_) {
      ++free_chunks[slab_of(chunk)];
    }
    std::erase_if(
        free_, [&](std::byte* chunk) { return free_chunks[slab_of(chunk)] == chunks_per_slab_; });
    for (const auto& [slab, count] : free_chunks) {
      if (count == chunks_per_slab_) {
        idle.insert(slabs_.extract(slab));
      }
    }
    for (const auto& [data, block] : idle) {
      locked_bytes_ -= block != nullptr ? slab_bytes() : 0;
    }
  }
  for (const auto& [data, block] : idle) {
    if (block != nullptr) {
      LockedArena::release(block);
    } else {
      std::free(data);
    }
  }
}

uint64_t Staging::kept_bytes() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  return locked_bytes_;
}

std::string Staging::kept_as() const {
  return "in use as staging of open aio_handles (their staging_bytes= bounds it)";
}

}  // namespace locked_tensor
