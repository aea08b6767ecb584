#include "os/locked_pages.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "os/align.h"
#include "os/mapping.h"
#include "os/memory_room.h"

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif

namespace locked_tensor {

namespace {

// Locked hugetlb bytes: VmLck does not show them.
std::atomic<uint64_t> hugetlb_bytes{0};

// A thread is worth its start from this many bytes on.
constexpr size_t kPopulateShareBytes = size_t{32} << 20;
constexpr size_t kMostPopulateThreads = 8;

// The system calls themselves: under a sanitizer libc's mlock does nothing and says it did.
int kernel_mlock(void* begin, size_t bytes) {
  return static_cast<int>(::syscall(SYS_mlock, begin, bytes));
}
int kernel_munlock(void* begin, size_t bytes) {
  return static_cast<int>(::syscall(SYS_munlock, begin, bytes));
}

std::optional<uint64_t> limit_of(rlim_t limit) {
  if (limit == RLIM_INFINITY) {
    return std::nullopt;
  }
  return limit;
}

std::string show(const std::optional<uint64_t>& limit) {
  return limit ? format_bytes(*limit) : "unlimited";
}

// Of /proc/self/status; 0 where there is no such line.
struct ProcessStatus {
  uint64_t locked_bytes = 0;  // VmLck
  uint64_t capabilities = 0;  // CapEff
};

ProcessStatus process_status() {
  const std::string locked = "VmLck:";
  const std::string capabilities = "CapEff:";
  ProcessStatus found;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(locked)) {
      found.locked_bytes = std::stoull(line.substr(locked.size())) * 1024;
    } else if (line.starts_with(capabilities)) {
      found.capabilities = std::stoull(line.substr(capabilities.size()), nullptr, 16);
      break;  // it comes after
    }
  }
  return found;
}

// Refuses before any page is touched what the limit would refuse after.
void check_limit(size_t bytes) {
  const std::optional<uint64_t> lockable = lockable_bytes();
  if (lockable && bytes > *lockable) {
    throw LockRefused(bytes, ENOMEM, memlock_limit(), "lock");
  }
}

// Pages that are not there are asked of the kernel until it kills somebody: refused before. What is
// small is not worth the look.
void check_room(size_t bytes, uint64_t MemoryRoom::*most) {
  if (bytes < kPopulateShareBytes) {
    return;
  }
  const MemoryRoom room = memory_room();
  if (bytes > room.*most) {
    throw LockRefused(bytes, ENOMEM, memlock_limit(),
                      "lock, where " + format_bytes(room.available) + " of " +
                          format_bytes(room.total) + " of memory are available,");
  }
}

void touch_pages(std::byte* begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += page_bytes()) {
    reinterpret_cast<volatile std::byte*>(begin)[at] = std::byte{0};
  }
}

// 0 or errno. Falls back to touching where the kernel does not know the advice; never for hugetlb,
// where a touch that finds the pool empty is a SIGBUS.
int populate_share(std::byte* begin, size_t bytes, bool may_touch) {
  while (::madvise(begin, bytes, kPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) {
      continue;
    }
    if (errno != EINVAL || !may_touch) {
      return errno;
    }
    touch_pages(begin, bytes);
    return 0;
  }
  return 0;
}

int populate(std::byte* begin, size_t bytes, bool may_touch) {
  const size_t processors = std::max(1u, std::thread::hardware_concurrency());
  const size_t count = std::clamp<size_t>(bytes / kPopulateShareBytes, 1,
                                          std::min(processors, kMostPopulateThreads));
  const size_t share = align_up(bytes / count, kHugePageBytes);
  std::atomic<int> failure{0};
  std::vector<std::thread> threads;
  const auto work = [&](size_t from) {
    const int result = populate_share(begin + from, std::min(share, bytes - from), may_touch);
    if (result != 0) {
      failure = result;
    }
  };
  for (size_t from = share; from < bytes; from += share) {
    threads.emplace_back(work, from);
  }
  work(0);
  for (std::thread& thread : threads) {
    thread.join();
  }
  return failure;
}

void bind_to_node(std::byte* begin, size_t bytes, int node) {
  check_numa_node(node);
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kBits + 1);
  mask.back() = 1ul << (static_cast<size_t>(node) % kBits);
  // The kernel reads one bit less than it is told (mbind(2), "bugs").
  if (::syscall(SYS_mbind, begin, bytes, MPOL_BIND, mask.data(), mask.size() * kBits + 1, 0) != 0 &&
      errno != ENOSYS) {
    throw_errno("bind memory to NUMA node " + std::to_string(node));
  }
}

std::string remedy(int errno_value, const std::string& tried) {
  if (tried.find("hugetlb") != std::string::npos) {
    return "make room with \"echo N > /proc/sys/vm/nr_hugepages\" (N pages of 2 MiB), or ask for "
           "huge_pages=\"auto\"";
  }
  if (tried.find("available") != std::string::npos) {
    return "ask for less, or free some";
  }
  if (errno_value == ENOMEM || errno_value == EAGAIN || errno_value == EPERM) {
    return "raise it with \"ulimit -l\" (or limits.conf), systemd LimitMEMLOCK=infinity, "
           "\"docker run --ulimit memlock=-1\" or CAP_IPC_LOCK; or ask for less";
  }
  return "ask for less";
}

}  // namespace

size_t page_size_of(const PageOptions& options) {
  return options.huge_pages == HugePages::k2M ? kHugePageBytes : page_bytes();
}

MemlockLimit memlock_limit() {
  rlimit limit;
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    throw_errno("read RLIMIT_MEMLOCK");
  }
  return MemlockLimit{limit_of(limit.rlim_cur), limit_of(limit.rlim_max),
                      process_status().locked_bytes + hugetlb_bytes.load()};
}

std::optional<uint64_t> lockable_bytes() {
  constexpr uint64_t kCapIpcLock = uint64_t{1} << 14;  // capabilities(7): escapes the limit
  rlimit limit;
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  const ProcessStatus status = process_status();
  if ((status.capabilities & kCapIpcLock) != 0) {
    return std::nullopt;
  }
  return limit.rlim_cur - std::min<uint64_t>(limit.rlim_cur, status.locked_bytes);
}

LockRefused::LockRefused(uint64_t bytes_asked, int errno_value, const MemlockLimit& limit,
                         const std::string& tried, const std::string& kept)
    : std::runtime_error("cannot " + tried + " " + format_bytes(bytes_asked) + ": " +
                         strerrorname_np(errno_value) + "; RLIMIT_MEMLOCK is " + show(limit.soft) +
                         " (hard limit " + show(limit.hard) + "), " + format_bytes(limit.locked) +
                         " already locked" + (kept.empty() ? "" : ", " + kept) + "; " +
                         remedy(errno_value, tried)),
      bytes_asked_(bytes_asked),
      errno_value_(errno_value),
      limit_(limit),
      tried_(tried) {}

LockedPages::LockedPages(size_t bytes, const PageOptions& options) : options_(options) {
  const bool is_hugetlb = options.huge_pages == HugePages::k2M;
  size_ = align_up(bytes, page_size());
  if (!is_hugetlb) {
    check_limit(size_);
    check_room(size_, &MemoryRoom::available);
  }
  const bool wants_alignment = options.huge_pages == HugePages::kAuto && size_ >= kHugePageBytes;
  const size_t reserve = size_ + (wants_alignment ? kHugePageBytes - page_bytes() : 0);
  const int flags =
      MAP_PRIVATE | MAP_ANONYMOUS | (is_hugetlb ? MAP_HUGETLB | MAP_HUGE_2MB : MAP_NORESERVE);
  void* mapped = ::mmap(nullptr, reserve, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) {
    throw LockRefused(size_, errno, memlock_limit(), is_hugetlb ? "map hugetlb pages for" : "map");
  }
  data_ = static_cast<std::byte*>(mapped);
  if (wants_alignment) {
    std::byte* begin =
        reinterpret_cast<std::byte*>(align_up(reinterpret_cast<uintptr_t>(mapped), kHugePageBytes));
    const size_t before = static_cast<size_t>(begin - data_);
    const size_t after = reserve - before - size_;
    if (before > 0) {
      ::munmap(data_, before);
    }
    if (after > 0) {
      ::munmap(begin + size_, after);
    }
    data_ = begin;
  }
  try {
    if (!is_hugetlb) {
      // Advice: a kernel without transparent huge pages refuses it and nothing is lost.
      ::madvise(data_, size_,
                options.huge_pages == HugePages::kAuto ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
    if (options.numa_node >= 0) {
      bind_to_node(data_, size_, options.numa_node);
    }
    if (const int refused = populate(data_, size_, !is_hugetlb); refused != 0) {
      throw LockRefused(size_, refused, memlock_limit(),
                        is_hugetlb ? "populate hugetlb pages for" : "populate");
    }
    if (kernel_mlock(data_, size_) != 0) {
      throw LockRefused(size_, errno, memlock_limit(), "lock");
    }
  } catch (...) {
    ::munmap(data_, size_);
    data_ = nullptr;
    throw;
  }
  if (is_hugetlb) {
    hugetlb_bytes += size_;
  }
}

LockedPages::LockedPages(std::byte* data, size_t size, const PageOptions& options)
    : data_(data), size_(size), options_(options) {}

LockedPages::LockedPages(LockedPages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      options_(other.options_) {}

LockedPages& LockedPages::operator=(LockedPages&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    options_ = other.options_;
  }
  return *this;
}

LockedPages::~LockedPages() {
  release();
}

void LockedPages::release() noexcept {
  if (data_ == nullptr) {
    return;
  }
  if (options_.huge_pages == HugePages::k2M) {
    hugetlb_bytes -= size_;
  }
  ::munmap(data_, size_);  // unlocks too
  data_ = nullptr;
  size_ = 0;
}

LockedPages LockedPages::split_tail(size_t offset_bytes) {
  LT_CHECK(offset_bytes > 0 && offset_bytes < size_ && is_aligned(offset_bytes, page_size()),
           "pages are cut between pages");
  LockedPages tail(data_ + offset_bytes, size_ - offset_bytes, options_);
  size_ = offset_bytes;
  return tail;
}

void LockedPages::append(LockedPages&& next) {
  LT_CHECK(next.data_ == data_ + size_ && next.options_ == options_,
           "only pages that follow, of the same kind, are appended");
  size_ += std::exchange(next.size_, 0);
  next.data_ = nullptr;
}

void lock_pages(void* begin, size_t bytes) {
  check_limit(bytes);
  check_room(bytes, &MemoryRoom::total);  // some of it may be there already
  if (kernel_mlock(begin, bytes) != 0) {
    const int errno_value = errno;
    kernel_munlock(begin, bytes);  // what was locked before the refusal
    throw LockRefused(bytes, errno_value, memlock_limit(), "lock");
  }
}

void unlock_pages(void* begin, size_t bytes) noexcept {
  kernel_munlock(begin, bytes);
}

std::vector<int> numa_nodes() {
  // "0-1,3"
  std::ifstream online("/sys/devices/system/node/online");
  std::vector<int> nodes;
  for (std::string part; std::getline(online, part, ',');) {
    const size_t dash = part.find('-');
    const int first = std::stoi(part);
    const int last = dash == std::string::npos ? first : std::stoi(part.substr(dash + 1));
    for (int node = first; node <= last; ++node) {
      nodes.push_back(node);
    }
  }
  return nodes.empty() ? std::vector<int>{0} : nodes;
}

void check_numa_node(int64_t node) {
  const std::vector<int> nodes = numa_nodes();
  if (std::find(nodes.begin(), nodes.end(), node) != nodes.end()) {
    return;
  }
  std::string known;
  for (const int each : nodes) {
    known += (known.empty() ? "" : ", ") + std::to_string(each);
  }
  throw std::invalid_argument("numa_node " + std::to_string(node) +
                              " does not exist; this machine has " + known);
}

}  // namespace locked_tensor
