#include "io/engine_select.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <stdexcept>

#include "io/engine_libaio.h"
#include "io/engine_threads.h"
#include "io/engine_uring.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// A thread of the threads engine moves about 1 GB/s of ordinary blocks; more than this many only
// wait.
constexpr size_t kMostThreads = 16;

std::unique_ptr<Engine> make_named(const std::string& name, size_t depth, size_t threads) {
  if (name == "io_uring") {
    return make_uring_engine(depth);
  }
  if (name == "libaio") {
    return make_libaio_engine(depth);
  }
  return make_threads_engine(depth, std::max(threads, std::min(depth, kMostThreads)));
}

constexpr const char* kNames[] = {"io_uring", "libaio", "threads"};  // best first

int io_uring_disabled() {
  int value = 0;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> value;
  return value;
}

std::string remedy(const std::string& name, int errno_value) {
  if (name == "io_uring") {
    switch (errno_value) {
      case EPERM:
        return io_uring_disabled() != 0
                   ? "the sysctl kernel.io_uring_disabled is set; \"sysctl -w "
                     "kernel.io_uring_disabled=0\" allows it"
                   : "a seccomp filter forbids it, as containers' default profiles do; "
                     "\"docker run --security-opt seccomp=unconfined\" or a profile that allows "
                     "io_uring_setup, io_uring_enter and io_uring_register";
      case EACCES:
        return "a security module forbids it";
      case ENOSYS:
        return "the kernel has no io_uring (Linux 5.11 has what is needed), or a filter hides it";
      case ENOMEM:
        return "RLIMIT_MEMLOCK leaves no room for a ring; raise it with \"ulimit -l\"";
      case EOPNOTSUPP:
        return is_uring_built_in()
                   ? "Linux 5.11 has what is needed"
                   : "install liburing-dev (Debian) or liburing-devel (Fedora), and in the source "
                     "\"pip install --force-reinstall --no-deps --no-build-isolation .\"";
      default:
        return "";
    }
  }
  if (name == "libaio" && errno_value == EAGAIN) {
    return "fs.aio-max-nr is used up; raise it with \"sysctl -w fs.aio-max-nr=1048576\"";
  }
  return "";
}

EngineInfo probe(const std::string& name) {
  try {
    make_named(name, 1, 1);
    return EngineInfo{name, true, "works"};
  } catch (const KernelError& error) {
    const std::string help = remedy(name, error.errno_value());
    return EngineInfo{name, false, error.what() + (help.empty() ? "" : "; " + help)};
  }
}

}  // namespace

std::vector<EngineInfo> engines() {
  std::vector<EngineInfo> found;
  for (const char* name : kNames) {
    found.push_back(probe(name));
  }
  return found;
}

std::unique_ptr<Engine> make_engine(const std::string& name, size_t depth, size_t threads) {
  if (name != "auto") {
    if (std::find(std::begin(kNames), std::end(kNames), name) == std::end(kNames)) {
      throw std::invalid_argument(
          "engine must be \"auto\", \"io_uring\", \"libaio\" or \"threads\", got \"" + name + "\"");
    }
    try {
      return make_named(name, depth, threads);
    } catch (const KernelError& error) {
      const std::string help = remedy(name, error.errno_value());
      throw KernelError(error.errno_value(),
                        error.tried() + (help.empty() ? "" : " (" + help + ")"));
    }
  }
  for (const char* each : kNames) {
    try {
      return make_named(each, depth, threads);
    } catch (const KernelError&) {
      // engines() tells the reason to whoever asks; the next best serves meanwhile.
    }
  }
  throw InternalError("the threads engine needs nothing and cannot be refused");
}

}  // namespace locked_tensor
