#include "handle/options.h"

#include <stdexcept>

namespace locked_tensor {

namespace {

void check_between(const char* name, uint64_t value, uint64_t least, uint64_t most) {
  if (value < least || value > most) {
    throw std::invalid_argument(std::string(name) + " must be in " + std::to_string(least) + ".." +
                                std::to_string(most) + ", got " + std::to_string(value));
  }
}

}  // namespace

void HandleOptions::check() const {
  check_between("block_size", block_size_bytes, 1, uint64_t{1} << 40);
  check_between("queue_depth", queue_depth, 1, kMaxQueueDepth);
  check_between("intra_op_parallelism", intra_op_parallelism, 1, 1024);
  check_between("staging_bytes", staging_bytes, uint64_t{1} << 16, uint64_t{1} << 34);
  check_between("vector_run_bytes", vector_run_bytes, 1, uint64_t{1} << 40);
  check_between("max_pending", max_pending_transfers, 1, uint64_t{1} << 32);
}

}  // namespace locked_tensor
