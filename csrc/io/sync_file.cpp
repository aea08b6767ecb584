#include "io/sync_file.h"

#include <unistd.h>

#include <cerrno>

namespace locked_tensor {

int sync_file(int fd, bool data_only) {
  int result;
  do {
    result = data_only ? ::fdatasync(fd) : ::fsync(fd);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : -errno;
}

}  // namespace locked_tensor
