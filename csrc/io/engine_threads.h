// The reference engine: pread and pwrite on threads.
#pragma once

#include <memory>

#include "io/engine.h"

namespace locked_tensor {

// `depth` requests at once on at most `threads` threads, started on first use.
std::unique_ptr<Engine> make_threads_engine(size_t depth, size_t threads);

}  // namespace locked_tensor
