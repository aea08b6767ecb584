#include "memory/run_heap.h"

#include "os/align.h"
#include "os/status.h"

namespace locked_tensor {

std::optional<Run> RunHeap::take(size_t bytes) {
  const auto fit = by_size_.lower_bound({bytes, nullptr});
  if (fit == by_size_.end()) {
    return std::nullopt;
  }
  const auto place = by_address_.find(fit->second);
  const Run whole{place->first, place->second.bytes};
  const uint64_t age = place->second.age;
  erase(place);
  if (whole.bytes > bytes) {
    insert(Run{whole.data + bytes, whole.bytes - bytes}, age);
  }
  return Run{whole.data, bytes};
}

void RunHeap::give(Run run) {
  auto next = by_address_.lower_bound(run.data);
  if (next != by_address_.end() && run.data + run.bytes == next->first) {
    run.bytes += next->second.bytes;
    const auto merged = next++;
    erase(merged);
  }
  if (next != by_address_.begin()) {
    const auto previous = std::prev(next);
    LT_CHECK(previous->first + previous->second.bytes <= run.data, "a run is given back once");
    if (previous->first + previous->second.bytes == run.data) {
      run = Run{previous->first, previous->second.bytes + run.bytes};
      erase(previous);
    }
  }
  insert(run, next_age_++);
}

std::optional<Run> RunHeap::take_oldest(size_t at_least_bytes, size_t unit_bytes) {
  if (by_age_.empty()) {
    return std::nullopt;
  }
  const auto place = by_address_.find(by_age_.begin()->second);
  const Run whole{place->first, place->second.bytes};
  const uint64_t age = place->second.age;
  erase(place);
  if (whole.bytes <= at_least_bytes) {
    return whole;
  }
  const auto begin = reinterpret_cast<uintptr_t>(whole.data);
  const size_t bytes = align_up(begin + at_least_bytes, unit_bytes) - begin;
  if (bytes >= whole.bytes) {
    return whole;
  }
  insert(Run{whole.data + bytes, whole.bytes - bytes}, age);
  return Run{whole.data, bytes};
}

void RunHeap::insert(Run run, uint64_t age) {
  by_address_.emplace(run.data, Free{run.bytes, age});
  by_size_.emplace(run.bytes, run.data);
  by_age_.emplace(age, run.data);
  free_bytes_ += run.bytes;
}

void RunHeap::erase(ByAddress::iterator place) {
  by_size_.erase({place->second.bytes, place->first});
  by_age_.erase(place->second.age);
  free_bytes_ -= place->second.bytes;
  by_address_.erase(place);
}

}  // namespace locked_tensor
