// An engine that misbehaves by a seed, as kernels do: for faults that no device gives on demand.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "io/engine.h"

namespace locked_tensor::testing {

// Chances in percent, for each request unless said otherwise.
struct Script {
  uint64_t seed = 1;
  unsigned short_transfer = 0;  // moves less than was asked, perhaps less than a sector
  unsigned interrupted = 0;     // -EINTR
  unsigned again = 0;           // -EAGAIN
  unsigned zero = 0;            // a write that moves nothing
  unsigned failure = 0;         // `failures`, one of them
  unsigned lost_slot = 0;       // for each request that names a slot: it is cleared just before
  unsigned refused_submit = 0;  // for each submit: -EAGAIN or -EBUSY
  unsigned partial_submit = 0;  // for each submit: only a part is accepted
  unsigned late = 0;            // for each reap: fewer than could be had
  std::vector<int> failures = {5 /* EIO */, 28 /* ENOSPC */};
  // How the nth accepted request (from 0) ends, whatever the chances: -errno, or after that many
  // bytes.
  std::map<uint64_t, int64_t> results = {};
  // What the nth sync (from 0) returns instead of being carried out: -errno.
  std::map<unsigned, int> sync_results = {};
  int32_t buffer_slots = 16;  // of the fixed-buffer table; 0: none
};

// Requests are carried out with pread and pwrite when they are reaped, in random order. What a
// result does not report has not happened: bytes that nobody moves are wrong bytes.
class ScriptedEngine : public Engine {
 public:
  struct Failed {
    Request request;
    int errno_value;
  };

  ScriptedEngine(const Script& script, size_t depth);
  ~ScriptedEngine() override;

  const char* name() const override { return "scripted"; }
  size_t capacity() const override { return depth_; }
  int64_t submit(std::span<const Request> requests) override;
  int64_t reap(std::span<Completion> completions, size_t wait_for, int64_t timeout_ns) override;
  int set_buffer(int32_t slot, std::byte* data, size_t bytes) override;
  int32_t buffer_slots() const override { return static_cast<int32_t>(buffers_.size()); }
  bool has_fixed_vectors() const override { return !buffers_.empty(); }
  int notify(int event_fd) override;
  int sync(int fd, bool data_only) override;

  // What was accepted, in order (its `vectors` live no longer than the request); the failures that
  // were made up; calls of sync().
  std::vector<Request> accepted() const;
  std::vector<Failed> failed() const;
  unsigned syncs() const;

 private:
  // Accepted, not reaped.
  struct Waiting {
    Request request;
    uint64_t number;        // nth accepted
    bool is_slot_in_place;  // when accepted, which is when a kernel looks it up
  };

  bool happens(unsigned percent);
  bool is_in_slot(const Request& request) const;
  int64_t carry_out(const Waiting& waiting);

  const Script script_;
  const size_t depth_;
  const uint64_t generation_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<std::span<std::byte>> buffers_;
  std::vector<Waiting> waiting_;
  std::vector<Request> accepted_;
  std::vector<Failed> failed_;
  unsigned syncs_ = 0;
  int event_fd_ = -1;
};

}  // namespace locked_tensor::testing
