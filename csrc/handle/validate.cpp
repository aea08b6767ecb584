#include "handle/validate.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "os/status.h"

namespace locked_tensor {

namespace {

// Small: threads that come and go each leave what they allocated in an arena of their own.
constexpr uint64_t kCompareBytes = uint64_t{64} << 10;

uint64_t read_fully(int fd, std::byte* to, uint64_t bytes, uint64_t offset,
                    const std::string& path) {
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t result = ::pread(fd, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (result < 0 && errno == EINTR) {
      continue;
    }
    if (result < 0) {
      throw_errno("read back", path);
    }
    if (result == 0) {
      break;
    }
    done += static_cast<uint64_t>(result);
  }
  return done;
}

}  // namespace

void validate(const Transfer& transfer) {
  const std::string& path = transfer.file->path();
  std::vector<std::byte> in_file(kCompareBytes);
  std::vector<std::byte> in_memory(kCompareBytes);
  for (const Part& part : transfer.parts) {
    for (uint64_t at = 0; at < part.layout().bytes(); at += kCompareBytes) {
      const uint64_t bytes = std::min(kCompareBytes, part.layout().bytes() - at);
      part.layout().gather(at, bytes, in_memory.data());
      const uint64_t found = read_fully(transfer.read_back.get(), in_file.data(), bytes,
                                        part.file_offset() + at, path);
      const auto end = in_memory.begin() + static_cast<ptrdiff_t>(bytes);
      const auto differs = std::mismatch(in_memory.begin(), end, in_file.begin()).first;
      const auto equal = static_cast<uint64_t>(differs - in_memory.begin());
      if (equal < bytes || found < bytes) {
        throw KernelError(EIO,
                          "validate: file and memory differ at offset " +
                              std::to_string(part.file_offset() + at + std::min(equal, found)),
                          path);
      }
    }
  }
}

}  // namespace locked_tensor
