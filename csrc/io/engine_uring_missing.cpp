// Built in the place of engine_uring.cpp and uring_buffers.cpp where liburing's headers are
// missing.
#include <cerrno>

#include "io/engine_uring.h"
#include "os/status.h"

namespace locked_tensor {

bool is_uring_built_in() {
  return false;
}

std::unique_ptr<Engine> make_uring_engine(size_t) {
  throw KernelError(EOPNOTSUPP, "use io_uring: built without liburing");
}

}  // namespace locked_tensor
