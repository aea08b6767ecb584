#include "os/status.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

namespace locked_tensor {

KernelError::KernelError(int errno_value, const std::string& tried, const std::string& path)
    : std::runtime_error("cannot " + tried + ": " + std::generic_category().message(errno_value) +
                         (path.empty() ? "" : ": " + path)),
      errno_value_(errno_value),
      tried_(tried),
      path_(path) {}

void throw_errno(const std::string& tried, const std::string& path) {
  throw KernelError(errno, tried, path);
}

void fail_check(const char* condition, const char* file, int line, const std::string& message) {
  throw InternalError("locked_tensor is wrong about itself: " + message + " (" + condition +
                      " failed at " + file + ":" + std::to_string(line) + "); please report it");
}

std::string format_bytes(unsigned long long bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) {
    return std::to_string(bytes) + " B";
  }
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace locked_tensor
