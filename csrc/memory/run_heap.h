// RunHeap: which stretches of the arena's address space are free, best fit first.
//
// Bookkeeping only: no memory is touched, no lock taken, no system call made. Offsets and lengths
// are multiples of the page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "os/locked_pages.h"

namespace locked_tensor {

struct Run {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Free runs of one kind of pages. Neighbours are merged, whatever segment they came from.
class RunHeap {
 public:
  // Takes the smallest free run that fits and cuts it; nullopt when none does.
  std::optional<Run> take(size_t bytes);
  // Gives back a run; it becomes the youngest.
  void give(Run run);
  // Takes the least recently freed run out, for unmapping, or of it that many bytes, up to a
  // multiple of `unit_bytes`; the rest keeps its age.
  std::optional<Run> take_oldest(size_t at_least_bytes, size_t unit_bytes);

  uint64_t free_bytes() const { return free_bytes_; }

 private:
  struct Free {
    size_t bytes;
    uint64_t age;
  };
  using ByAddress = std::map<std::byte*, Free>;

  void insert(Run run, uint64_t age);
  void erase(ByAddress::iterator place);

  ByAddress by_address_;
  std::set<std::pair<size_t, std::byte*>> by_size_;
  std::map<uint64_t, std::byte*> by_age_;
  uint64_t next_age_ = 0;
  uint64_t free_bytes_ = 0;
};

}  // namespace locked_tensor
