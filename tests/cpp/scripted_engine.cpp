#include "scripted_engine.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "io/sync_file.h"
#include "os/fork.h"
#include "os/status.h"
#include "os/unique_fd.h"

namespace locked_tensor::testing {

namespace {

std::vector<iovec> memory_of(const Request& request) {
  if (request.vectors != nullptr) {
    return {request.vectors, request.vectors + request.vector_count};
  }
  return {iovec{request.buffer, request.length_bytes}};
}

uint64_t bytes_of(const std::vector<iovec>& memory) {
  uint64_t bytes = 0;
  for (const iovec& run : memory) bytes += run.iov_len;
  return bytes;
}

int64_t move_bytes(const Request& request, int fd, const std::vector<iovec>& memory) {
  const auto count = static_cast<int>(memory.size());
  const auto offset = static_cast<off_t>(request.offset_bytes);
  const ssize_t moved = request.operation == Operation::kWrite
                            ? ::pwritev(fd, memory.data(), count, offset)
                            : ::preadv(fd, memory.data(), count, offset);
  return moved < 0 ? -errno : moved;
}

// Moves the first `most` bytes and leaves the rest as it was. A direct descriptor would refuse a
// part of a sector, so parts go through the page cache.
int64_t move_part(const Request& request, uint64_t most) {
  std::vector<iovec> memory = memory_of(request);
  uint64_t left = most;
  for (iovec& run : memory) {
    run.iov_len = std::min<uint64_t>(run.iov_len, left);
    left -= run.iov_len;
  }
  const int flags = ::fcntl(request.fd, F_GETFL);
  if (flags < 0) return -errno;
  const UniqueFd buffered =
      open_file("/proc/self/fd/" + std::to_string(request.fd), flags & O_ACCMODE);
  return move_bytes(request, buffered.get(), memory);
}

}  // namespace

ScriptedEngine::ScriptedEngine(const Script& script, size_t depth)
    : script_(script),
      depth_(depth),
      generation_(fork_generation()),
      random_(script.seed),
      buffers_(static_cast<size_t>(script.buffer_slots)) {}

ScriptedEngine::~ScriptedEngine() {
  if (generation_ != fork_generation()) {
    return;
  }
  for (const Waiting& waiting : waiting_) {
    carry_out(waiting);
  }
}

bool ScriptedEngine::happens(unsigned percent) {
  return random_() % 100 < percent;
}

bool ScriptedEngine::is_in_slot(const Request& request) const {
  if (request.buffer_slot < 0) return true;
  if (request.buffer_slot >= buffer_slots()) return false;
  const std::span<std::byte> buffer = buffers_[static_cast<size_t>(request.buffer_slot)];
  for (const iovec& run : memory_of(request)) {
    const auto* begin = static_cast<std::byte*>(run.iov_base);
    if (begin < buffer.data() || begin + run.iov_len > buffer.data() + buffer.size()) return false;
  }
  return true;
}

int64_t ScriptedEngine::submit(std::span<const Request> requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (happens(script_.refused_submit)) {
    return random_() % 2 == 0 ? -EAGAIN : -EBUSY;
  }
  if (happens(script_.partial_submit)) {
    requests = requests.first(1 + random_() % requests.size());
  }
  LT_CHECK(waiting_.size() + requests.size() <= depth_, "no more is submitted than the capacity");
  for (const Request& request : requests) {
    if (request.buffer_slot >= 0 && request.buffer_slot < buffer_slots() &&
        happens(script_.lost_slot)) {
      buffers_[static_cast<size_t>(request.buffer_slot)] = {};
    }
    waiting_.push_back(Waiting{request, accepted_.size(), is_in_slot(request)});
    accepted_.push_back(request);
    if (event_fd_ >= 0) {
      // Nothing happens before the reaping that this signal calls for.
      static_cast<void>(::eventfd_write(event_fd_, 1));
    }
  }
  return static_cast<int64_t>(requests.size());
}

int64_t ScriptedEngine::reap(std::span<Completion> completions, size_t wait_for, int64_t) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (happens(script_.late)) {
    wait_for = std::min<size_t>(wait_for, 1);
    if (random_() % 4 == 0) {
      return -EINTR;
    }
  }
  LT_CHECK(wait_for <= waiting_.size(), "no more is waited for than was submitted");
  const size_t most = std::min(completions.size(), waiting_.size());
  const size_t count = wait_for + (most > wait_for ? random_() % (most - wait_for + 1) : 0);
  for (size_t i = 0; i < std::min(count, most); ++i) {
    const size_t choice = random_() % waiting_.size();
    const Waiting waiting = waiting_[choice];
    waiting_.erase(waiting_.begin() + static_cast<long>(choice));
    completions[i] = Completion{waiting.request.id, carry_out(waiting)};
  }
  return static_cast<int64_t>(std::min(count, most));
}

int64_t ScriptedEngine::carry_out(const Waiting& waiting) {
  const Request& request = waiting.request;
  const bool is_write = request.operation == Operation::kWrite;
  const uint64_t wanted = bytes_of(memory_of(request));
  if (const auto scripted = script_.results.find(waiting.number);
      scripted != script_.results.end()) {
    if (scripted->second >= 0) {
      return move_part(request, static_cast<uint64_t>(scripted->second));
    }
    failed_.push_back(Failed{request, static_cast<int>(-scripted->second)});
    return scripted->second;
  }
  if (!waiting.is_slot_in_place) return -EFAULT;
  if (happens(script_.interrupted)) return -EINTR;
  if (happens(script_.again)) return -EAGAIN;
  if (happens(script_.failure)) {
    const int errno_value = script_.failures[random_() % script_.failures.size()];
    failed_.push_back(Failed{request, errno_value});
    return -errno_value;
  }
  if (is_write && happens(script_.zero)) {
    failed_.push_back(Failed{request, EIO});
    return 0;
  }
  if (wanted > 1 && happens(script_.short_transfer)) {
    return move_part(request, 1 + random_() % (wanted - 1));
  }
  return move_bytes(request, request.fd, memory_of(request));
}

int ScriptedEngine::set_buffer(int32_t slot, std::byte* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (buffers_.empty()) return -EOPNOTSUPP;
  if (slot < 0 || slot >= buffer_slots()) return -EINVAL;
  buffers_[static_cast<size_t>(slot)] = {data, bytes};
  return 0;
}

int ScriptedEngine::notify(int event_fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  event_fd_ = event_fd;
  return 0;
}

int ScriptedEngine::sync(int fd, bool data_only) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto scripted = script_.sync_results.find(syncs_++);
    if (scripted != script_.sync_results.end()) return scripted->second;
  }
  return sync_file(fd, data_only);
}

std::vector<Request> ScriptedEngine::accepted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return accepted_;
}

std::vector<ScriptedEngine::Failed> ScriptedEngine::failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_;
}

unsigned ScriptedEngine::syncs() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return syncs_;
}

}  // namespace locked_tensor::testing
