// What an address of this process is mapped from.
#pragma once

namespace locked_tensor {

struct Mapping {
  bool is_shared = false;  // MAP_SHARED
  bool is_file = false;    // has a file behind it (tmpfs too)
};

// Asks /proc/self/maps; slow. An address that nothing is mapped at is neither.
Mapping mapping_of(const void* address);

}  // namespace locked_tensor
