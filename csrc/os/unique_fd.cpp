#include "os/unique_fd.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "os/status.h"

namespace locked_tensor {

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) {
    ::close(fd_);  // close(2): the descriptor is gone whatever it returns
  }
  fd_ = fd;
}

UniqueFd open_file(const std::string& path, int flags, mode_t mode) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    throw_errno("open", path);
  }
  return UniqueFd(fd);
}

}  // namespace locked_tensor
