#include "os/mapping.h"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

namespace locked_tensor {

Mapping mapping_of(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    char permissions[5] = "";
    unsigned long inode = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %4s %*x %*s %lu", &begin, &end, permissions, &inode) !=
        4) {
      continue;
    }
    if (begin <= wanted && wanted < end) {
      return Mapping{permissions[3] == 's', inode != 0};
    }
  }
  return Mapping{};
}

}  // namespace locked_tensor
