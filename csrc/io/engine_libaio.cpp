#include "io/engine_libaio.h"

#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <mutex>
#include <vector>

#include "io/sync_file.h"
#include "os/fork.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// The system calls: 0 or a count, or -errno.
long result_of(long result) {
  return result < 0 ? -errno : result;
}
long io_setup(unsigned depth, aio_context_t* context) {
  return result_of(::syscall(SYS_io_setup, depth, context));
}
long io_destroy(aio_context_t context) {
  return result_of(::syscall(SYS_io_destroy, context));
}
long io_submit(aio_context_t context, long count, iocb** requests) {
  return result_of(::syscall(SYS_io_submit, context, count, requests));
}
long io_getevents(aio_context_t context, long least, long most, io_event* events,
                  timespec* timeout) {
  return result_of(::syscall(SYS_io_getevents, context, least, most, events, timeout));
}

class LibaioEngine : public Engine {
 public:
  explicit LibaioEngine(size_t depth) : depth_(depth) {
    // EAGAIN: fs.aio-max-nr is nearly used up, by whomever; a smaller context may still fit.
    long result;
    while ((result = io_setup(static_cast<unsigned>(depth_), &context_)) == -EAGAIN && depth_ > 1) {
      depth_ /= 2;
    }
    if (result != 0) {
      throw KernelError(static_cast<int>(-result), "set up kernel AIO");
    }
  }

  ~LibaioEngine() override {
    if (generation_ != fork_generation()) {
      return;  // a child has no contexts
    }
    while (in_kernel_ > 0) {
      Completion completions[32];
      reap(completions, 1, -1);
    }
    io_destroy(context_);
  }

  const char* name() const override { return "libaio"; }
  size_t capacity() const override { return depth_; }

  int64_t submit(std::span<const Request> requests) override {
    std::vector<iocb> blocks(requests.size());
    std::vector<iocb*> pointers(requests.size());
    const int event_fd = event_fd_.load();
    for (size_t i = 0; i < requests.size(); ++i) {
      prepare(blocks[i], requests[i], event_fd);
      pointers[i] = &blocks[i];
    }
    in_kernel_ += requests.size();
    const long result = io_submit(context_, static_cast<long>(requests.size()), pointers.data());
    in_kernel_ -= requests.size() - static_cast<size_t>(std::max(result, 0l));
    if (result < 0 && result != -EAGAIN && result != -EINTR) {
      // The kernel refuses the first request itself (EBADF, EINVAL): that is its completion.
      std::lock_guard<std::mutex> lock(refused_mutex_);
      refused_.push_back(Completion{requests[0].id, result});
      ++refused_count_;
      if (event_fd >= 0) {
        static_cast<void>(::eventfd_write(event_fd, 1));  // full: the reader has been told
      }
      return 1;
    }
    return result;
  }

  int64_t reap(std::span<Completion> completions, size_t wait_for, int64_t timeout_ns) override {
    size_t count = take_refused(completions);
    std::vector<io_event> events(completions.size() - count);
    if (events.empty()) {
      return static_cast<int64_t>(count);
    }
    const size_t least = wait_for > count ? wait_for - count : 0;
    timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    const bool is_bounded = timeout_ns >= 0 || count > 0;
    if (count > 0) {
      timeout = timespec{0, 0};
    }
    const long result = io_getevents(context_, static_cast<long>(std::min(least, events.size())),
                                     static_cast<long>(events.size()), events.data(),
                                     is_bounded ? &timeout : nullptr);
    if (result < 0) {
      return count > 0 ? static_cast<int64_t>(count) : result;
    }
    for (long i = 0; i < result; ++i) {
      // io_event.res is unsigned in some headers: -EIO must not become a large count.
      completions[count++] = Completion{events[i].data, static_cast<int64_t>(events[i].res)};
    }
    in_kernel_ -= static_cast<size_t>(result);
    return static_cast<int64_t>(count);
  }

  int set_buffer(int32_t, std::byte*, size_t) override { return -EOPNOTSUPP; }
  int32_t buffer_slots() const override { return 0; }

  int notify(int event_fd) override {
    event_fd_ = event_fd;
    return 0;
  }

  int sync(int fd, bool data_only) override { return sync_file(fd, data_only); }

 private:
  static void prepare(iocb& block, const Request& request, int event_fd) {
    const bool is_read = request.operation == Operation::kRead;
    block = iocb{};
    block.aio_data = request.id;
    block.aio_fildes = static_cast<uint32_t>(request.fd);
    block.aio_offset = static_cast<int64_t>(request.offset_bytes);
    if (request.vectors != nullptr) {
      block.aio_lio_opcode = is_read ? IOCB_CMD_PREADV : IOCB_CMD_PWRITEV;
      block.aio_buf = reinterpret_cast<uint64_t>(request.vectors);
      block.aio_nbytes = request.vector_count;
    } else {
      block.aio_lio_opcode = is_read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
      block.aio_buf = reinterpret_cast<uint64_t>(request.buffer);
      block.aio_nbytes = request.length_bytes;
    }
    if (event_fd >= 0) {
      block.aio_flags = IOCB_FLAG_RESFD;
      block.aio_resfd = static_cast<uint32_t>(event_fd);
    }
  }

  size_t take_refused(std::span<Completion> completions) {
    if (refused_count_ == 0) {
      return 0;
    }
    std::lock_guard<std::mutex> lock(refused_mutex_);
    const size_t count = std::min(completions.size(), refused_.size());
    std::copy_n(refused_.begin(), count, completions.begin());
    refused_.erase(refused_.begin(), refused_.begin() + static_cast<ptrdiff_t>(count));
    refused_count_ -= count;
    return count;
  }

  const uint64_t generation_ = fork_generation();
  aio_context_t context_ = 0;
  size_t depth_;
  std::atomic<int> event_fd_{-1};
  std::atomic<size_t> in_kernel_{0};
  std::mutex refused_mutex_;
  std::vector<Completion> refused_;
  std::atomic<size_t> refused_count_{0};
};

}  // namespace

std::unique_ptr<Engine> make_libaio_engine(size_t depth) {
  return std::make_unique<LibaioEngine>(depth);
}

}  // namespace locked_tensor
