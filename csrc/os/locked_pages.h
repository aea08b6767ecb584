// LockedPages: whole pages mapped, populated and locked by this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "os/status.h"

namespace locked_tensor {

constexpr size_t kHugePageBytes = size_t{2} << 20;

enum class HugePages : uint8_t {
  kOff,   // ordinary pages (madvise MADV_NOHUGEPAGE)
  kAuto,  // transparent huge pages by madvise, where a whole aligned 2 MiB fits
  k2M,    // the hugetlbfs pool of 2 MiB pages
};

struct PageOptions {
  HugePages huge_pages = HugePages::kAuto;
  int numa_node = -1;  // -1: wherever the kernel puts them

  bool operator==(const PageOptions&) const = default;
};

// Bytes of one page of this kind.
size_t page_size_of(const PageOptions& options);

// RLIMIT_MEMLOCK and VmLck of this process, in bytes; nullopt is unlimited. Read at each call.
// `locked` also counts the hugetlb bytes that LockedPages holds, which VmLck does not show.
struct MemlockLimit {
  std::optional<uint64_t> soft;
  std::optional<uint64_t> hard;
  uint64_t locked = 0;
};
MemlockLimit memlock_limit();
// Bytes that the limit leaves this process to lock; nullopt: as many as there are (no limit, or
// CAP_IPC_LOCK).
std::optional<uint64_t> lockable_bytes();

// Memory could not be locked. The message says how much was asked, what is locked now, the
// limits, errno and the remedy.
class LockRefused : public std::runtime_error {
 public:
  // `kept`: what of it is locked as what, and how to have less of that; may be empty.
  LockRefused(uint64_t bytes_asked, int errno_value, const MemlockLimit& limit,
              const std::string& tried, const std::string& kept = "");

  // The same, telling what is kept.
  LockRefused with_kept(const std::string& kept) const {
    return LockRefused(bytes_asked_, errno_value_, limit_, tried_, kept);
  }

  uint64_t bytes_asked() const { return bytes_asked_; }
  int errno_value() const { return errno_value_; }
  const MemlockLimit& limit() const { return limit_; }

 private:
  uint64_t bytes_asked_;
  int errno_value_;
  MemlockLimit limit_;
  std::string tried_;
};

// Move-only owner of one mapping of whole pages. The order is mmap, madvise, mbind, populate (in
// parallel), mlock; a failure undoes all of it, so that VmLck and RSS are as before.
class LockedPages {
 public:
  LockedPages() = default;
  // `bytes` is rounded up to whole pages (2 MiB pages for k2M). Throws LockRefused when the memory
  // cannot be had or locked, std::invalid_argument for a NUMA node that does not exist.
  LockedPages(size_t bytes, const PageOptions& options);
  LockedPages(LockedPages&& other) noexcept;
  LockedPages& operator=(LockedPages&& other) noexcept;
  ~LockedPages();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  size_t page_size() const { return page_size_of(options_); }
  const PageOptions& options() const { return options_; }

  // Cuts at `offset_bytes` (a multiple of page_size()): this keeps the front, the rest is returned.
  LockedPages split_tail(size_t offset_bytes);
  // Takes over a mapping that begins where this one ends, with equal options.
  void append(LockedPages&& next);

 private:
  LockedPages(std::byte* data, size_t size, const PageOptions& options);
  void release() noexcept;

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  PageOptions options_;
};

// mlock/munlock of memory that somebody else mapped; whole pages. lock_pages throws LockRefused
// and leaves nothing locked that it locked itself.
void lock_pages(void* begin, size_t bytes);
void unlock_pages(void* begin, size_t bytes) noexcept;

// The NUMA nodes that exist, ascending ({0} where the kernel does not say).
std::vector<int> numa_nodes();
// Throws std::invalid_argument, naming those that exist, when this one does not.
void check_numa_node(int64_t node);

}  // namespace locked_tensor
