#include "memory/range_registry.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "memory/page_table.h"
#include "os/align.h"
#include "os/fork.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

constexpr auto kRead = std::memory_order_acquire;
constexpr auto kWrite = std::memory_order_release;
// A reader that met a writer this often takes the writers' mutex instead.
constexpr int kMostRetries = 64;
// A walk this long is a walk through pieces that are being changed.
constexpr int kMostSteps = 4096;

uint64_t page_of(uintptr_t address) {
  return address / page_bytes();
}

}  // namespace

// Note [Registry] Pieces are disjoint and linked by address; a page leads to its first one. Writers
// are serialised by a mutex and make the sequence count odd while they write; a reader whose two
// looks at the count differ looks again. Every shared field is atomic, so that looking is always
// defined.
struct RangeRegistry::Impl {
  mutable std::mutex mutex;
  std::atomic<uint64_t> sequence{0};
  PageTable table;
  std::map<uintptr_t, Piece*> pieces;  // by begin; the writers'
  std::deque<Piece> storage;
  std::vector<Piece*> spare;
  uint64_t next_id = 1;
  uint64_t covered_bytes = 0;

  std::mutex listeners_mutex;
  std::vector<ReleaseListener*> listeners;

  // Holds the mutex and an odd sequence count.
  class Writing {
   public:
    explicit Writing(Impl& impl) : impl_(impl), lock_(impl.mutex) {
      impl_.sequence.fetch_add(1, std::memory_order_acq_rel);
    }
    ~Writing() { impl_.sequence.fetch_add(1, kWrite); }

   private:
    Impl& impl_;
    std::lock_guard<std::mutex> lock_;
  };

  // Runs look(most_steps) until no writer has been in its way. look returns nullopt when it gave
  // up.
  template <typename Look>
  auto read(Look look) const noexcept {
    for (int i = 0; i < kMostRetries; ++i) {
      const uint64_t before = sequence.load(kRead);
      if ((before & 1) == 0) {
        const auto found = look(kMostSteps);
        if (found.has_value() && sequence.load(kRead) == before) {
          return *found;
        }
      }
    }
    std::lock_guard<std::mutex> lock(mutex);
    return *look(INT32_MAX);
  }

  // The piece that holds `address`, or nullptr.
  std::optional<Piece*> piece_at(uintptr_t address, int most_steps) const noexcept {
    Piece* piece = table.find(page_of(address));
    while (piece != nullptr && piece->end.load(kRead) <= address) {
      if (--most_steps == 0) {
        return std::nullopt;
      }
      piece = piece->next.load(kRead);
    }
    const bool holds = piece != nullptr && piece->begin.load(kRead) <= address;
    return holds ? piece : nullptr;
  }

  std::optional<bool> covers(uintptr_t begin, uintptr_t end, int most_steps) const noexcept {
    const std::optional<Piece*> first = piece_at(begin, most_steps);
    if (!first.has_value() || *first == nullptr) {
      return first.has_value() ? std::optional<bool>(false) : std::nullopt;
    }
    Piece* piece = *first;
    uintptr_t covered = piece->end.load(kRead);
    while (covered < end) {
      if (--most_steps == 0) {
        return std::nullopt;
      }
      piece = piece->next.load(kRead);
      if (piece == nullptr || piece->begin.load(kRead) != covered) {
        return false;
      }
      covered = piece->end.load(kRead);
    }
    return true;
  }

  // --- the writers' ---

  using Place = std::map<uintptr_t, Piece*>::iterator;

  // Enters the right piece for a page that may hold several.
  void refresh(uint64_t page) {
    const uintptr_t begin = page * page_bytes();
    auto place = pieces.upper_bound(begin);
    if (place != pieces.begin() && std::prev(place)->second->end.load(kRead) > begin) {
      --place;
    }
    const bool intersects = place != pieces.end() && place->first < begin + page_bytes();
    table.set(page, page, intersects ? place->second : nullptr);
  }

  // Enters `piece` for the pages from begin to end that nothing else lies in, and refreshes the
  // ends.
  void enter(uintptr_t begin, uintptr_t end, Piece* piece) {
    const uint64_t first = page_of(begin);
    const uint64_t last = page_of(end - 1);
    if (first + 1 < last) {
      table.set(first + 1, last - 1, piece);
    }
    refresh(first);
    if (last != first) {
      refresh(last);
    }
  }

  Place insert(uintptr_t begin, uintptr_t end, uint32_t count, bool is_registrable) {
    if (spare.empty()) {
      spare.push_back(&storage.emplace_back());
    }
    Piece* piece = spare.back();
    spare.pop_back();
    piece->begin.store(begin, kWrite);
    piece->end.store(end, kWrite);
    piece->id.store(next_id++, kWrite);
    piece->is_registrable.store(is_registrable, kWrite);
    piece->count = count;
    const Place place = pieces.emplace(begin, piece).first;
    const auto after = std::next(place);
    piece->next.store(after == pieces.end() ? nullptr : after->second, kWrite);
    if (place != pieces.begin()) {
      std::prev(place)->second->next.store(piece, kWrite);
    }
    return place;
  }

  Place erase(Place place) {
    Piece* piece = place->second;
    if (place != pieces.begin()) {
      std::prev(place)->second->next.store(piece->next.load(kRead), kWrite);
    }
    spare.push_back(piece);
    return pieces.erase(place);
  }

  // Makes `address` a boundary between pieces, if it lies inside one.
  void split(uintptr_t address) {
    auto place = pieces.upper_bound(address);
    if (place == pieces.begin()) {
      return;
    }
    Piece* head = std::prev(place)->second;
    const uintptr_t end = head->end.load(kRead);
    if (head->begin.load(kRead) == address || end <= address) {
      return;
    }
    head->end.store(address, kWrite);
    head->id.store(next_id++, kWrite);
    const Place tail = insert(address, end, head->count, head->is_registrable.load(kRead));
    enter(address, end, tail->second);
  }
};

namespace {

std::atomic<RangeRegistry*> process_registry{nullptr};

}  // namespace

RangeRegistry& RangeRegistry::process() {
  static const bool is_made = [] {
    process_registry = new RangeRegistry;
    add_fork_hooks({{}, {}, [] { process_registry = new RangeRegistry; }});
    return true;
  }();
  static_cast<void>(is_made);
  return *process_registry.load(kRead);
}

RangeRegistry::RangeRegistry() : impl_(new Impl) {}

RangeRegistry::~RangeRegistry() {
  delete impl_;
}

void RangeRegistry::add(uintptr_t begin, uintptr_t end, bool is_registrable) {
  LT_CHECK(begin < end, "a range has bytes");
  Impl::Writing writing(*impl_);
  impl_->split(begin);
  impl_->split(end);
  auto place = impl_->pieces.lower_bound(begin);
  for (uintptr_t at = begin; at < end;) {
    if (place != impl_->pieces.end() && place->first == at) {
      ++place->second->count;
      at = place->second->end.load(kRead);
    } else {
      const uintptr_t stop = place == impl_->pieces.end() ? end : std::min(end, place->first);
      place = impl_->insert(at, stop, 1, is_registrable);
      impl_->enter(at, stop, place->second);
      impl_->covered_bytes += stop - at;
      at = stop;
    }
    ++place;
  }
}

void RangeRegistry::remove(uintptr_t begin, uintptr_t end) {
  LT_CHECK(begin < end, "a range has bytes");
  Impl::Writing writing(*impl_);
  LT_CHECK(*impl_->covers(begin, end, INT32_MAX), "only what was added is removed");
  impl_->split(begin);
  impl_->split(end);
  auto place = impl_->pieces.lower_bound(begin);
  while (place != impl_->pieces.end() && place->first < end) {
    Piece* piece = place->second;
    if (--piece->count > 0) {
      ++place;
      continue;
    }
    const uintptr_t from = piece->begin.load(kRead);
    const uintptr_t to = piece->end.load(kRead);
    place = impl_->erase(place);
    impl_->enter(from, to, nullptr);
    impl_->covered_bytes -= to - from;
  }
}

bool RangeRegistry::contains(const void* data, size_t bytes) const noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (bytes == 0) {
    return begin != 0 &&
           (contains(data, 1) || contains(static_cast<const std::byte*>(data) - 1, 1));
  }
  const uintptr_t end = begin + bytes;
  if (end < begin) {
    return false;
  }
  return impl_->read([&](int most_steps) { return impl_->covers(begin, end, most_steps); });
}

std::optional<Range> RangeRegistry::find(const void* data) const noexcept {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return impl_->read([&](int most_steps) -> std::optional<std::optional<Range>> {
    const std::optional<Piece*> piece = impl_->piece_at(address, most_steps);
    if (!piece.has_value()) {
      return std::nullopt;
    }
    if (*piece == nullptr) {
      return std::optional<Range>();
    }
    return std::optional<Range>(Range{(*piece)->begin.load(kRead), (*piece)->end.load(kRead),
                                      (*piece)->id.load(kRead),
                                      (*piece)->is_registrable.load(kRead)});
  });
}

size_t RangeRegistry::range_count() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->pieces.size();
}

uint64_t RangeRegistry::locked_bytes() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->covered_bytes;
}

void RangeRegistry::add_release_listener(ReleaseListener* listener) {
  std::lock_guard<std::mutex> lock(impl_->listeners_mutex);
  impl_->listeners.push_back(listener);
}

void RangeRegistry::remove_release_listener(ReleaseListener* listener) {
  std::lock_guard<std::mutex> lock(impl_->listeners_mutex);
  std::erase(impl_->listeners, listener);
}

void RangeRegistry::announce_release(uintptr_t begin, uintptr_t end) noexcept {
  std::lock_guard<std::mutex> lock(impl_->listeners_mutex);
  for (ReleaseListener* listener : impl_->listeners) {
    listener->on_release(begin, end);
  }
}

}  // namespace locked_tensor
