// UniqueFd: a file descriptor with one owner.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>

namespace locked_tensor {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset(std::exchange(other.fd_, -1));
    }
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// open(2) with O_CLOEXEC and EINTR retried; throws KernelError naming the path.
UniqueFd open_file(const std::string& path, int flags, mode_t mode = 0666);

}  // namespace locked_tensor
