// io_uring, by liburing: the fastest engine, with fixed buffers.
#pragma once

#include <memory>

#include "io/engine.h"

namespace locked_tensor {

// Throws KernelError when the kernel refuses a ring (EPERM, ENOSYS, ENOMEM, ...), EOPNOTSUPP when
// this build has no liburing or the kernel's rings lack what we need.
std::unique_ptr<Engine> make_uring_engine(size_t depth);

}  // namespace locked_tensor
