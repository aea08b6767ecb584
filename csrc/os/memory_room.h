// How much memory the machine has, and how much of it can still be had.
#pragma once

#include <cstdint>

namespace locked_tensor {

// Bytes, read from /proc/meminfo at each call (tens of microseconds); both are the largest number
// where the kernel does not say.
struct MemoryRoom {
  uint64_t total = UINT64_MAX;
  uint64_t available = UINT64_MAX;  // without pushing anybody out for good: MemAvailable + SwapFree
};
MemoryRoom memory_room();

}  // namespace locked_tensor
