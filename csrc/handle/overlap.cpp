#include "handle/overlap.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace locked_tensor {

namespace {

struct Span {
  uintptr_t begin;
  uintptr_t end;
};

bool has_overlap(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].begin < spans[i - 1].end) {
      return true;
    }
  }
  return false;
}

uintptr_t begin_of(const Layout* layout) {
  return reinterpret_cast<uintptr_t>(layout->data());
}

// Stretches that repeat at one stride, each run at its own place within it: columns of a matrix.
bool are_columns(std::span<const Layout* const> group) {
  const uint64_t stride = group.front()->only_stride_bytes();
  if (stride == 0) {
    return false;
  }
  std::vector<Span> places;
  for (const Layout* layout : group) {
    const uint64_t place = (begin_of(layout) - begin_of(group.front())) % stride;
    if (layout->only_stride_bytes() != stride || place + layout->run_bytes() > stride) {
      return false;
    }
    places.push_back(Span{place, place + layout->run_bytes()});
  }
  return !has_overlap(places);
}

// Of stretches whose extents lie in each other.
bool share_runs(std::span<const Layout* const> group) {
  if (are_columns(group)) {
    return false;
  }
  std::vector<Span> runs;
  for (const Layout* layout : group) {
    layout->for_each_run(0, layout->bytes(), [&](const std::byte* run, uint64_t bytes) {
      const auto begin = reinterpret_cast<uintptr_t>(run);
      runs.push_back(Span{begin, begin + bytes});
    });
  }
  return has_overlap(runs);
}

}  // namespace

bool share_bytes(std::span<const Layout> layouts) {
  if (layouts.size() < 2) {
    return false;
  }
  std::vector<const Layout*> sorted;
  for (const Layout& layout : layouts) {
    if (layout.data() != nullptr && layout.bytes() > 0) {
      sorted.push_back(&layout);
    }
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const Layout* a, const Layout* b) { return begin_of(a) < begin_of(b); });
  for (size_t first = 0; first < sorted.size();) {
    uintptr_t end = begin_of(sorted[first]) + sorted[first]->extent_bytes();
    bool is_strided = !sorted[first]->is_contiguous();
    size_t next = first + 1;
    for (; next < sorted.size() && begin_of(sorted[next]) < end; ++next) {
      end = std::max(end, begin_of(sorted[next]) + sorted[next]->extent_bytes());
      is_strided = is_strided || !sorted[next]->is_contiguous();
    }
    if (next - first > 1 &&
        (!is_strided || share_runs(std::span(sorted).subspan(first, next - first)))) {
      return true;
    }
    first = next;
  }
  return false;
}

}  // namespace locked_tensor
