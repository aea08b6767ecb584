#include "os/mapping.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>

#include "os/align.h"

namespace locked_tensor {

namespace {

struct MapsLine {
  uintptr_t begin;
  uintptr_t end;
  char permissions[5];
  unsigned long inode;
};

// Calls visit(line) for the process's mappings by rising address until it returns false.
template <typename Visit>
void for_each_mapping(Visit visit) {
  std::ifstream maps("/proc/self/maps");
  for (std::string text; std::getline(maps, text);) {
    MapsLine line{};
    if (std::sscanf(text.c_str(), "%lx-%lx %4s %*x %*s %lu", &line.begin, &line.end,
                    line.permissions, &line.inode) == 4 &&
        !visit(line)) {
      return;
    }
  }
}

bool is_permitted(uintptr_t begin, uintptr_t end, Access access) {
  for_each_mapping([&](const MapsLine& line) {
    const bool grants = line.permissions[access == Access::kWrite ? 1 : 0] != '-';
    if (line.begin <= begin && begin < line.end && grants) {
      begin = line.end;
    }
    return begin < end && line.begin <= begin;
  });
  return begin >= end;
}

}  // namespace

Mapping mapping_of(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  Mapping found;
  for_each_mapping([&](const MapsLine& line) {
    const bool is_here = line.begin <= wanted && wanted < line.end;
    if (is_here) {
      found = Mapping{line.permissions[3] == 's', line.inode != 0};
    }
    return !is_here;
  });
  return found;
}

Touch try_touch(const void* data, size_t bytes, Access access) {
  if (bytes == 0) {
    return Touch::kSafe;
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = align_down(begin, page_bytes());
  const uintptr_t end = align_up(begin + bytes, page_bytes());
  const int advice = access == Access::kWrite ? kPopulateWrite : kPopulateRead;
  int result;
  do {
    result = ::madvise(reinterpret_cast<void*>(first), end - first, advice);
  } while (result != 0 && errno == EINTR);
  if (result == 0) {
    return Touch::kSafe;
  }
  if (errno == EFAULT || errno == EHWPOISON) {
    return Touch::kSignal;
  }
  return is_permitted(first, end, access) ? Touch::kUnknown : Touch::kSignal;
}

}  // namespace locked_tensor
