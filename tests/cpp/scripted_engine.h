// An engine that misbehaves by a seed, as kernels do: for faults that no device gives on demand.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <vector>

#include "io/engine.h"

namespace locked_tensor::testing {

// Chances in percent, for each request unless said otherwise.
struct Script {
  uint64_t seed = 1;
  unsigned short_transfer = 0;  // reports less than was asked, perhaps less than a sector
  unsigned interrupted = 0;     // -EINTR
  unsigned again = 0;           // -EAGAIN
  unsigned zero = 0;            // a write that moves nothing
  unsigned failure = 0;         // `failures`, one of them
  unsigned refused_submit = 0;  // for each submit: -EAGAIN or -EBUSY
  unsigned partial_submit = 0;  // for each submit: only a part is accepted
  unsigned late = 0;            // for each reap: fewer than could be had
  std::vector<int> failures = {5 /* EIO */, 28 /* ENOSPC */};
};

// Requests are carried out with pread and pwrite when they are reaped, in random order.
class ScriptedEngine : public Engine {
 public:
  struct Failed {
    Request request;
    int errno_value;
  };

  ScriptedEngine(const Script& script, size_t depth);

  const char* name() const override { return "scripted"; }
  size_t capacity() const override { return depth_; }
  int64_t submit(std::span<const Request> requests) override;
  int64_t reap(std::span<Completion> completions, size_t wait_for, int64_t timeout_ns) override;
  int set_buffer(int32_t, std::byte*, size_t) override;
  int32_t buffer_slots() const override { return 0; }
  int notify(int) override { return 0; }
  int sync(int, bool) override;

  // What was accepted, in order; the failures that were made up; calls of sync().
  std::vector<Request> accepted() const;
  std::vector<Failed> failed() const;
  unsigned syncs() const;

 private:
  bool happens(unsigned percent);
  int64_t carry_out(const Request& request);

  const Script script_;
  const size_t depth_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<Request> waiting_;
  std::vector<Request> accepted_;
  std::vector<Failed> failed_;
  unsigned syncs_ = 0;
};

}  // namespace locked_tensor::testing
