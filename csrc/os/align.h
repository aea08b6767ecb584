// What a file demands of direct I/O, asked of the kernel, never a constant.
#pragma once

#include <cstddef>
#include <cstdint>

namespace locked_tensor {

// Alignments in bytes. `is_direct` false means that this file is served through the page cache,
// whatever open(O_DIRECT) says (tmpfs accepts the flag and grants nothing).
struct DioAlignment {
  uint32_t memory_bytes = 1;
  uint32_t offset_bytes = 1;
  bool is_direct = false;

  bool operator==(const DioAlignment&) const = default;
};

// Asks statx(STATX_DIOALIGN); where the kernel does not say, a known disk file system's block
// device's logical sector size, else not direct. Throws KernelError when fd cannot be asked.
DioAlignment dio_alignment(int fd);

size_t page_bytes();

constexpr uint64_t align_down(uint64_t value, uint64_t alignment) {
  return value / alignment * alignment;
}
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}
constexpr bool is_aligned(uint64_t value, uint64_t alignment) {
  return value % alignment == 0;
}
inline bool is_aligned(const void* address, uint64_t alignment) {
  return is_aligned(reinterpret_cast<uintptr_t>(address), alignment);
}

}  // namespace locked_tensor
