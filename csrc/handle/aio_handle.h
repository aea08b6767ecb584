// AioHandle: what a caller sees of I/O: transfers started, waited for, counted, their failures
// reported.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "handle/driver.h"
#include "handle/file_cache.h"
#include "handle/options.h"
#include "handle/transfer.h"

namespace locked_tensor {

// A path, or the caller's open descriptor.
using FileName = std::variant<std::string, int>;

// What to move: memory stretches, in order, to or from consecutive bytes of a file.
struct TransferSpec {
  Operation operation = Operation::kRead;
  std::vector<Layout> memory;
  FileName file;
  int64_t file_offset_bytes = 0;
  bool validates = false;
  bool is_durable = false;  // a write ends when data, size and name are on the device
  std::unique_ptr<KeepAlive> keep_alive;
  std::unique_ptr<Watch> watch;  // of a read
};

// Failures of asynchronous transfers, in the order in which these were started. Never empty.
class TransfersFailed : public std::runtime_error {
 public:
  explicit TransfersFailed(std::vector<std::exception_ptr> failures);
  const std::vector<std::exception_ptr>& failures() const { return failures_; }

 private:
  std::vector<std::exception_ptr> failures_;
};

// Thread-safe. std::invalid_argument: the caller was wrong (also: the handle is closed).
// std::runtime_error: used in a forked child. Kernel refusals and short reads of a transfer belong
// to that transfer and are thrown where its Report says.
class AioHandle {
 public:
  using OnInterrupt = Driver::OnInterrupt;

  explicit AioHandle(const HandleOptions& options);
  // With an engine of the caller's, for tests.
  AioHandle(const HandleOptions& options, std::unique_ptr<Engine> engine);
  // Finishes what is in flight. In a forked child it leaks what cannot be destroyed there.
  ~AioHandle();
  AioHandle(const AioHandle&) = delete;
  AioHandle& operator=(const AioHandle&) = delete;

  const HandleOptions& options() const { return options_; }
  const std::string& engine_name() const { return engine_name_; }

  // Starts a transfer and returns at once.
  std::shared_ptr<Transfer> start(TransferSpec spec, Report report);
  std::vector<std::shared_ptr<Transfer>> start_all(std::vector<TransferSpec> specs, Report report);
  // Moves the bytes, returns how many, and throws the transfer's own failure.
  uint64_t run(TransferSpec spec, const OnInterrupt& on_interrupt = {});

  // Waits for every transfer started before with Report kWait or kTicket. Returns how many have
  // ended since the last wait; throws TransfersFailed instead when some of them failed.
  uint64_t wait(const OnInterrupt& on_interrupt = {});
  // Waits for one; false after timeout_ns (-1: none). Throws nothing of the transfer's. Once it was
  // true, its memory is its owner's again: see Note [Told ends].
  bool wait_for(const std::shared_ptr<Transfer>& transfer, int64_t timeout_ns,
                const OnInterrupt& on_interrupt = {});
  // The failure of a transfer that has ended, or nullptr. wait() will not throw it again.
  std::exception_ptr take_failure(const std::shared_ptr<Transfer>& transfer);
  // Does what can be done without waiting; nothing when closed.
  void poll();
  // Has an eventfd signalled when something came back or a transfer ended; then call poll().
  void notify(int event_fd);

  // Waits for this handle's transfers, then fsync(2), or fdatasync(2).
  void sync(const FileName& file, bool data_only, const OnInterrupt& on_interrupt = {});

  DriverStats stats();
  // Keep-alives of ended transfers that only the owner may drop. Call often, drop outside every
  // lock.
  std::vector<std::unique_ptr<KeepAlive>> take_retired();

  // Waits, releases everything and throws what wait() would have. Idempotent.
  void close(const OnInterrupt& on_interrupt = {});
  bool is_closed() const { return is_closed_.load(); }

  // Around a fork in the parent, and in the child: see Note [Forked handles].
  void before_fork();
  void after_fork();
  void abandon_in_child();

 private:
  void check_process() const;
  // The driver for the length of a call, or nullptr when closed. No lock is held over a call:
  // Python code, which may run in it, may close the handle.
  std::shared_ptr<Driver> driver_or_none();
  std::shared_ptr<Driver> driver();  // throws when closed
  std::shared_ptr<Transfer> make(Driver& driver, TransferSpec spec, Report report);
  void open(Driver& driver, Transfer& transfer, TransferSpec& spec);
  std::shared_ptr<OpenFile> open_file(const FileName& file, Operation operation);
  // Runs open(), again with fewer descriptors held by us when the process has no more.
  template <typename Open>
  auto with_descriptors(Driver& driver, Open open);
  void note_done(const std::shared_ptr<Transfer>& transfer);
  void note_told(Transfer& transfer);
  void leave_to_wait(Transfer& transfer);
  uint64_t wait_with(Driver& driver, const OnInterrupt& on_interrupt);

  const HandleOptions options_;
  const uint64_t fork_generation_;
  std::string engine_name_;
  std::atomic<bool> is_closed_{false};
  FileCache files_;

  // Guarded by the driver's mutex.
  uint64_t next_sequence_ = 0;
  uint64_t epoch_ = 0;                             // grows with each wait()
  std::map<uint64_t, uint64_t> pending_by_epoch_;  // transfers that wait() covers and are not done
  uint64_t ended_ = 0;                             // such transfers that ended since the last wait
  std::map<uint64_t, std::exception_ptr> failures_;       // by sequence, not thrown yet
  std::map<uint64_t, std::shared_ptr<Transfer>> untold_;  // with a watch: see Note [Told ends]
  std::vector<std::unique_ptr<KeepAlive>> retired_;

  std::mutex driver_mutex_;  // for the pointer only
  std::shared_ptr<Driver> driver_;
};

}  // namespace locked_tensor
