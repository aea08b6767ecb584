#include "handle/aio_handle.h"

#include <fcntl.h>

#include <cerrno>
#include <limits>
#include <set>

#include "io/engine_select.h"
#include "memory/range_registry.h"
#include "os/align.h"
#include "os/fork.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// Note [Forked handles] A child has neither the threads nor the rings of its parent's handles. It
// only closes the inherited descriptors, at once, because they would keep the parent's registered
// pages; the rest (mutexes and condition variables in unknown states) is leaked there.
class LiveHandles {
 public:
  static LiveHandles& process() {
    static LiveHandles* handles =
        new LiveHandles;  // leaked: handles may outlive static destruction
    return *handles;
  }

  void add(AioHandle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    handles_.insert(handle);
  }
  void remove(AioHandle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    handles_.erase(handle);
  }

 private:
  LiveHandles() {
    add_fork_hooks({[this] {
                      mutex_.lock();
                      for (AioHandle* handle : handles_) {
                        handle->before_fork();
                      }
                    },
                    [this] {
                      for (AioHandle* handle : handles_) {
                        handle->after_fork();
                      }
                      mutex_.unlock();
                    },
                    [this] {
                      for (AioHandle* handle : handles_) {
                        handle->abandon_in_child();
                      }
                      handles_.clear();
                      mutex_.unlock();
                    }});
  }

  std::mutex mutex_;
  std::set<AioHandle*> handles_;
};

std::unique_ptr<Engine> engine_for(const HandleOptions& options) {
  options.check();
  return make_engine(options.engine, options.queue_depth, options.intra_op_parallelism);
}

void check_offset(int64_t offset, uint64_t bytes) {
  if (offset < 0) {
    throw std::invalid_argument("file_offset must not be negative, got " + std::to_string(offset));
  }
  if (bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max() - offset)) {
    throw std::invalid_argument("file_offset " + std::to_string(offset) + " plus " +
                                std::to_string(bytes) + " bytes is beyond what a file can hold");
  }
}

// Parts of sectors only go through the page cache.
void check_whole_sectors(const Part& part, const OpenFile& file) {
  const uint64_t sector = file.alignment().offset_bytes;
  if (is_aligned(part.file_offset(), sector) && is_aligned(part.file_end(), sector)) {
    return;
  }
  throw std::invalid_argument(
      "direct=\"require\" moves whole sectors, and " + std::to_string(part.layout().bytes()) +
      " bytes at offset " + std::to_string(part.file_offset()) + " of " + file.path() +
      " are not: make both multiples of " + std::to_string(sector) + ", or use direct=\"auto\"");
}

}  // namespace

TransfersFailed::TransfersFailed(std::vector<std::exception_ptr> failures)
    : std::runtime_error(std::to_string(failures.size()) + " transfers failed"),
      failures_(std::move(failures)) {}

AioHandle::AioHandle(const HandleOptions& options) : AioHandle(options, engine_for(options)) {}

AioHandle::AioHandle(const HandleOptions& options, std::unique_ptr<Engine> engine)
    : options_(options),
      fork_generation_(fork_generation()),
      engine_name_(engine->name()),
      files_(options.direct),
      driver_(std::make_shared<Driver>(
          options, std::move(engine),
          [this](const std::shared_ptr<Transfer>& transfer) { note_done(transfer); })) {
  options_.check();
  LiveHandles::process().add(this);
}

AioHandle::~AioHandle() {
  if (fork_generation_ != fork_generation()) {
    new std::shared_ptr<Driver>(std::move(driver_));  // Note [Forked handles]
    return;
  }
  LiveHandles::process().remove(this);
}

void AioHandle::before_fork() {
  driver_mutex_.lock();
  if (driver_ != nullptr) {
    driver_->before_fork();
  }
}

void AioHandle::after_fork() {
  if (driver_ != nullptr) {
    driver_->after_fork();
  }
  driver_mutex_.unlock();
}

void AioHandle::abandon_in_child() {
  if (driver_ != nullptr) {
    driver_->abandon_in_child();
  }
}

void AioHandle::check_process() const {
  if (fork_generation_ != fork_generation()) {
    throw std::runtime_error(
        "this aio_handle belongs to the parent process; make a new one after fork");
  }
}

std::shared_ptr<Driver> AioHandle::driver_or_none() {
  check_process();
  std::lock_guard<std::mutex> lock(driver_mutex_);
  return driver_;
}

std::shared_ptr<Driver> AioHandle::driver() {
  std::shared_ptr<Driver> driver = driver_or_none();
  if (driver == nullptr || is_closed()) {
    throw std::invalid_argument("the aio_handle is closed");
  }
  return driver;
}

// --- starting -----------------------------------------------------------------------------------

std::shared_ptr<OpenFile> AioHandle::open_file(const FileName& file, Operation operation) {
  if (const int* fd = std::get_if<int>(&file)) {
    return OpenFile::from_descriptor(*fd, operation, options_.direct);
  }
  return files_.acquire(std::get<std::string>(file), operation);
}

template <typename Open>
auto AioHandle::with_descriptors(Driver& driver, Open open) {
  const auto is_out_of_descriptors = [](const KernelError& error) {
    return error.errno_value() == EMFILE || error.errno_value() == ENFILE;
  };
  try {
    return open();
  } catch (const KernelError& error) {
    if (!is_out_of_descriptors(error)) {
      throw;
    }
  }
  files_.clear();
  driver.drain();  // transfers in flight hold descriptors too
  return open();
}

// Opens the file, plans the parts and sizes the file; kernel refusals become the transfer's
// failure.
void AioHandle::open(Driver& driver, Transfer& transfer, TransferSpec& spec) {
  try {
    transfer.file =
        with_descriptors(driver, [&] { return open_file(spec.file, transfer.operation); });
    const uint64_t begin = static_cast<uint64_t>(spec.file_offset_bytes);
    if (transfer.is_durable) {
      with_descriptors(driver, [&] { return transfer.file->prepare_durable(); });
    }
    if (transfer.bytes == 0) {
      return;
    }
    if (transfer.validates) {
      transfer.read_back = with_descriptors(driver, [&] { return transfer.file->open_to_read(); });
    }
    if (transfer.operation == Operation::kRead) {
      const uint64_t size = transfer.file->size_bytes();
      if (begin + transfer.bytes > size) {
        throw ShortRead(transfer.bytes, size > begin ? size - begin : 0, begin,
                        transfer.file->path());
      }
    }
    uint64_t offset = begin;
    bool grows = false;
    bool needs_buffered = false;
    for (Layout& layout : spec.memory) {
      if (layout.bytes() == 0) {
        continue;
      }
      const bool is_locked =
          RangeRegistry::process().contains(layout.data(), layout.extent_bytes());
      Part& part = transfer.parts.emplace_back(std::move(layout), offset, is_locked);
      part.plan(*transfer.file, transfer.operation, driver.rules());
      if (options_.direct == DirectMode::kRequire) {
        check_whole_sectors(part, *transfer.file);
      }
      offset = part.file_end();
      grows = grows || part.has_middle();
      needs_buffered = needs_buffered || part.needs_buffered();
    }
    if (needs_buffered) {
      with_descriptors(driver, [&] { return transfer.file->buffered_fd(); });
    }
    if (transfer.operation == Operation::kWrite) {
      try {
        transfer.claim = SizeClaim(transfer.file, begin, offset, grows);
      } catch (const KernelError& error) {
        if (error.errno_value() != ENOSPC) {
          throw;
        }
        files_.drop_unlinked();  // their space is freed now
        transfer.claim = SizeClaim(transfer.file, begin, offset, grows);
      }
    }
  } catch (const KernelError&) {
    transfer.fail(std::current_exception(), static_cast<uint64_t>(spec.file_offset_bytes));
  } catch (const ShortRead&) {
    transfer.fail(std::current_exception(), static_cast<uint64_t>(spec.file_offset_bytes));
  }
}

std::shared_ptr<Transfer> AioHandle::make(Driver& driver, TransferSpec spec, Report report) {
  auto transfer = std::make_shared<Transfer>();
  transfer->operation = spec.operation;
  transfer->report = report;
  transfer->validates = spec.validates;
  transfer->is_durable = spec.is_durable && spec.operation == Operation::kWrite;
  for (const Layout& layout : spec.memory) {
    transfer->bytes += layout.bytes();
  }
  check_offset(spec.file_offset_bytes, transfer->bytes);
  open(driver, *transfer, spec);
  transfer->keep_alive = std::move(spec.keep_alive);
  transfer->watch = std::move(spec.watch);
  return transfer;
}

std::vector<std::shared_ptr<Transfer>> AioHandle::start_all(std::vector<TransferSpec> specs,
                                                            Report report) {
  const std::shared_ptr<Driver> driver = this->driver();
  std::vector<std::shared_ptr<Transfer>> transfers;
  transfers.reserve(specs.size());
  try {
    for (TransferSpec& spec : specs) {
      transfers.push_back(make(*driver, std::move(spec), report));
    }
  } catch (...) {
    for (const std::shared_ptr<Transfer>& transfer : transfers) {
      transfer->claim.finish(0);  // none of them is started: files are as long as before
    }
    throw;
  }
  {
    std::lock_guard<std::mutex> lock(driver->mutex());
    for (const std::shared_ptr<Transfer>& transfer : transfers) {
      transfer->sequence = next_sequence_++;
      transfer->epoch = epoch_;
      if (report != Report::kCaller) {
        ++pending_by_epoch_[epoch_];
      }
    }
  }
  driver->start(transfers, report == Report::kCaller);
  return transfers;
}

std::shared_ptr<Transfer> AioHandle::start(TransferSpec spec, Report report) {
  std::vector<TransferSpec> specs;
  specs.push_back(std::move(spec));
  return start_all(std::move(specs), report).front();
}

uint64_t AioHandle::run(TransferSpec spec, const OnInterrupt& on_interrupt) {
  const std::shared_ptr<Transfer> transfer = start(std::move(spec), Report::kCaller);
  try {
    wait_for(transfer, -1, on_interrupt);
  } catch (...) {
    leave_to_wait(*transfer);
    throw;
  }
  if (transfer->failure != nullptr) {
    std::rethrow_exception(transfer->failure);
  }
  return transfer->bytes;
}

// A caller that was interrupted goes, and its transfer goes on: wait() is for it as for any other.
void AioHandle::leave_to_wait(Transfer& transfer) {
  std::lock_guard<std::mutex> lock(driver()->mutex());
  if (!transfer.is_done) {
    transfer.report = Report::kWait;
    transfer.epoch = epoch_;
    ++pending_by_epoch_[epoch_];
  } else if (transfer.failure != nullptr) {
    failures_.emplace(transfer.sequence, transfer.failure);
  }
}

// --- waiting ------------------------------------------------------------------------------------

// Note [Told ends] A storage may lose its memory in the very moment in which a read into it ends:
// the old bytes are copied first, then the memory is exchanged, and what arrives in between is
// lost. So a read's memory is watched past its end, until its caller has been told of it and may do
// with the storage what they like.

// Under the driver's mutex, of a transfer that has ended.
void AioHandle::note_told(Transfer& transfer) {
  const bool was_well = transfer.failure == nullptr;
  transfer.check_not_moved();
  transfer.watch.reset();
  if (was_well && transfer.failure != nullptr && transfer.report != Report::kCaller) {
    failures_.emplace(transfer.sequence, transfer.failure);
  }
}

// Under the driver's mutex.
void AioHandle::note_done(const std::shared_ptr<Transfer>& transfer) {
  if (transfer->keep_alive != nullptr) {
    retired_.push_back(std::move(transfer->keep_alive));
  }
  if (transfer->report == Report::kCaller) {
    return;
  }
  const auto pending = pending_by_epoch_.find(transfer->epoch);
  LT_CHECK(pending != pending_by_epoch_.end(), "an ended transfer was pending");
  if (--pending->second == 0) {
    pending_by_epoch_.erase(pending);
  }
  ++ended_;
  if (transfer->failure != nullptr) {
    failures_.emplace(transfer->sequence, transfer->failure);
  } else if (transfer->watch != nullptr) {
    untold_.emplace(transfer->sequence, transfer);
  }
}

uint64_t AioHandle::wait(const OnInterrupt& on_interrupt) {
  return wait_with(*driver(), on_interrupt);
}

uint64_t AioHandle::wait_with(Driver& driver, const OnInterrupt& on_interrupt) {
  uint64_t last_epoch;
  {
    std::lock_guard<std::mutex> lock(driver.mutex());
    last_epoch = epoch_++;
  }
  uint64_t ended = 0;
  std::map<uint64_t, std::exception_ptr> failures;
  driver.drive(
      [&]() -> uint64_t {
        uint64_t pending = 0;
        for (const auto& [epoch, count] : pending_by_epoch_) {
          pending += epoch <= last_epoch ? count : 0;
        }
        if (pending == 0) {
          for (const auto& [sequence, transfer] : untold_) {
            note_told(*transfer);
          }
          untold_.clear();
          ended = std::exchange(ended_, 0);
          failures.swap(failures_);
        }
        return pending;
      },
      -1, on_interrupt);
  files_.drop_unlinked();
  if (!failures.empty()) {
    std::vector<std::exception_ptr> in_order;
    for (auto& [sequence, failure] : failures) {
      in_order.push_back(std::move(failure));
    }
    throw TransfersFailed(std::move(in_order));
  }
  return ended;
}

bool AioHandle::wait_for(const std::shared_ptr<Transfer>& transfer, int64_t timeout_ns,
                         const OnInterrupt& on_interrupt) {
  const std::shared_ptr<Driver> driver = driver_or_none();
  if (driver == nullptr) {
    return true;  // close() has waited for everything
  }
  return driver->drive(
      [&]() -> uint64_t {
        if (!transfer->is_done) {
          return std::max<uint64_t>(1, transfer->pieces_out);
        }
        note_told(*transfer);
        untold_.erase(transfer->sequence);
        return 0;
      },
      timeout_ns, on_interrupt);
}

std::exception_ptr AioHandle::take_failure(const std::shared_ptr<Transfer>& transfer) {
  if (const std::shared_ptr<Driver> driver = driver_or_none()) {
    std::lock_guard<std::mutex> lock(driver->mutex());
    failures_.erase(transfer->sequence);
  }
  return transfer->failure;
}

void AioHandle::poll() {
  if (const std::shared_ptr<Driver> driver = driver_or_none()) {
    driver->drive([] { return 1; }, 0);
  }
}

void AioHandle::notify(int event_fd) {
  driver()->notify(event_fd);
}

void AioHandle::sync(const FileName& file, bool data_only, const OnInterrupt& on_interrupt) {
  const std::shared_ptr<Driver> driver = this->driver();
  UniqueFd own;
  int fd = -1;
  std::string name;
  if (const int* given = std::get_if<int>(&file)) {
    fd = *given;
    name = "<file descriptor " + std::to_string(fd) + ">";
  } else {
    name = std::get<std::string>(file);
    own = locked_tensor::open_file(name, O_RDONLY | O_NONBLOCK);  // a FIFO is refused, not awaited
    fd = own.get();
  }
  driver->drive([&] { return driver->live_transfers() == 0 ? 0 : 1; }, -1, on_interrupt);
  const int result = driver->engine().sync(fd, data_only);
  files_.drop_unlinked();
  if (result != 0) {
    throw KernelError(-result, "fsync", name);
  }
}

// --- ending -------------------------------------------------------------------------------------

DriverStats AioHandle::stats() {
  return driver()->stats();
}

std::vector<std::unique_ptr<KeepAlive>> AioHandle::take_retired() {
  if (fork_generation_ != fork_generation()) {
    return {};
  }
  const std::shared_ptr<Driver> driver = driver_or_none();
  if (driver == nullptr) {
    return std::exchange(retired_, {});
  }
  std::lock_guard<std::mutex> lock(driver->mutex());
  return std::exchange(retired_, {});
}

void AioHandle::close(const OnInterrupt& on_interrupt) {
  if (fork_generation_ != fork_generation()) {
    return;  // nothing here is this process's
  }
  const std::shared_ptr<Driver> driver = driver_or_none();
  if (driver == nullptr) {
    return;
  }
  std::exception_ptr failure;
  try {
    wait_with(*driver, on_interrupt);
  } catch (const TransfersFailed&) {
    failure = std::current_exception();
  }
  is_closed_ = true;
  LiveHandles::process().remove(this);  // a fork no longer finds it
  driver->drain();
  {
    // What is still in a call keeps the driver until it returns.
    std::lock_guard<std::mutex> lock(driver_mutex_);
    driver_.reset();
  }
  files_.clear();
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

}  // namespace locked_tensor
