#include "handle/driver.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "handle/edge_pages.h"
#include "handle/validate.h"
#include "os/align.h"
#include "os/fork.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

using Clock = std::chrono::steady_clock;

// A thread with empty hands looks up this often, for signals and deadlines.
constexpr auto kLookUp = std::chrono::milliseconds(100);
// Completions taken from the engine at once.
constexpr size_t kReapBatch = 64;
// A transfer up to this size is copied by the thread that starts it: a hand-off costs as much.
constexpr uint64_t kInlineBytes = uint64_t{256} << 10;
// The last few staged reads are left to the thread that waits for them.
constexpr uint64_t kStagedReadsLeftToWaiter = 4;
// Results in a row that move nothing, or engine refusals, before it counts as failure.
constexpr uint32_t kMostFruitlessTries = 64;
constexpr uint32_t kMostRefusals = 10000;

CutRules rules_of(const HandleOptions& options, uint64_t chunk_bytes) {
  const uint64_t page = page_bytes();
  const uint64_t most = align_down(kMaxRequestBytes, page);
  const uint64_t block = std::clamp(align_up(options.block_size_bytes, page), page, most);
  return CutRules{block, chunk_bytes, options.vector_run_bytes};
}

const char* verb(Operation operation) {
  return operation == Operation::kRead ? "read" : "write";
}

KernelError transfer_error(int errno_value, const Transfer& transfer, uint64_t bytes,
                           uint64_t offset) {
  return KernelError(errno_value,
                     std::string(verb(transfer.operation)) + " " + std::to_string(bytes) +
                         " bytes at offset " + std::to_string(offset),
                     transfer.file->path());
}

// What the kernel says of memory that it cannot touch itself, said before we copy.
void check_touchable(const Transfer& transfer, const Layout& layout, const Cut& cut,
                     uint64_t file_offset) {
  const Access access = transfer.operation == Operation::kRead ? Access::kWrite : Access::kRead;
  if (!layout.is_touchable(cut.offset_bytes, cut.length_bytes, access)) {
    throw transfer_error(EFAULT, transfer, cut.length_bytes, file_offset);
  }
}

}  // namespace

Driver::Driver(const HandleOptions& options, std::unique_ptr<Engine> engine, OnDone on_done)
    : options_(options),
      staging_(options.block_size_bytes, options.staging_bytes),
      rules_(rules_of(options, staging_.chunk_bytes())),
      fork_generation_(fork_generation()),
      engine_(std::move(engine)),
      depth_(std::min<uint64_t>(options.queue_depth, engine_->capacity())),
      on_done_(std::move(on_done)),
      fixed_buffers_(*engine_) {}

Driver::~Driver() {
  LT_CHECK(fork_generation_ == fork_generation(), "a forked child leaks its parent's driver");
  drain();
  {
    Lock lock(mutex_);
    is_stopping_ = true;
    worker_wakes_.notify_all();
  }
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void Driver::abandon_in_child() {
  engine_.reset();
}

DriverStats Driver::stats() {
  Lock lock(mutex_);
  return stats_;
}

void Driver::notify(int event_fd) {
  UniqueFd own;
  if (event_fd >= 0) {
    own.reset(::fcntl(event_fd, F_DUPFD_CLOEXEC, 0));
    if (!own.is_open()) {
      throw_errno("duplicate an eventfd");
    }
  }
  const int result = engine_->notify(own.get());
  if (result != 0) {
    throw KernelError(-result, std::string("give an eventfd to the engine ") + engine_->name());
  }
  Lock lock(mutex_);
  event_fd_ = own.get();
  if (own.is_open()) {
    event_fds_.push_back(std::move(own));
  }
  announce();
}

void Driver::start(std::vector<std::shared_ptr<Transfer>> transfers, bool is_caller_driving) {
  Lock lock(mutex_);
  for (std::shared_ptr<Transfer>& transfer : transfers) {
    if (live_ >= options_.max_pending_transfers) {
      lock.unlock();
      drive([this] { return live_ < options_.max_pending_transfers ? 0 : 1; });
      lock.lock();
    }
    ++live_;
    transfer->is_queued = true;
    backlog_.push_back(std::move(transfer));
  }
  if (is_caller_driving && options_.intra_op_parallelism == 1) {
    return;
  }
  ++busy_threads_;
  while (submit_some(lock, true)) {
  }
  if (2 * in_flight_ >= depth_ && in_engine_ > 0 && !is_reaping_) {
    bool was_interrupted = false;
    reap(lock, 0, 0, &was_interrupted);
    while (submit_some(lock, true)) {
    }
  }
  --busy_threads_;
  announce();
}

bool Driver::drive(const Needed& needed, int64_t timeout_ns, const OnInterrupt& on_interrupt) {
  const Clock::time_point deadline =
      Clock::now() + std::chrono::nanoseconds(std::max<int64_t>(timeout_ns, 0));
  Lock lock(mutex_);
  struct Presence {
    Driver& driver;
    explicit Presence(Driver& d) : driver(d) { ++d.drivers_, ++d.busy_threads_; }
    ~Presence() { --driver.drivers_, --driver.busy_threads_, driver.announce(); }
  } presence(*this);
  while (true) {
    const uint64_t still_needed = needed();
    if (still_needed == 0) {
      return true;
    }
    int64_t remaining_ns = -1;
    if (timeout_ns >= 0) {
      remaining_ns =
          std::max<int64_t>(0, std::chrono::nanoseconds(deadline - Clock::now()).count());
    }
    bool was_interrupted = false;
    const bool did_something = step(lock, still_needed, remaining_ns, &was_interrupted);
    if (was_interrupted && on_interrupt) {
      lock.unlock();
      try {
        on_interrupt();
      } catch (...) {
        lock.lock();
        throw;
      }
      lock.lock();
    }
    if (!did_something && timeout_ns >= 0 && Clock::now() >= deadline) {
      return needed() == 0;
    }
  }
}

void Driver::drain() {
  drive([this] { return live_ == 0 ? 0 : 1; });
}

bool Driver::step(Lock& lock, uint64_t needed, int64_t timeout_ns, bool* was_interrupted) {
  if (scatter_one(lock) || submit_some(lock, false)) {
    return true;
  }
  if (in_engine_ > 0 && !is_reaping_) {
    return reap(lock, completions_to_wait_for(needed), timeout_ns, was_interrupted);
  }
  // Another thread has in its hands what is left.
  was_turned_away_ = is_reaping_;
  auto wait = std::chrono::nanoseconds(kLookUp);
  if (timeout_ns >= 0) {
    wait = std::min(wait, std::chrono::nanoseconds(timeout_ns));
  }
  changed_.wait_for(lock, wait);
  *was_interrupted = true;
  return false;
}

uint64_t Driver::completions_to_wait_for(uint64_t needed) const {
  uint64_t count = std::min<uint64_t>(needed, 32);
  if (!backlog_.empty() || !ready_.empty()) {
    count = std::min<uint64_t>(4, in_flight_ / 8);  // refill while most are still on their way
  }
  if (staged_reads_ > 0 || busy_threads_ > 1) {
    count = 1;
  }
  return std::clamp<uint64_t>(count, 1, static_cast<uint64_t>(in_engine_));
}

// --- handing over -------------------------------------------------------------------------------

bool Driver::submit_some(Lock& lock, bool is_inline) {
  bool did_something = false;
  const uint64_t most = options_.single_submit ? 1 : depth_;
  while (in_flight_ + ready_.size() < depth_ && ready_.size() < most && cut_next(lock, is_inline)) {
    did_something = true;
  }
  if (ready_.empty() || in_flight_ >= depth_ || (is_inline && submitting_threads_ > 0)) {
    return did_something;  // whoever is submitting takes them along with what else has come
  }
  const size_t count = std::min({ready_.size(), depth_ - in_flight_, most});
  std::vector<Request> requests;
  requests.reserve(count);
  std::vector<uint32_t> indices(ready_.begin(), ready_.begin() + count);
  ready_.erase(ready_.begin(), ready_.begin() + count);
  const bool is_quiet = event_fd_ < 0;
  for (uint32_t index : indices) {
    requests.push_back(request_of(index));
    pieces_[index].is_quiet = is_quiet;
  }
  in_flight_ += count;
  const uint32_t refusals = refusals_;
  ++submitting_threads_;
  lock.unlock();
  if (refusals > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(10 * std::min(refusals, 100u)));
  }
  const int64_t accepted = engine_->submit(requests);
  lock.lock();
  --submitting_threads_;
  const size_t taken = accepted > 0 ? static_cast<size_t>(accepted) : 0;
  in_engine_ += taken;
  quiet_ += is_quiet ? static_cast<int64_t>(taken) : 0;
  in_flight_ -= count - taken;
  stats_.requests += taken;
  if (taken > 0) {
    refusals_ = 0;
  }
  if (taken < count) {
    const int errno_value = accepted < 0 ? static_cast<int>(-accepted) : EAGAIN;
    const bool is_passing = errno_value == EAGAIN || errno_value == EBUSY || errno_value == EINTR;
    if (is_passing && ++refusals_ < kMostRefusals) {
      ready_.insert(ready_.begin(), indices.begin() + taken, indices.end());
    } else {
      for (size_t i = taken; i < count; ++i) {
        const Piece& piece = pieces_[indices[i]];
        fail_piece(lock, indices[i],
                   std::make_exception_ptr(transfer_error(
                       errno_value, *piece.transfer, piece.cut.length_bytes, piece.file_offset)));
      }
    }
  }
  return did_something || taken > 0 || in_engine_ <= 0;
}

bool Driver::cut_next(Lock& lock, bool is_inline) {
  if (!backlog_.empty()) {
    const std::shared_ptr<Transfer> transfer = backlog_.front();
    while (transfer->has_more() && transfer->parts[transfer->part_index].is_finished()) {
      ++transfer->part_index;
    }
    if (!transfer->has_more()) {
      backlog_.pop_front();
      transfer->is_queued = false;
      end_if_last(lock, transfer);
      return true;  // somebody may be waiting for just that
    }
    Part& part = transfer->parts[transfer->part_index];
    int32_t slot = -1;
    const Cut cut = fit_to_slot(part, transfer->file->alignment(), part.peek(rules_), &slot);
    if (cut.road == Road::kStaged) {
      if ((is_inline && transfer->bytes > kInlineBytes) || !staging_.reserve()) {
        return false;
      }
    }
    const uint64_t file_offset = part.file_offset() + cut.offset_bytes;
    part.advance(cut.length_bytes);
    ++transfer->pieces_out;
    if (cut.is_edge_write) {
      write_edge(lock, transfer, part, cut);
      return true;
    }
    const uint32_t index = new_piece();
    Piece& piece = pieces_[index];
    piece.transfer = transfer;
    piece.layout = &part.layout();
    piece.cut = cut;
    piece.file_offset = file_offset;
    piece.slot = slot;
    prepare(lock, index);
    return true;
  }
  return false;
}

// Finds the fixed buffer of a cut that moves locked memory itself, and shortens the cut to stay in
// it.
Cut Driver::fit_to_slot(const Part& part, const DioAlignment& alignment, Cut cut, int32_t* slot) {
  if (!part.is_locked() || (cut.road != Road::kDirect && cut.road != Road::kVectored)) {
    return cut;
  }
  if (cut.road == Road::kVectored && !engine_->has_fixed_vectors()) {
    return cut;
  }
  std::byte* first = nullptr;
  std::byte* end = nullptr;
  part.layout().for_each_run(cut.offset_bytes, cut.length_bytes,
                             [&](std::byte* run, uint64_t bytes) {
                               first = first == nullptr ? run : std::min(first, run);
                               end = std::max(end, run + bytes);
                             });
  const FixedBuffers::Place place = fixed_buffers_.find(first);
  if (static_cast<uint64_t>(end - first) <= place.bytes) {
    *slot = place.slot;
    return cut;
  }
  const uint64_t unit = std::max(alignment.memory_bytes, alignment.offset_bytes);
  const uint64_t within = align_down(place.bytes, unit);
  if (cut.road == Road::kDirect && within > 0) {
    cut.length_bytes = within;
    *slot = place.slot;
  }
  return cut;
}

// Gives the piece its descriptor and memory, filled if it is a staged write, and queues it.
void Driver::prepare(Lock& lock, uint32_t index) {
  // pieces_ may grow while the mutex is away: nothing of it is referred to meanwhile.
  const std::shared_ptr<Transfer> transfer = pieces_[index].transfer;
  const Layout& layout = *pieces_[index].layout;
  const Cut cut = pieces_[index].cut;
  const uint64_t file_offset = pieces_[index].file_offset;
  int fd = -1;
  std::byte* memory = nullptr;
  std::exception_ptr failure;
  const bool is_staged = cut.road == Road::kStaged;
  if (cut.is_direct && !is_staged) {
    fd = transfer->file->direct_fd();
  } else {
    lock.unlock();
    try {
      if (is_staged) {
        memory = staging_.take();
      }
      fd = cut.is_direct ? transfer->file->direct_fd() : transfer->file->buffered_fd();
      if (is_staged && transfer->operation == Operation::kWrite) {
        check_touchable(*transfer, layout, cut, file_offset);
        layout.gather(cut.offset_bytes, cut.length_bytes, memory);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
  }
  Piece& piece = pieces_[index];
  piece.fd = fd;
  piece.memory = memory;
  if (is_staged && memory != nullptr && cut.is_direct) {
    const FixedBuffers::Place place = fixed_buffers_.find(memory);
    piece.slot = cut.length_bytes <= place.bytes ? place.slot : -1;
  }
  if (!is_staged && cut.road != Road::kVectored) {
    piece.memory = layout.data() + cut.offset_bytes;
  }
  if (is_staged && transfer->operation == Operation::kRead) {
    ++staged_reads_;
  }
  if (failure != nullptr) {
    fail_piece(lock, index, failure);
  } else {
    ready_.push_back(index);
  }
}

Request Driver::request_of(uint32_t index) {
  Piece& piece = pieces_[index];
  Request request;
  request.operation = piece.transfer->operation;
  request.fd = piece.fd;
  request.length_bytes = piece.cut.length_bytes - piece.done_bytes;
  request.offset_bytes = piece.file_offset + piece.done_bytes;
  request.id = index;
  request.buffer_slot = piece.slot;
  if (piece.cut.road != Road::kVectored) {
    request.buffer = piece.memory + piece.done_bytes;
    return request;
  }
  piece.vectors.clear();
  piece.layout->for_each_run(piece.cut.offset_bytes + piece.done_bytes, request.length_bytes,
                             [&](std::byte* run, uint64_t bytes) {
                               piece.vectors.push_back(iovec{run, bytes});
                             });
  request.vectors = piece.vectors.data();
  request.vector_count = static_cast<uint32_t>(piece.vectors.size());
  return request;
}

// Writes a part of a page with one system call, under the page's lock: see Note [Edge pages].
void Driver::write_edge(Lock& lock, const std::shared_ptr<Transfer>& transfer, const Part& part,
                        const Cut& cut) {
  const uint64_t offset = part.file_offset() + cut.offset_bytes;
  lock.unlock();
  std::exception_ptr failure;
  Road road{};
  try {
    road = write_edge_page(*transfer->file, part.layout(), cut.offset_bytes, cut.length_bytes,
                           offset, part.is_locked());
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  if (failure != nullptr) {
    fail(transfer, failure, offset);
  } else {
    count_bytes(road, cut.length_bytes);
  }
  --transfer->pieces_out;
  end_if_last(lock, transfer);
}

// --- taking back --------------------------------------------------------------------------------

bool Driver::reap(Lock& lock, uint64_t wait_for, int64_t timeout_ns, bool* was_interrupted) {
  Completion completions[kReapBatch];
  is_reaping_ = true;
  lock.unlock();
  const int64_t count =
      engine_->reap(completions, std::min<uint64_t>(wait_for, kReapBatch), timeout_ns);
  lock.lock();
  is_reaping_ = false;
  if (std::exchange(was_turned_away_, false)) {
    // Who polls comes after a signal, and found this thread at it, perhaps too late for what had
    // come.
    signal();
  }
  *was_interrupted = count == -EINTR || (count == 0 && wait_for > 0);
  LT_CHECK(count >= 0 || count == -EINTR || count == -ETIME || count == -EAGAIN,
           "the engine " + std::string(engine_->name()) + " cannot be reaped: errno " +
               std::to_string(-count));
  if (count > 0) {
    // All at once: taking one may give the mutex back, and then another thread may reap.
    in_engine_ -= count;
    in_flight_ -= static_cast<uint64_t>(count);
  }
  for (int64_t i = 0; i < count; ++i) {
    take_completion(lock, completions[i]);
  }
  announce();
  return count > 0;
}

void Driver::take_completion(Lock& lock, const Completion& completion) {
  const uint32_t index = static_cast<uint32_t>(completion.id);
  LT_CHECK(index < pieces_.size() && pieces_[index].transfer != nullptr,
           "a completion belongs to a piece on its way");
  Piece& piece = pieces_[index];
  quiet_ -= piece.is_quiet ? 1 : 0;
  Transfer& transfer = *piece.transfer;
  const int64_t result = completion.result;
  const uint64_t offset = piece.file_offset + piece.done_bytes;
  const uint64_t left = piece.cut.length_bytes - piece.done_bytes;
  // ECANCELED: the thread that submitted it has ended, and io_uring gave up what it had queued for
  // it.
  const bool is_passing = result == -EINTR || result == -EAGAIN || result == -ECANCELED;
  if (is_passing && piece.fruitless_tries < kMostRefusals) {
    refusals_ = std::max(refusals_, piece.fruitless_tries);  // the longer in vain, the slower again
    return hand_over_again(piece, index, false);
  }
  if (result == -EFAULT && piece.slot >= 0) {
    piece.slot = -1;  // the slot was cleared meanwhile: Note [Fixed buffers]
    return hand_over_again(piece, index, true);
  }
  if (result < 0) {
    return fail_piece(
        lock, index,
        std::make_exception_ptr(transfer_error(static_cast<int>(-result), transfer, left, offset)));
  }
  LT_CHECK(static_cast<uint64_t>(result) <= left, "a request moves no more than it asked for");
  const bool is_read = transfer.operation == Operation::kRead;
  if (static_cast<uint64_t>(result) == left) {
    piece.done_bytes = piece.cut.length_bytes;
    if (is_read && piece.cut.road == Road::kStaged) {
      to_scatter_.push_back(index);
    } else {
      end_piece(lock, index);
    }
    return;
  }
  // Short. A direct request resumes at a multiple of its alignment, so it may repeat some bytes.
  const DioAlignment& alignment = transfer.file->alignment();
  const uint64_t unit =
      piece.cut.is_direct ? std::max(alignment.memory_bytes, alignment.offset_bytes) : uint64_t{1};
  const uint64_t resumed = align_down(piece.done_bytes + result, unit);
  const bool made_progress = resumed > piece.done_bytes;
  if (result == 0 || (!made_progress && piece.fruitless_tries >= kMostFruitlessTries)) {
    if (is_read) {
      const uint64_t found = offset + result - transfer.file_begin();
      return fail_piece(lock, index,
                        std::make_exception_ptr(ShortRead(
                            transfer.bytes, found, transfer.file_begin(), transfer.file->path())));
    }
    return fail_piece(lock, index,
                      std::make_exception_ptr(transfer_error(EIO, transfer, left, offset)));
  }
  piece.done_bytes = resumed;
  hand_over_again(piece, index, made_progress);
}

void Driver::hand_over_again(Piece& piece, uint32_t index, bool made_progress) {
  piece.fruitless_tries = made_progress ? 0 : piece.fruitless_tries + 1;
  ++stats_.retries;
  ready_.push_back(index);
}

bool Driver::scatter_one(Lock& lock) {
  if (to_scatter_.empty()) {
    return false;
  }
  const uint32_t index = to_scatter_.front();
  to_scatter_.pop_front();
  const std::shared_ptr<Transfer> transfer = pieces_[index].transfer;
  const Layout& layout = *pieces_[index].layout;
  const Cut cut = pieces_[index].cut;
  const uint64_t file_offset = pieces_[index].file_offset;
  const std::byte* chunk = pieces_[index].memory;
  lock.unlock();
  std::exception_ptr failure;
  try {
    check_touchable(*transfer, layout, cut, file_offset);
    layout.scatter(cut.offset_bytes, cut.length_bytes, chunk);
  } catch (...) {
    failure = std::current_exception();  // memory that is not there, or a device refused the copy
  }
  lock.lock();
  if (failure != nullptr) {
    fail_piece(lock, index, failure);
  } else {
    end_piece(lock, index);
  }
  return true;
}

void Driver::fail_piece(Lock& lock, uint32_t index, std::exception_ptr error) {
  Piece& piece = pieces_[index];
  const std::shared_ptr<Transfer> transfer = piece.transfer;
  fail(transfer, std::move(error), piece.file_offset + piece.done_bytes);
  end_piece(lock, index);
}

void Driver::fail(const std::shared_ptr<Transfer>& transfer, std::exception_ptr error,
                  uint64_t file_offset) {
  transfer->fail(std::move(error), file_offset);
  if (transfer->is_queued) {
    transfer->is_queued = false;
    std::erase(backlog_, transfer);
  }
}

void Driver::end_piece(Lock& lock, uint32_t index) {
  Piece& piece = pieces_[index];
  const std::shared_ptr<Transfer> transfer = std::move(piece.transfer);
  if (piece.cut.road == Road::kStaged) {
    if (piece.memory != nullptr) {
      staging_.give_back(piece.memory);
    }
    staged_reads_ -= transfer->operation == Operation::kRead ? 1 : 0;
  }
  if (piece.done_bytes == piece.cut.length_bytes) {
    count_bytes(piece.cut.road, piece.cut.length_bytes);
  }
  piece = Piece{};
  free_pieces_.push_back(index);
  --transfer->pieces_out;
  end_if_last(lock, transfer);
}

void Driver::count_bytes(Road road, uint64_t bytes) {
  switch (road) {
    case Road::kDirect:
    case Road::kVectored:
      stats_.bytes_direct += bytes;
      break;
    case Road::kStaged:
      stats_.bytes_bounced += bytes;
      break;
    case Road::kBuffered:
      stats_.bytes_buffered += bytes;
      break;
  }
}

void Driver::end_if_last(Lock& lock, const std::shared_ptr<Transfer>& transfer) {
  if (transfer->pieces_out > 0 || transfer->is_queued || transfer->is_ending) {
    return;
  }
  transfer->is_ending = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    if (transfer->failure == nullptr && transfer->validates) {
      validate(*transfer);
    }
    transfer->claim.finish(transfer->written_end());
    if (transfer->failure == nullptr && transfer->is_durable) {
      transfer->file->make_durable(
          [this](int fd, bool data_only) { return engine_->sync(fd, data_only); });
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (transfer->keep_alive != nullptr && transfer->keep_alive->is_free_threaded()) {
    transfer->keep_alive.reset();
  }
  // A ticket may outlive its transfer by far: it holds no descriptor.
  transfer->read_back.reset();
  transfer->claim = SizeClaim();
  transfer->file.reset();
  lock.lock();
  if (failure != nullptr) {
    transfer->fail(failure, transfer->file_begin());
  }
  transfer->check_not_moved();
  transfer->is_done = true;
  --live_;
  ++stats_.operations;
  on_done_(transfer);
  changed_.notify_all();
  signal();
}

// Has whoever polls the eventfd come and look.
void Driver::signal() {
  if (event_fd_ >= 0) {
    // Fails only when the counter is full, and then the reader has been told.
    static_cast<void>(::eventfd_write(event_fd_, 1));
  }
}

uint32_t Driver::new_piece() {
  if (free_pieces_.empty()) {
    pieces_.emplace_back();
    return static_cast<uint32_t>(pieces_.size() - 1);
  }
  const uint32_t index = free_pieces_.back();
  free_pieces_.pop_back();
  return index;
}

// --- workers ------------------------------------------------------------------------------------

bool Driver::has_worker_work() const {
  return !backlog_.empty() || (!ready_.empty() && submitting_threads_ == 0) ||
         !to_scatter_.empty() || staged_reads_ > kStagedReadsLeftToWaiter ||
         (event_fd_ >= 0 && quiet_ > 0);
}

// Tells other threads that there may be work for them.
void Driver::announce() {
  if (busy_threads_ > 0) {
    changed_.notify_all();
  }
  const bool needs_workers = drivers_ == 0 || options_.intra_op_parallelism > 1;
  if (!needs_workers || is_stopping_ || !has_worker_work()) {
    return;
  }
  if (workers_.empty()) {
    for (uint64_t i = 0; i < options_.intra_op_parallelism; ++i) {
      workers_.emplace_back([this] { work(); });
    }
  }
  worker_wakes_.notify_all();
}

void Driver::work() {
  Lock lock(mutex_);
  while (!is_stopping_) {
    if (!has_worker_work()) {
      worker_wakes_.wait(lock);
      continue;
    }
    ++busy_threads_;
    bool was_interrupted = false;
    step(lock, 1, -1, &was_interrupted);
    --busy_threads_;
  }
}

}  // namespace locked_tensor
