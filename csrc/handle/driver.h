// Driver: moves transfers through an engine, piece by piece, by whoever has time.
//
// Note [Who drives] Any thread that waits does the work: it submits, reaps and copies until what it
// waits for is there, so a call on an idle handle never crosses threads. One thread reaps at a
// time. Workers exist only for asynchronous transfers that do not fit the queue or must be copied,
// and park otherwise.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "handle/fixed_buffers.h"
#include "handle/options.h"
#include "handle/staging.h"
#include "handle/transfer.h"
#include "io/engine.h"
#include "os/unique_fd.h"

namespace locked_tensor {

struct DriverStats {
  uint64_t bytes_direct = 0;    // O_DIRECT from or to the memory itself
  uint64_t bytes_bounced = 0;   // through a staging chunk
  uint64_t bytes_buffered = 0;  // through the page cache from or to the memory itself
  uint64_t operations = 0;      // transfers ended
  uint64_t requests = 0;        // handed to the engine
  uint64_t retries = 0;         // requests handed over again: short, EINTR, EAGAIN
};

class Driver {
 public:
  // Runs under the mutex when a transfer has ended; must not block, throw or call back.
  using OnDone = std::function<void(const std::shared_ptr<Transfer>&)>;
  // Called without the mutex when a signal arrived; what it throws leaves drive().
  using OnInterrupt = std::function<void()>;
  // Runs under the mutex: completions at least needed until the caller has what it waits for; 0:
  // has it.
  using Needed = std::function<uint64_t()>;

  Driver(const HandleOptions& options, std::unique_ptr<Engine> engine, OnDone on_done);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Starts transfers, in order, without waiting for any. `is_caller_driving`: the caller goes on to
  // drive(), so no worker is woken.
  void start(std::vector<std::shared_ptr<Transfer>> transfers, bool is_caller_driving);

  // Works until needed() is 0 (true) or timeout_ns (-1: none) has passed (false).
  bool drive(const Needed& needed, int64_t timeout_ns = -1, const OnInterrupt& on_interrupt = {});
  // Works until no transfer is left.
  void drain();

  // Has an eventfd (-1: none) signalled, through a duplicate, at each completion of the engine and
  // at the end of each transfer; also of what is in flight already, which an engine may no longer
  // tell of.
  void notify(int event_fd);

  std::mutex& mutex() { return mutex_; }
  uint64_t live_transfers() const { return live_; }  // under the mutex

  Engine& engine() { return *engine_; }
  DriverStats stats();
  const CutRules& rules() const { return rules_; }
  // Around a fork, in the parent: see Note [Fixed buffers].
  void before_fork() { fixed_buffers_.before_fork(); }
  void after_fork() { fixed_buffers_.after_fork(); }
  // In a forked child: only closes the engine; threads and waiters do not exist there. The driver
  // must then be leaked, not destroyed.
  void abandon_in_child();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // A piece on its way. Its index in pieces_ is the request's id.
  struct Piece {
    std::shared_ptr<Transfer> transfer;
    const Layout* layout = nullptr;
    Cut cut{};
    uint64_t file_offset = 0;
    int fd = -1;
    std::byte* memory = nullptr;  // of the piece's first byte; the chunk when staged
    int32_t slot = -1;
    std::vector<iovec> vectors;
    uint64_t done_bytes = 0;
    uint32_t fruitless_tries = 0;
    bool is_quiet = false;  // handed over when there was no eventfd to signal
  };

  // The units of work. Each is called with the mutex held, may give it back meanwhile, and says
  // whether there was something to do.
  bool step(Lock& lock, uint64_t needed, int64_t timeout_ns, bool* was_interrupted);
  bool scatter_one(Lock& lock);
  bool submit_some(Lock& lock, bool is_inline);
  bool cut_next(Lock& lock, bool is_inline);
  bool reap(Lock& lock, uint64_t wait_for, int64_t timeout_ns, bool* was_interrupted);

  Cut fit_to_slot(const Part& part, const DioAlignment& alignment, Cut cut, int32_t* slot);
  void prepare(Lock& lock, uint32_t index);
  void write_edge(Lock& lock, const std::shared_ptr<Transfer>& transfer, const Part& part,
                  const Cut& cut);
  void take_completion(Lock& lock, const Completion& completion);
  void hand_over_again(Piece& piece, uint32_t index, bool made_progress);
  void fail_piece(Lock& lock, uint32_t index, std::exception_ptr error);
  void end_piece(Lock& lock, uint32_t index);
  void count_bytes(Road road, uint64_t bytes);
  void fail(const std::shared_ptr<Transfer>& transfer, std::exception_ptr error,
            uint64_t file_offset);
  void end_if_last(Lock& lock, const std::shared_ptr<Transfer>& transfer);
  Request request_of(uint32_t index);
  uint32_t new_piece();
  uint64_t completions_to_wait_for(uint64_t needed) const;
  bool has_worker_work() const;
  void announce();
  void work();

  const HandleOptions options_;
  Staging staging_;  // outlives the engine, whose table its memory may be in
  const CutRules rules_;
  const uint64_t fork_generation_;
  // Duplicates: the caller may close theirs at any time. All are kept, because an engine may be
  // about to signal an earlier one.
  std::vector<UniqueFd> event_fds_;
  std::unique_ptr<Engine> engine_;
  const uint64_t depth_;
  const OnDone on_done_;
  FixedBuffers fixed_buffers_;

  std::mutex mutex_;
  std::condition_variable changed_;                // for threads in step() with empty hands
  std::condition_variable worker_wakes_;           // for parked workers
  std::deque<std::shared_ptr<Transfer>> backlog_;  // not wholly cut yet
  std::deque<uint32_t> ready_;                     // pieces to be handed to the engine
  std::deque<uint32_t> to_scatter_;                // pieces read into a chunk, to be copied out
  std::vector<Piece> pieces_;
  std::vector<uint32_t> free_pieces_;
  uint64_t in_flight_ = 0;  // pieces in the engine or being handed to it
  int64_t in_engine_ = 0;   // accepted by the engine, less reaped; behind in_flight_ for a moment
  uint64_t staged_reads_ = 0;
  uint64_t live_ = 0;     // transfers started and not ended
  uint64_t drivers_ = 0;  // threads in drive()
  uint64_t busy_threads_ = 0;
  uint64_t submitting_threads_ = 0;  // in the engine's submit
  bool is_reaping_ = false;
  bool is_stopping_ = false;
  int event_fd_ = -1;
  int64_t quiet_ = 0;      // quiet pieces in the engine; behind for a moment, as in_engine_ is
  uint32_t refusals_ = 0;  // in a row, by the engine: each makes the next submit wait a bit longer
  DriverStats stats_;
  std::vector<std::thread> workers_;
};

}  // namespace locked_tensor
