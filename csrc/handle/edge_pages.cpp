#include "handle/edge_pages.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#include "os/align.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// The lock of a page: one of a fixed set, shared by hash. Leaked: used until the last thread ends.
std::mutex& page_mutex(const FileId& file, uint64_t offset_bytes) {
  static auto* mutexes = new std::array<std::mutex, 256>;
  const uint64_t page = offset_bytes / page_bytes();
  const uint64_t mixed = (FileIdHash{}(file) + page) * 0x9e3779b97f4a7c15u;
  return (*mutexes)[mixed >> 56];
}

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// One aligned page of this thread, for bytes that do not lie in one aligned run.
std::byte* scratch_page() {
  thread_local std::unique_ptr<std::byte, Free> page(
      static_cast<std::byte*>(std::aligned_alloc(page_bytes(), page_bytes())));
  if (page == nullptr) {
    throw std::bad_alloc();
  }
  return page.get();
}

KernelError write_error(int errno_value, uint64_t bytes, uint64_t offset, const std::string& path) {
  return KernelError(
      errno_value, "write " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset),
      path);
}

void write_fully(int fd, const std::byte* data, uint64_t bytes, uint64_t offset,
                 const std::string& path) {
  while (bytes > 0) {
    const ssize_t result = ::pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (result < 0 && errno == EINTR) {
      continue;
    }
    if (result <= 0) {
      throw write_error(result < 0 ? errno : EIO, bytes, offset, path);
    }
    data += result;
    bytes -= static_cast<uint64_t>(result);
    offset += static_cast<uint64_t>(result);
  }
}

}  // namespace

Road write_edge_page(OpenFile& file, const Layout& layout, uint64_t stream_offset, uint64_t bytes,
                     uint64_t file_offset, bool is_locked) {
  const DioAlignment& alignment = file.alignment();
  const bool is_direct =
      is_aligned(file_offset, alignment.offset_bytes) && is_aligned(bytes, alignment.offset_bytes);
  std::byte* memory = layout.data() + stream_offset;
  const bool is_straight =
      layout.is_contiguous() &&
      (!is_direct || (is_locked && is_aligned(memory, alignment.memory_bytes)));
  if (!is_straight) {
    if (!layout.is_touchable(stream_offset, bytes, Access::kRead)) {
      throw write_error(EFAULT, bytes, file_offset, file.path());
    }
    memory = scratch_page();
    layout.gather(stream_offset, bytes, memory);
  }
  std::lock_guard<std::mutex> lock(page_mutex(file.id(), file_offset));
  if (is_direct) {
    ssize_t result;
    do {
      result = ::pwrite(file.direct_fd(), memory, bytes, static_cast<off_t>(file_offset));
    } while (result < 0 && errno == EINTR);
    if (result == static_cast<ssize_t>(bytes)) {
      return is_straight ? Road::kDirect : Road::kStaged;
    }
    if (result < 0) {
      throw write_error(errno, bytes, file_offset, file.path());
    }
    // Short: the buffered road finishes it.
  }
  write_fully(file.buffered_fd(), memory, bytes, file_offset, file.path());
  return is_straight ? Road::kBuffered : Road::kStaged;
}

}  // namespace locked_tensor
