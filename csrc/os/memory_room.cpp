#include "os/memory_room.h"

#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace locked_tensor {

MemoryRoom memory_room() {
  MemoryRoom room;
  std::optional<uint64_t> available;
  uint64_t swap = 0;
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  uint64_t kib = 0;
  while (meminfo >> name >> kib) {
    if (name == "MemTotal:") {
      room.total = kib * 1024;
    } else if (name == "MemAvailable:") {
      available = kib * 1024;
    } else if (name == "SwapFree:") {
      swap = kib * 1024;
    }
    meminfo.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  if (available) {
    room.available = *available + swap;
  }
  return room;
}

}  // namespace locked_tensor
