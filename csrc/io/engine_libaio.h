// Kernel AIO by its five system calls: direct I/O where io_uring is not to be had.
#pragma once

#include <memory>

#include "io/engine.h"

namespace locked_tensor {

// Throws KernelError: EAGAIN when fs.aio-max-nr leaves no room for even one request, ENOSYS, EPERM.
std::unique_ptr<Engine> make_libaio_engine(size_t depth);

}  // namespace locked_tensor
