// What addresses of this process are mapped from, and whether they can be touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace locked_tensor {

// Advice for madvise(2) from Linux 5.14; younger than some build hosts' headers.
constexpr int kPopulateRead = 22;   // MADV_POPULATE_READ
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE

struct Mapping {
  bool is_shared = false;  // MAP_SHARED
  bool is_file = false;    // has a file behind it (tmpfs too)
};

// Asks /proc/self/maps; slow. An address that nothing is mapped at is neither.
Mapping mapping_of(const void* address);

enum class Access : uint8_t { kRead, kWrite };
enum class Touch : uint8_t {
  kSafe,     // every page is there
  kSignal,   // a touch would be a SIGSEGV or SIGBUS
  kUnknown,  // permitted, and the kernel does not tell more
};

// What touching [data, data + bytes) would do now. Brings the pages in, as a touch would: 0.05 us
// a page that is there. kUnknown before Linux 5.14, and of memory without pages (a device's), after
// a look at /proc/self/maps.
Touch try_touch(const void* data, size_t bytes, Access access);

}  // namespace locked_tensor
