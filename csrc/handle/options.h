// HandleOptions: the settings of one AioHandle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace locked_tensor {

enum class DirectMode : uint8_t {
  kAuto,     // O_DIRECT where the file grants it, else through the page cache
  kRequire,  // refuse files that do not grant it
  kNever,    // always through the page cache
};

struct HandleOptions {
  uint64_t block_size_bytes = uint64_t{1} << 20;  // a transfer is cut into requests of this size
  uint64_t queue_depth = 128;                     // requests in flight at once
  bool single_submit = false;                     // one request a system call
  bool overlap_events = false;                    // reported only: reaping always overlaps
  uint64_t intra_op_parallelism = 1;              // worker threads that share a transfer
  std::string engine = "auto";
  DirectMode direct = DirectMode::kAuto;
  uint64_t staging_bytes = uint64_t{32} << 20;     // locked staging memory at most
  uint64_t vector_run_bytes = uint64_t{64} << 10;  // shortest run that goes vectored, not staged
  uint64_t max_pending_transfers = uint64_t{1} << 16;  // further ones wait for room

  // Throws std::invalid_argument naming the setting and its bounds.
  void check() const;
};

constexpr uint64_t kMaxQueueDepth = 32768;  // io_uring's own (IORING_MAX_ENTRIES)

}  // namespace locked_tensor
