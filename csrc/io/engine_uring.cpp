#include "io/engine_uring.h"

#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <string>

#include "io/sync_file.h"
#include "io/uring_buffers.h"
#include "os/fork.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// Operations that liburing 2.3's headers lack (linux/io_uring.h of 6.15).
constexpr uint8_t kReadvFixed = 60;
constexpr uint8_t kWritevFixed = 61;
// Fixed buffers that a ring's table holds; the kernel allows 16384.
constexpr int32_t kBufferSlots = 1024;
constexpr int32_t kOwnPlace = -1;  // of a slot that this ring has registered itself

// Plain rings: with SINGLE_ISSUER no other thread could clear a slot. Submitting has a mutex of its
// own; reaping touches only the completion queue, one thread at a time (Engine's contract).
class UringEngine : public Engine {
 public:
  explicit UringEngine(size_t depth) {
    io_uring_params params{};
    params.flags = IORING_SETUP_CLAMP;
    // The queue must also hold the head start that submitters have on the reaper.
    const int result = io_uring_queue_init_params(static_cast<unsigned>(depth), &ring_, &params);
    if (result < 0) {
      throw KernelError(-result, "set up an io_uring");
    }
    constexpr unsigned kNeeded = IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
    if ((params.features & kNeeded) != kNeeded) {
      give_up(EOPNOTSUPP, "use io_uring of a kernel before 5.11");
    }
    // A filter may allow io_uring_setup and refuse this one.
    if (::syscall(SYS_io_uring_enter, ring_.ring_fd, 0, 0, 0, nullptr, 0) < 0) {
      give_up(errno, "enter an io_uring");
    }
    // A child that inherits the mapping keeps the ring, and with it the pages that are registered,
    // after the parent has closed it.
    const int kept = io_uring_ring_dontfork(&ring_);
    if (kept < 0) {
      give_up(-kept, "keep an io_uring from forked children");
    }
    depth_ = std::min<size_t>(depth, ring_.sq.ring_entries);
    if (io_uring_probe* probe = io_uring_get_probe_ring(&ring_)) {
      has_fixed_vectors_ = io_uring_opcode_supported(probe, kReadvFixed) != 0 &&
                           io_uring_opcode_supported(probe, kWritevFixed) != 0;
      io_uring_free_probe(probe);
    }
  }

  ~UringEngine() override {
    if (generation_ != fork_generation()) {
      // Closing is all that a child may do: the ring is its parent's, and not mapped here.
      ::close(ring_.ring_fd);
      return;
    }
    while (in_kernel_ > 0) {
      Completion completions[32];
      reap(completions, 1, -1);
    }
    io_uring_queue_exit(&ring_);
    for (const auto& [slot, place] : places_) {
      give_back(place);
    }
  }

  const char* name() const override { return "io_uring"; }
  size_t capacity() const override { return depth_; }

  int64_t submit(std::span<const Request> requests) override {
    std::lock_guard<std::mutex> lock(submit_mutex_);
    size_t prepared = 0;
    for (const Request& request : requests) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr) {
        break;
      }
      prepare(sqe, request);
      ++prepared;
    }
    in_kernel_ += prepared;
    size_t submitted = 0;
    int result = 0;
    while (submitted < prepared) {
      result = io_uring_submit(&ring_);
      if (result > 0) {
        submitted += static_cast<size_t>(result);
      } else if (result != -EINTR) {
        break;
      }
    }
    if (submitted < prepared) {
      take_back_unsubmitted();
      in_kernel_ -= prepared - submitted;
    }
    return submitted > 0 ? static_cast<int64_t>(submitted) : result;
  }

  int64_t reap(std::span<Completion> completions, size_t wait_for, int64_t timeout_ns) override {
    size_t count = take(completions);
    if (count >= wait_for || count == completions.size()) {
      return static_cast<int64_t>(count);
    }
    // io_uring_enter itself rather than liburing's waits: those may touch the submission queue,
    // which belongs to other threads.
    __kernel_timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    io_uring_getevents_arg argument{};
    argument.ts = timeout_ns < 0 ? 0 : reinterpret_cast<uint64_t>(&timeout);
    const long result =
        ::syscall(SYS_io_uring_enter, ring_.ring_fd, 0, static_cast<unsigned>(wait_for - count),
                  IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof argument);
    const int errno_value = result < 0 ? errno : 0;
    count += take(completions.subspan(count));
    if (count == 0 && errno_value != 0 && errno_value != ETIME) {
      return -errno_value;
    }
    return static_cast<int64_t>(count);
  }

  int set_buffer(int32_t slot, std::byte* data, size_t bytes) override {
    std::lock_guard<std::mutex> lock(submit_mutex_);
    if (!has_table_) {
      if (data == nullptr) {
        return 0;
      }
      const int made = io_uring_register_buffers_sparse(&ring_, kBufferSlots);
      if (made != 0) {
        return made;
      }
      has_table_ = true;
    }
    if (slot < 0 || slot >= kBufferSlots) {
      return -EINVAL;
    }
    const iovec nothing{nullptr, 0};
    const int cleared = put(slot, nothing);
    if (cleared < 0 || data == nullptr) {
      return cleared;
    }
    // See Note [Shared buffers].
    if (places_.empty() || slot > places_.rbegin()->first) {
      const int32_t place =
          UringBuffers::process().lend(ring_, static_cast<unsigned>(slot), data, bytes);
      if (place >= 0) {
        places_.emplace(slot, place);
        return 0;
      }
      if (place != -EOPNOTSUPP) {
        return place;
      }
    }
    const int result = put(slot, iovec{data, bytes});
    if (result == 0) {
      places_.emplace(slot, kOwnPlace);
    }
    return result;
  }

  int32_t buffer_slots() const override { return kBufferSlots; }
  bool has_fixed_vectors() const override { return has_fixed_vectors_; }

  int notify(int event_fd) override {
    std::lock_guard<std::mutex> lock(submit_mutex_);
    io_uring_unregister_eventfd(&ring_);  // one that was there; refused when there was none
    return event_fd < 0 ? 0 : io_uring_register_eventfd(&ring_, event_fd);
  }

  int sync(int fd, bool data_only) override { return sync_file(fd, data_only); }

 private:
  [[noreturn]] void give_up(int errno_value, const std::string& tried) {
    io_uring_queue_exit(&ring_);
    throw KernelError(errno_value, tried);
  }

  // Puts a buffer of the ring's own into a slot, or nothing, in place of what was there.
  int put(int32_t slot, const iovec& buffer) {
    const int result = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(slot),
                                                            &buffer, nullptr, 1);
    if (result < 0) {
      return result;
    }
    if (const auto used = places_.find(slot); used != places_.end()) {
      give_back(used->second);
      places_.erase(used);
    }
    return 0;
  }

  static void give_back(int32_t place) {
    if (place != kOwnPlace) {
      UringBuffers::process().give_back(place);
    }
  }

  // Empties the submission queue of what the kernel left there, or it would go with the next
  // requests. Only io_uring_submit reads the queue, and that under the mutex.
  void take_back_unsubmitted() {
    const unsigned head = *ring_.sq.khead;
    *ring_.sq.ktail = head;
    ring_.sq.sqe_head = head;
    ring_.sq.sqe_tail = head;
  }

  static void prepare(io_uring_sqe* sqe, const Request& request) {
    const bool is_read = request.operation == Operation::kRead;
    const bool is_fixed = request.buffer_slot >= 0;
    const uint64_t offset = request.offset_bytes;
    const auto length = static_cast<unsigned>(request.length_bytes);
    if (request.vectors != nullptr) {
      if (is_read) {
        io_uring_prep_readv(sqe, request.fd, request.vectors, request.vector_count, offset);
      } else {
        io_uring_prep_writev(sqe, request.fd, request.vectors, request.vector_count, offset);
      }
      if (is_fixed) {
        sqe->opcode = is_read ? kReadvFixed : kWritevFixed;
        sqe->buf_index = static_cast<uint16_t>(request.buffer_slot);
      }
    } else if (is_fixed) {
      if (is_read) {
        io_uring_prep_read_fixed(sqe, request.fd, request.buffer, length, offset,
                                 request.buffer_slot);
      } else {
        io_uring_prep_write_fixed(sqe, request.fd, request.buffer, length, offset,
                                  request.buffer_slot);
      }
    } else if (is_read) {
      io_uring_prep_read(sqe, request.fd, request.buffer, length, offset);
    } else {
      io_uring_prep_write(sqe, request.fd, request.buffer, length, offset);
    }
    io_uring_sqe_set_data64(sqe, request.id);
  }

  size_t take(std::span<Completion> completions) {
    size_t count = 0;
    unsigned head;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      if (count == completions.size()) {
        break;
      }
      completions[count++] = Completion{cqe->user_data, cqe->res};
    }
    io_uring_cq_advance(&ring_, static_cast<unsigned>(count));
    in_kernel_ -= count;
    return count;
  }

  const uint64_t generation_ = fork_generation();
  io_uring ring_{};
  size_t depth_ = 0;
  bool has_fixed_vectors_ = false;
  bool has_table_ = false;
  std::map<int32_t, int32_t> places_;  // in UringBuffers, of each slot in use
  std::mutex submit_mutex_;
  std::atomic<size_t> in_kernel_{0};
};

}  // namespace

bool is_uring_built_in() {
  return true;
}

std::unique_ptr<Engine> make_uring_engine(size_t depth) {
  return std::make_unique<UringEngine>(depth);
}

}  // namespace locked_tensor
