#include "handle/staging.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "os/align.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// A larger chunk would be no faster, and lock more than one small tensor is worth.
constexpr uint64_t kMostChunkBytes = uint64_t{32} << 20;

}  // namespace

Staging::Staging(uint64_t chunk_bytes, uint64_t limit_bytes)
    : chunk_bytes_(
          align_up(std::min({chunk_bytes, limit_bytes / 8, kMostChunkBytes}), page_bytes())),
      chunks_per_slab_(std::max<uint64_t>(1, kHugePageBytes / chunk_bytes_)),
      limit_(std::max<uint64_t>(2, limit_bytes / chunk_bytes_)) {}

Staging::~Staging() {
  release();
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
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      std::byte* chunk = free_.back();
      free_.pop_back();
      return chunk;
    }
  }
  return add_slab();
}

std::byte* Staging::add_slab() {
  const uint64_t bytes = chunk_bytes_ * chunks_per_slab_;
  Slab slab{nullptr, nullptr};
  try {
    slab.block = LockedArena::process().allocate(bytes, PageOptions{});
  } catch (const LockRefused&) {
    slab.ordinary = static_cast<std::byte*>(std::aligned_alloc(page_bytes(), bytes));
    if (slab.ordinary == nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      --reserved_;
      throw std::bad_alloc();
    }
  }
  std::byte* data = slab.block != nullptr ? slab.block->data : slab.ordinary;
  std::lock_guard<std::mutex> lock(mutex_);
  slabs_.push_back(slab);
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

void Staging::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  LT_CHECK(reserved_ == 0, "staging is released when no chunk is out");
  for (const Slab& slab : slabs_) {
    if (slab.block != nullptr) {
      LockedArena::release(slab.block);
    } else {
      std::free(slab.ordinary);
    }
  }
  slabs_.clear();
  free_.clear();
}

}  // namespace locked_tensor
