#include "io/uring_buffers.h"

#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <new>

#include "os/fork.h"

namespace locked_tensor {

namespace {

constexpr unsigned kPlaces = 16384;  // the most that the kernel allows in a table

// What liburing 2.3's headers lack (linux/io_uring.h of 6.13).
constexpr unsigned kCloneBuffers = 30;       // IORING_REGISTER_CLONE_BUFFERS
constexpr uint32_t kReplaceDestination = 2;  // IORING_REGISTER_DST_REPLACE
struct CloneBuffers {                        // struct io_uring_clone_buffers
  uint32_t source_fd;
  uint32_t flags;
  uint32_t source_slot;
  uint32_t destination_slot;
  uint32_t count;
  uint32_t padding[3];
};

int clone_slot(const io_uring& from, unsigned place, const io_uring& to, unsigned slot) {
  CloneBuffers clone{static_cast<uint32_t>(from.ring_fd), kReplaceDestination, place, slot, 1, {}};
  const long result = ::syscall(SYS_io_uring_register, to.ring_fd, kCloneBuffers, &clone, 1);
  return result < 0 ? -errno : 0;
}

}  // namespace

UringBuffers& UringBuffers::process() {
  static UringBuffers* buffers = [] {
    auto* made = new UringBuffers;  // leaked: rings may outlive static destruction
    add_fork_hooks({nullptr, nullptr, [made] { made->forget_in_child(); }});
    return made;
  }();
  return *buffers;
}

// The parent's ring is not mapped here, and its descriptor would keep the parent's pages.
void UringBuffers::forget_in_child() {
  if (ring_ != nullptr) {
    ::close(ring_->ring_fd);
  }
  new (this) UringBuffers;  // what the mutex guarded, and the mutex, are as the fork left them
}

// Under the mutex.
bool UringBuffers::open() {
  if (ring_ != nullptr || is_refused_) {
    return !is_refused_;
  }
  auto* ring = new io_uring{};
  if (io_uring_queue_init(1, ring, 0) < 0) {
    delete ring;
    return false;  // no memory for one more ring, for now
  }
  if (io_uring_ring_dontfork(ring) < 0 || io_uring_register_buffers_sparse(ring, kPlaces) < 0) {
    io_uring_queue_exit(ring);
    delete ring;
    is_refused_ = true;
    return false;
  }
  ring_ = ring;
  return true;
}

// Under the mutex.
int32_t UringBuffers::enter(const Stretch& stretch) {
  if (const auto known = places_.find(stretch); known != places_.end()) {
    return known->second;
  }
  if (free_places_.empty() && lent_.size() == kPlaces) {
    return -ENOSPC;
  }
  const int32_t place =
      free_places_.empty() ? static_cast<int32_t>(lent_.size()) : free_places_.back();
  const iovec buffer{stretch.first, stretch.second};
  const int result = io_uring_register_buffers_update_tag(ring_, static_cast<unsigned>(place),
                                                          &buffer, nullptr, 1);
  if (result < 0) {
    if (places_.empty()) {
      close();
    }
    return result;
  }
  if (free_places_.empty()) {
    lent_.emplace_back();
  } else {
    free_places_.pop_back();
  }
  lent_[static_cast<size_t>(place)].stretch = stretch;
  places_.emplace(stretch, place);
  return place;
}

int32_t UringBuffers::lend(io_uring& ring, unsigned slot, std::byte* data, size_t bytes) {
  int32_t place;
  int result;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!open()) {
      return -EOPNOTSUPP;
    }
    place = enter({data, bytes});
    if (place < 0) {
      return place;
    }
    ++lent_[static_cast<size_t>(place)].rings;
    result = clone_slot(*ring_, static_cast<unsigned>(place), ring, slot);
    is_refused_ = result == -EINVAL;
  }
  if (result < 0) {
    give_back(place);
    return result == -EINVAL ? -EOPNOTSUPP : result;
  }
  return place;
}

void UringBuffers::give_back(int32_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  Lent& lent = lent_[static_cast<size_t>(place)];
  if (--lent.rings > 0) {
    return;
  }
  const iovec nothing{nullptr, 0};
  const int cleared = io_uring_register_buffers_update_tag(ring_, static_cast<unsigned>(place),
                                                           &nothing, nullptr, 1);
  places_.erase(lent.stretch);
  if (cleared == 1) {
    free_places_.push_back(place);  // else its pages stay until the ring goes
  }
  if (places_.empty()) {
    close();
  }
}

// Under the mutex.
void UringBuffers::close() {
  io_uring_queue_exit(ring_);
  delete std::exchange(ring_, nullptr);
  lent_.clear();
  free_places_.clear();
}

}  // namespace locked_tensor
