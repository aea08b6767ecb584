#include "scripted_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "os/status.h"

namespace locked_tensor::testing {

ScriptedEngine::ScriptedEngine(const Script& script, size_t depth)
    : script_(script), depth_(depth), random_(script.seed) {}

bool ScriptedEngine::happens(unsigned percent) {
  return random_() % 100 < percent;
}

int64_t ScriptedEngine::submit(std::span<const Request> requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (happens(script_.refused_submit)) {
    return random_() % 2 == 0 ? -EAGAIN : -EBUSY;
  }
  size_t count = requests.size();
  if (happens(script_.partial_submit)) {
    count = 1 + random_() % count;
  }
  LT_CHECK(waiting_.size() + count <= depth_, "no more is submitted than the capacity");
  waiting_.insert(waiting_.end(), requests.begin(), requests.begin() + static_cast<long>(count));
  accepted_.insert(accepted_.end(), requests.begin(), requests.begin() + static_cast<long>(count));
  return static_cast<int64_t>(count);
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
    const Request request = waiting_[choice];
    waiting_.erase(waiting_.begin() + static_cast<long>(choice));
    completions[i] = Completion{request.id, carry_out(request)};
  }
  return static_cast<int64_t>(std::min(count, most));
}

int64_t ScriptedEngine::carry_out(const Request& request) {
  const bool is_write = request.operation == Operation::kWrite;
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
  const auto offset = static_cast<off_t>(request.offset_bytes);
  const auto count = static_cast<int>(request.vector_count);
  ssize_t moved;
  if (request.vectors != nullptr) {
    moved = is_write ? ::pwritev(request.fd, request.vectors, count, offset)
                     : ::preadv(request.fd, request.vectors, count, offset);
  } else {
    moved = is_write ? ::pwrite(request.fd, request.buffer, request.length_bytes, offset)
                     : ::pread(request.fd, request.buffer, request.length_bytes, offset);
  }
  if (moved < 0) return -errno;
  if (moved > 1 && happens(script_.short_transfer)) {
    return 1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(moved - 1));
  }
  return moved;
}

int ScriptedEngine::set_buffer(int32_t, std::byte*, size_t) {
  return -EOPNOTSUPP;
}

int ScriptedEngine::sync(int, bool) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++syncs_;
  return 0;
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
