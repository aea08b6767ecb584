// io_uring, by liburing: the fastest engine, with fixed buffers.
#pragma once

#include <memory>

#include "io/engine.h"

namespace locked_tensor {

// Whether this build has liburing: engine_uring.cpp is in it, else engine_uring_missing.cpp.
bool is_uring_built_in();

// Throws KernelError when the kernel refuses a ring (EPERM, ENOSYS, ENOMEM, ...), EOPNOTSUPP when
// this build has no liburing or the kernel's rings lack what we need.
std::unique_ptr<Engine> make_uring_engine(size_t depth);

}  // namespace locked_tensor
