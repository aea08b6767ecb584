// Request and Completion: what the handle says to an engine and hears back.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace locked_tensor {

enum class Operation : uint8_t { kRead, kWrite };

// One positioned transfer. The engine keeps no copy of what `buffer` or `vectors` point to: they
// stay valid until the completion is reaped. length_bytes is at most kMaxRequestBytes.
struct Request {
  Operation operation = Operation::kRead;
  int fd = -1;
  std::byte* buffer = nullptr;
  uint64_t length_bytes = 0;
  uint64_t offset_bytes = 0;  // in the file
  uint64_t id = 0;            // the caller's; comes back in the completion
  int32_t buffer_slot = -1;   // fixed buffer that holds the memory (see Engine::set_buffer), or -1
  const iovec* vectors = nullptr;  // when set, the memory is these runs and `buffer` is unused
  uint32_t vector_count = 0;
};

// Linux moves at most this in one call (MAX_RW_COUNT, read(2)).
constexpr uint64_t kMaxRequestBytes = 0x7ffff000;

struct Completion {
  uint64_t id = 0;
  int64_t result = 0;  // bytes moved, or -errno
};

}  // namespace locked_tensor
