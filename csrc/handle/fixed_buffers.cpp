#include "handle/fixed_buffers.h"

#include <algorithm>

#include "os/align.h"
#include "os/locked_pages.h"

namespace locked_tensor {

namespace {

constexpr uint64_t kMostSlotBytes = uint64_t{1} << 30;  // io_uring's own limit for a buffer

// The stretch of `range` around `address` that gets one slot.
Range slot_around(const Range& range, uintptr_t address) {
  const uintptr_t huge_begin = align_up(range.begin, kHugePageBytes);
  const uintptr_t huge_end = align_down(range.end, kHugePageBytes);
  uintptr_t begin = range.begin;
  uintptr_t end = range.end;
  if (huge_begin < huge_end) {
    if (address < huge_begin) {
      end = huge_begin;
    } else if (address >= huge_end) {
      begin = huge_end;
    } else {
      begin = huge_begin;
      end = huge_end;
    }
  }
  begin += align_down(address - begin, kMostSlotBytes);
  return Range{begin, std::min<uintptr_t>(end, begin + kMostSlotBytes), range.id,
               range.is_registrable};
}

}  // namespace

FixedBuffers::FixedBuffers(Engine& engine) : engine_(engine) {
  for (int32_t slot = engine.buffer_slots(); slot-- > 0;) {
    free_slots_.push_back(slot);
  }
  RangeRegistry::process().add_release_listener(this);
}

FixedBuffers::~FixedBuffers() {
  RangeRegistry::process().remove_release_listener(this);
}

FixedBuffers::Place FixedBuffers::find(const std::byte* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto after = entries_.upper_bound(address); after != entries_.begin()) {
    const auto& [begin, entry] = *std::prev(after);
    if (address < entry.end) {
      return Place{entry.slot, entry.end - address};
    }
  }
  if (engine_.buffer_slots() == 0) {
    return Place{};
  }
  const std::optional<Range> range = RangeRegistry::process().find(data);
  if (!range) {
    return Place{};
  }
  return enter(slot_around(*range, address), address);
}

FixedBuffers::Place FixedBuffers::enter(const Range& range, uintptr_t address) {
  // An in-place lock may have split a range that is entered already: nothing is entered twice.
  const auto next = entries_.lower_bound(range.begin);
  uintptr_t begin = range.begin;
  uintptr_t end = range.end;
  if (next != entries_.begin()) {
    begin = std::max(begin, std::prev(next)->second.end);
  }
  const auto above = entries_.upper_bound(address);
  if (above != entries_.end()) {
    end = std::min(end, above->first);
  }
  if (above != entries_.begin()) {
    begin = std::max(begin, std::prev(above)->second.end);
  }
  int32_t slot = -1;
  if (range.is_registrable && !free_slots_.empty()) {
    slot = free_slots_.back();
    if (engine_.set_buffer(slot, reinterpret_cast<std::byte*>(begin), end - begin) == 0) {
      free_slots_.pop_back();
    } else {
      slot = -1;  // over the lock limit of registered memory, for one: unregistered works too
    }
  }
  entries_.emplace(begin, Entry{end, slot});
  return Place{slot, end - address};
}

void FixedBuffers::clear(std::map<uintptr_t, Entry>::iterator place) {
  if (place->second.slot >= 0) {
    engine_.set_buffer(place->second.slot, nullptr, 0);
    free_slots_.push_back(place->second.slot);
  }
  entries_.erase(place);
}

void FixedBuffers::on_release(uintptr_t begin, uintptr_t end) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  auto place = entries_.upper_bound(begin);
  if (place != entries_.begin() && std::prev(place)->second.end > begin) {
    --place;
  }
  while (place != entries_.end() && place->first < end) {
    clear(place++);
  }
}

void FixedBuffers::before_fork() {
  mutex_.lock();
  while (!entries_.empty()) {
    clear(entries_.begin());
  }
}

void FixedBuffers::after_fork() {
  mutex_.unlock();
}

}  // namespace locked_tensor
