#include "memory/in_place_lock.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory/locked_arena.h"
#include "memory/range_registry.h"
#include "os/align.h"
#include "os/fork.h"
#include "os/locked_pages.h"

namespace locked_tensor {

namespace {

using Span = std::pair<uintptr_t, uintptr_t>;

// Which spans were locked in place, and how often each stretch of their pages is needed: mlock does
// not count. Boundaries are page addresses; a stretch runs to the next boundary.
class InPlaceLocks {
 public:
  static InPlaceLocks& process() {
    static InPlaceLocks* locks = [] {
      auto* made = new InPlaceLocks;  // leaked: storages die during static destruction
      add_fork_hooks({[made] { made->mutex_.lock(); }, [made] { made->mutex_.unlock(); },
                      [made] {
                        made->spans_.clear();  // a child inherits no lock
                        made->needs_.clear();
                        made->mutex_.unlock();
                      }});
      return made;
    }();
    return *locks;
  }

  void lock(Span span, bool is_registrable) {
    std::lock_guard<std::mutex> guard(mutex_);
    const Span pages = pages_of(span);
    std::vector<Span> fresh = stretches(pages, 0);
    for (size_t i = 0; i < fresh.size(); ++i) {
      try {
        lock_pages(reinterpret_cast<void*>(fresh[i].first), fresh[i].second - fresh[i].first);
      } catch (...) {
        for (size_t undone = 0; undone < i; ++undone) {
          unlock(fresh[undone]);
        }
        throw;
      }
    }
    change(pages, +1);
    ++spans_[span];
    RangeRegistry::process().add(span.first, span.second, is_registrable);
  }

  bool unlock_span(Span span) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto place = spans_.find(span);
    if (place == spans_.end()) {
      return false;
    }
    if (--place->second == 0) {
      spans_.erase(place);
    }
    RangeRegistry::process().remove(span.first, span.second);
    RangeRegistry::process().announce_release(span.first, span.second);
    const Span pages = pages_of(span);
    for (const Span& last : stretches(pages, 1)) {
      unlock(last);
    }
    change(pages, -1);
    return true;
  }

 private:
  static Span pages_of(Span span) {
    return {align_down(span.first, page_bytes()), align_up(span.second, page_bytes())};
  }

  static void unlock(Span pages) {
    unlock_pages(reinterpret_cast<void*>(pages.first), pages.second - pages.first);
  }

  // Makes `address` a boundary.
  void cut(uintptr_t address) {
    const auto after = needs_.upper_bound(address);
    const int count = after == needs_.begin() ? 0 : std::prev(after)->second;
    needs_.emplace(address, count);
  }

  // The stretches of `pages` that are needed exactly `count` times.
  std::vector<Span> stretches(Span pages, int count) {
    cut(pages.first);
    cut(pages.second);
    std::vector<Span> found;
    for (auto at = needs_.find(pages.first); at->first < pages.second; ++at) {
      if (at->second == count) {
        found.emplace_back(at->first, std::next(at)->first);
      }
    }
    return found;
  }

  void change(Span pages, int by) {
    for (auto at = needs_.find(pages.first); at->first < pages.second; ++at) {
      at->second += by;
    }
    // Boundaries between equal needs are none.
    auto at = needs_.find(pages.first);
    int before = at == needs_.begin() ? 0 : std::prev(at)->second;
    while (at != needs_.end() && at->first <= pages.second) {
      if (at->second == before) {
        at = needs_.erase(at);
      } else {
        before = at->second;
        ++at;
      }
    }
  }

  std::mutex mutex_;
  std::map<Span, int> spans_;
  std::map<uintptr_t, int> needs_;  // from each boundary on
};

Span span_of(void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + bytes};
}

}  // namespace

void lock_in_place(void* data, size_t bytes, bool is_registrable) {
  if (bytes == 0) {
    throw std::invalid_argument("there are no bytes to lock");
  }
  LockedArena::process().retry_with_room(
      [&] { InPlaceLocks::process().lock(span_of(data, bytes), is_registrable); });
}

void unlock_in_place(void* data, size_t bytes) {
  if (!InPlaceLocks::process().unlock_span(span_of(data, bytes))) {
    throw std::invalid_argument(
        "this memory is not locked in place: unlock_() undoes a lock_(), and there is none");
  }
}

}  // namespace locked_tensor
