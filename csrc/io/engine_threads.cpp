#include "io/engine_threads.h"

#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "io/sync_file.h"
#include "os/fork.h"

namespace locked_tensor {

namespace {

int64_t move_bytes(const Request& request) {
  const auto offset = static_cast<off_t>(request.offset_bytes);
  const auto count = static_cast<int>(request.vector_count);
  const bool is_read = request.operation == Operation::kRead;
  ssize_t result;
  if (request.vectors != nullptr) {
    result = is_read ? ::preadv(request.fd, request.vectors, count, offset)
                     : ::pwritev(request.fd, request.vectors, count, offset);
  } else {
    result = is_read ? ::pread(request.fd, request.buffer, request.length_bytes, offset)
                     : ::pwrite(request.fd, request.buffer, request.length_bytes, offset);
  }
  return result < 0 ? -errno : result;
}

class ThreadsEngine : public Engine {
 public:
  ThreadsEngine(size_t depth, size_t threads)
      : depth_(depth), thread_count_(std::min(depth, threads)), state_(new State) {}

  ~ThreadsEngine() override {
    if (generation_ != fork_generation()) {
      return;  // the threads are the parent's; what they shared is leaked here
    }
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->is_stopping = true;  // threads finish the queue first
      state_->work.notify_all();
    }
    for (std::thread& thread : state_->threads) {
      thread.join();
    }
    delete state_;
  }

  const char* name() const override { return "threads"; }
  size_t capacity() const override { return depth_; }

  int64_t submit(std::span<const Request> requests) override {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->queue.insert(state_->queue.end(), requests.begin(), requests.end());
    state_->unreaped += requests.size();
    const size_t wanted = std::min(thread_count_, state_->unreaped);
    try {
      while (state_->threads.size() < wanted) {
        state_->threads.emplace_back([state = state_] { state->run(); });
      }
    } catch (const std::system_error&) {
      // No more threads are to be had (RLIMIT_NPROC): fewer serve, or else the caller's own.
      while (state_->threads.empty() && !state_->queue.empty()) {
        state_->move_next(lock);
      }
    }
    if (requests.size() == 1) {
      state_->work.notify_one();
    } else {
      state_->work.notify_all();
    }
    return static_cast<int64_t>(requests.size());
  }

  int64_t reap(std::span<Completion> completions, size_t wait_for, int64_t timeout_ns) override {
    std::unique_lock<std::mutex> lock(state_->mutex);
    const auto is_enough = [&] { return state_->completed.size() >= wait_for; };
    state_->wanted = wait_for;
    if (timeout_ns < 0) {
      state_->done.wait(lock, is_enough);
    } else {
      state_->done.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_enough);
    }
    const size_t count = std::min(completions.size(), state_->completed.size());
    std::copy_n(state_->completed.begin(), count, completions.begin());
    state_->completed.erase(state_->completed.begin(),
                            state_->completed.begin() + static_cast<ptrdiff_t>(count));
    state_->unreaped -= count;
    return static_cast<int64_t>(count);
  }

  int set_buffer(int32_t, std::byte*, size_t) override { return -EOPNOTSUPP; }
  int32_t buffer_slots() const override { return 0; }

  int notify(int event_fd) override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->event_fd = event_fd;
    return 0;
  }

  int sync(int fd, bool data_only) override { return sync_file(fd, data_only); }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable work;
    std::condition_variable done;
    std::deque<Request> queue;
    std::deque<Completion> completed;
    size_t unreaped = 0;  // submitted, not reaped
    size_t wanted = 0;    // completions that wake the reaper
    int event_fd = -1;
    bool is_stopping = false;
    std::vector<std::thread> threads;

    void run() {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        work.wait(lock, [&] { return !queue.empty() || is_stopping; });
        if (queue.empty()) {
          return;
        }
        move_next(lock);
      }
    }

    // The mutex is held, and given back meanwhile; the queue is not empty.
    void move_next(std::unique_lock<std::mutex>& lock) {
      const Request request = queue.front();
      queue.pop_front();
      lock.unlock();
      const int64_t result = move_bytes(request);
      lock.lock();
      completed.push_back(Completion{request.id, result});
      if (event_fd >= 0) {
        static_cast<void>(::eventfd_write(event_fd, 1));  // full: the reader has been told
      }
      if (completed.size() >= wanted) {
        done.notify_one();
      }
    }
  };

  const uint64_t generation_ = fork_generation();
  const size_t depth_;
  const size_t thread_count_;
  State* state_;  // leaked in a forked child
};

}  // namespace

std::unique_ptr<Engine> make_threads_engine(size_t depth, size_t threads) {
  return std::make_unique<ThreadsEngine>(depth, std::max<size_t>(1, threads));
}

}  // namespace locked_tensor
