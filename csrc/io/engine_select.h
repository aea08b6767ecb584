// Which engines this machine can run, best first, and why not the others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/engine.h"

namespace locked_tensor {

struct EngineInfo {
  std::string name;  // "io_uring", "libaio", "threads"
  bool usable = false;
  std::string reason;  // when not usable: what the kernel said and the remedy; else what was found
};

// Probes at each call (limits and seccomp filters change); milliseconds.
std::vector<EngineInfo> engines();

// Makes the named engine, or for "auto" the best that can be made. Throws std::invalid_argument for
// an unknown name, KernelError when the named engine is refused. `depth` is in 1..32768.
std::unique_ptr<Engine> make_engine(const std::string& name, size_t depth, size_t threads);

}  // namespace locked_tensor
