// The three voices of an error: the kernel's, the caller's and our own.
//
// The kernel's is KernelError (becomes OSError with errno and filename), the caller's is
// std::invalid_argument (becomes ValueError), our own is InternalError by LT_CHECK, which stays
// alive under NDEBUG.
#pragma once

#include <stdexcept>
#include <string>

namespace locked_tensor {

// The kernel refused: what was tried, on which path (may be empty), and its errno. The path is
// shown behind the sentence, which says "cannot", what was tried and why not.
class KernelError : public std::runtime_error {
 public:
  KernelError(int errno_value, const std::string& tried, const std::string& path = "");

  int errno_value() const { return errno_value_; }
  const std::string& tried() const { return tried_; }
  const std::string& path() const { return path_; }

 private:
  int errno_value_;
  std::string tried_;
  std::string path_;
};

// We were wrong. Never caught inside the house.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Throws KernelError of the calling thread's errno.
[[noreturn]] void throw_errno(const std::string& tried, const std::string& path = "");

// Throws InternalError; LT_CHECK's other half.
[[noreturn]] void fail_check(const char* condition, const char* file, int line,
                             const std::string& message);

// "1.5 GiB", "512 B": a byte count as error messages and tables show it.
std::string format_bytes(unsigned long long bytes);

}  // namespace locked_tensor

// A check of ours. The condition never contains the work.
#define LT_CHECK(condition, message)                                          \
  do {                                                                        \
    if (!(condition)) {                                                       \
      ::locked_tensor::fail_check(#condition, __FILE__, __LINE__, (message)); \
    }                                                                         \
  } while (false)
