// Engine: one way to have the kernel move bytes. The handle talks to this and to nothing else.
//
// Thread-safe: any thread may submit, reap or set a buffer at any time; one thread at a time reaps.
// Engines speak -errno and never throw after construction. Short transfers, EINTR and EAGAIN are
// passed up as they are: the handle resumes and retries, once, for all engines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/request.h"

namespace locked_tensor {

class Engine {
 public:
  // Waits for what is in flight, then releases the kernel's side. In a forked child it only closes
  // what was inherited.
  virtual ~Engine() = default;

  virtual const char* name() const = 0;

  // Requests that may be in flight at once. The caller keeps count and never exceeds it.
  virtual size_t capacity() const = 0;

  // Hands requests to the kernel, in one system call where there is one. Returns how many of the
  // front were accepted (each gives exactly one completion), or -errno when none was; -EAGAIN and
  // -EBUSY mean "reap first, then try again".
  virtual int64_t submit(std::span<const Request> requests) = 0;

  // Takes up to completions.size() completions, waiting until `wait_for` of them are there
  // (0: does not wait) or timeout_ns has passed (-1: for ever). Returns the count, possibly fewer
  // than wait_for after a timeout or a signal, or -errno. wait_for is at most what is in flight.
  virtual int64_t reap(std::span<Completion> completions, size_t wait_for, int64_t timeout_ns) = 0;

  // Registers `bytes` at `data` as fixed buffer `slot` (replacing what was there), or clears it
  // with (nullptr, 0). Requests that name the slot then move without pinning pages. 0 or -errno
  // (-EOPNOTSUPP: this engine has no such table).
  virtual int set_buffer(int32_t slot, std::byte* data, size_t bytes) = 0;
  virtual int32_t buffer_slots() const = 0;  // size of that table; 0: none

  // Can a request with both `vectors` and `buffer_slot` be submitted?
  virtual bool has_fixed_vectors() const { return false; }

  // Has `event_fd` (an eventfd, -1: none) signalled at each completion, for a loop that polls. 0 or
  // -errno.
  virtual int notify(int event_fd) = 0;

  // fsync(2) of fd, or fdatasync(2). Waits. 0 or -errno.
  virtual int sync(int fd, bool data_only) = 0;
};

}  // namespace locked_tensor
