#include "memory/locked_arena.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "memory/range_registry.h"
#include "memory/run_heap.h"
#include "os/align.h"
#include "os/fork.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// Blocks below a page are cells of slabs of this size.
constexpr size_t kSlabBytes = size_t{64} << 10;
// Requests below this share segments; from here on a block gets exactly its pages.
constexpr size_t kShareBelowBytes = size_t{1} << 20;
constexpr size_t kLeastSegmentBytes = kHugePageBytes;
constexpr size_t kMostSegmentBytes = size_t{32} << 20;

uint64_t default_cache_limit() {
  const uint64_t ram = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * page_bytes();
  return std::clamp<uint64_t>(ram / 8, uint64_t{2} << 30, uint64_t{32} << 30);
}

size_t cell_bytes_for(size_t bytes) {
  return align_up(bytes, bytes < 512 ? 64 : 512);
}

}  // namespace

// Note [Arena] Segments are mapped and locked outside the mutex, entered in the registry, and cut
// into runs of pages. A block of a page or more is a run; smaller ones are cells of a slab, which
// is a run too. Free runs merge across segments and are unmapped one by one, so the cache limit
// holds to the byte. A block's reference count reaches zero once and stays there.
struct LockedArena::Impl {
  struct Slab;
  struct Kind;

  struct Place : Block {
    std::atomic<uint32_t> references{0};
    uint64_t fork_generation = 0;
    size_t run_bytes = 0;  // of a block that is a run
    Slab* slab = nullptr;  // of a block that is a cell
    Kind* kind = nullptr;
  };

  struct Slab {
    Run run;
    size_t cell_bytes;
    std::vector<Place*> cells;  // nullptr: free
    std::vector<uint32_t> free_cells;
  };

  // Everything of one kind of pages.
  struct Kind {
    PageOptions options;
    RunHeap heap;
    std::map<std::byte*, LockedPages> segments;
    std::map<size_t, std::vector<Slab*>> slabs_with_room;  // by cell size
    uint64_t shared_bytes = 0;                             // mapped for shared segments so far
  };

  // Held while keepers are called, so before the other mutex and any of theirs.
  std::mutex keepers_mutex;
  std::vector<BlockKeeper*> keepers;

  mutable std::mutex mutex;
  std::deque<Kind> kinds;
  std::map<std::byte*, Place*> blocks;  // blocks that are runs, by address
  std::map<std::byte*, std::unique_ptr<Slab>> slabs;
  std::deque<Place> places;
  std::vector<Place*> spare_places;
  uint64_t cache_limit = default_cache_limit();
  ArenaStats stats;

  Kind& kind_of(const PageOptions& options) {
    for (Kind& kind : kinds) {
      if (kind.options == options) {
        return kind;
      }
    }
    Kind& kind = kinds.emplace_back();
    kind.options = options;
    return kind;
  }

  uint64_t free_bytes() const {
    uint64_t bytes = 0;
    for (const Kind& kind : kinds) {
      bytes += kind.heap.free_bytes();
    }
    return bytes;
  }

  // What to map for a run that no free one fits: exactly the run, or a shared segment whose surplus
  // the cache limit allows.
  size_t segment_bytes_for(const Kind& kind, size_t bytes) const {
    const size_t exact = align_up(bytes, page_size_of(kind.options));
    if (exact >= kShareBelowBytes) {
      return exact;
    }
    const size_t grown = align_down(std::clamp(kind.shared_bytes / 4, uint64_t{kLeastSegmentBytes},
                                               uint64_t{kMostSegmentBytes}),
                                    kHugePageBytes);
    return free_bytes() + grown - exact <= cache_limit ? grown : exact;
  }

  // Takes out of the heaps what exceeds `most_bytes`, least recently freed first, and no more than
  // whole huge pages make it. The caller unmaps it after the mutex is given back.
  std::vector<LockedPages> take_excess(uint64_t most_bytes) {
    std::vector<LockedPages> excess;
    for (Kind& kind : kinds) {
      // A huge page goes as a whole: half of one is many small ones.
      const size_t unit =
          kind.options.huge_pages == HugePages::kOff ? page_bytes() : kHugePageBytes;
      std::vector<Run> kept;
      while (free_bytes() > most_bytes) {
        std::optional<Run> run = kind.heap.take_oldest(free_bytes() - most_bytes, unit);
        if (!run) {
          break;
        }
        cut_pages(kind, *run, excess, kept);
      }
      for (const Run& run : kept) {
        kind.heap.give(run);
      }
    }
    return excess;
  }

  // Moves the whole pages of `run` from their segments to `out`; what is less than a page of its
  // kind stays free.
  void cut_pages(Kind& kind, Run run, std::vector<LockedPages>& out, std::vector<Run>& kept) {
    const size_t unit = page_size_of(kind.options);
    std::byte* end = run.data + run.bytes;
    while (run.data < end) {
      auto place = std::prev(kind.segments.upper_bound(run.data));
      std::byte* segment_end = place->first + place->second.size();
      std::byte* stop = std::min(end, segment_end);
      auto* from =
          reinterpret_cast<std::byte*>(align_up(reinterpret_cast<uintptr_t>(run.data), unit));
      auto* to = reinterpret_cast<std::byte*>(align_down(reinterpret_cast<uintptr_t>(stop), unit));
      if (from >= to) {
        kept.push_back(Run{run.data, static_cast<size_t>(stop - run.data)});
      } else {
        if (run.data < from) {
          kept.push_back(Run{run.data, static_cast<size_t>(from - run.data)});
        }
        if (to < stop) {
          kept.push_back(Run{to, static_cast<size_t>(stop - to)});
        }
        LockedPages pages = std::move(place->second);
        std::byte* segment_begin = place->first;
        kind.segments.erase(place);
        if (to < segment_end) {
          kind.segments.emplace(to, pages.split_tail(static_cast<size_t>(to - segment_begin)));
        }
        LockedPages middle;
        if (from > segment_begin) {
          middle = pages.split_tail(static_cast<size_t>(from - segment_begin));
          kind.segments.emplace(segment_begin, std::move(pages));
        } else {
          middle = std::move(pages);
        }
        stats.reserved_bytes -= middle.size();
        ++stats.segments_unmapped;
        out.push_back(std::move(middle));
      }
      run.data = stop;
    }
  }

  // Outside the mutex. The registry first, so that nobody enters the range anywhere again; then
  // those who have entered it; then the pages.
  static void unmap(std::vector<LockedPages> excess) {
    for (const LockedPages& pages : excess) {
      const auto begin = reinterpret_cast<uintptr_t>(pages.data());
      RangeRegistry::process().remove(begin, begin + pages.size());
      RangeRegistry::process().announce_release(begin, begin + pages.size());
    }
  }

  void release_idle() {
    std::lock_guard<std::mutex> lock(keepers_mutex);
    for (BlockKeeper* keeper : keepers) {
      keeper->release_idle();
    }
  }

  void unmap_free() {
    std::vector<LockedPages> excess;
    {
      std::lock_guard<std::mutex> lock(mutex);
      excess = take_excess(0);
    }
    unmap(std::move(excess));
  }

  // "4.0 MiB of it as ...", or nothing.
  std::string describe_kept() {
    std::map<std::string, uint64_t> bytes_by_kind;
    std::lock_guard<std::mutex> lock(keepers_mutex);
    for (BlockKeeper* keeper : keepers) {
      bytes_by_kind[keeper->kept_as()] += keeper->kept_bytes();
    }
    std::string described;
    for (const auto& [kind, bytes] : bytes_by_kind) {
      if (bytes > 0) {
        described += (described.empty() ? "" : ", ") + format_bytes(bytes) + " of it " + kind;
      }
    }
    return described;
  }

  // Perhaps what is kept for reuse, or asked for in advance, stands in the way.
  void retry_with_room(const std::function<void()>& lock) {
    try {
      return lock();
    } catch (const LockRefused&) {
      std::lock_guard<std::mutex> counting(mutex);
      ++stats.lock_failures;
    }
    release_idle();
    unmap_free();
    try {
      lock();
    } catch (const LockRefused& refused) {
      throw refused.with_kept(describe_kept());
    }
  }

  // Maps a segment for a run of `bytes`; the mutex is given back meanwhile.
  void map_segment(std::unique_lock<std::mutex>& lock, Kind& kind, size_t bytes) {
    size_t segment_bytes = segment_bytes_for(kind, bytes);
    const PageOptions options = kind.options;
    lock.unlock();
    LockedPages pages;
    retry_with_room([&] {
      const size_t now_bytes = std::exchange(segment_bytes, bytes);
      pages = LockedPages(now_bytes, options);
    });
    const auto begin = reinterpret_cast<uintptr_t>(pages.data());
    const Run run{pages.data(), pages.size()};
    RangeRegistry::process().add(begin, begin + pages.size());
    lock.lock();
    ++stats.segments_mapped;
    stats.reserved_bytes += run.bytes;
    stats.peak_reserved_bytes = std::max(stats.peak_reserved_bytes, stats.reserved_bytes);
    kind.shared_bytes += run.bytes < kShareBelowBytes || run.bytes > bytes ? run.bytes : 0;
    kind.segments.emplace(run.data, std::move(pages));
    kind.heap.give(run);
  }

  Run take_run(std::unique_lock<std::mutex>& lock, Kind& kind, size_t bytes) {
    bool is_hit = true;
    while (true) {
      if (const std::optional<Run> run = kind.heap.take(bytes)) {
        stats.cache_hits += is_hit ? 1 : 0;
        return *run;
      }
      is_hit = false;
      map_segment(lock, kind, bytes);
    }
  }

  Place* new_place() {
    if (spare_places.empty()) {
      spare_places.push_back(&places.emplace_back());
    }
    Place* place = spare_places.back();
    spare_places.pop_back();
    return place;
  }

  Place* take_cell(std::unique_lock<std::mutex>& lock, Kind& kind, size_t bytes) {
    const size_t cell_bytes = cell_bytes_for(bytes);
    std::vector<Slab*>& with_room = kind.slabs_with_room[cell_bytes];
    if (with_room.empty()) {
      const Run run = take_run(lock, kind, kSlabBytes);
      auto slab = std::make_unique<Slab>();
      slab->run = run;
      slab->cell_bytes = cell_bytes;
      slab->cells.resize(kSlabBytes / cell_bytes);
      for (size_t i = slab->cells.size(); i-- > 0;) {
        slab->free_cells.push_back(static_cast<uint32_t>(i));
      }
      with_room.push_back(slab.get());
      slabs.emplace(run.data, std::move(slab));
    } else {
      ++stats.cache_hits;
    }
    Slab* slab = with_room.back();
    const uint32_t cell = slab->free_cells.back();
    slab->free_cells.pop_back();
    if (slab->free_cells.empty()) {
      with_room.pop_back();
    }
    Place* place = new_place();
    place->data = slab->run.data + cell * cell_bytes;
    place->slab = slab;
    slab->cells[cell] = place;
    return place;
  }

  void give_cell(Place* place) {
    Slab* slab = place->slab;
    const auto cell = static_cast<uint32_t>((place->data - slab->run.data) /
                                            static_cast<ptrdiff_t>(slab->cell_bytes));
    std::vector<Slab*>& with_room = place->kind->slabs_with_room[slab->cell_bytes];
    slab->cells[cell] = nullptr;
    if (slab->free_cells.empty()) {
      with_room.push_back(slab);
    }
    slab->free_cells.push_back(cell);
    if (slab->free_cells.size() == slab->cells.size()) {
      std::erase(with_room, slab);
      place->kind->heap.give(slab->run);
      slabs.erase(slab->run.data);
    }
  }

  Place* find_live(std::byte* address) {
    if (auto place = blocks.upper_bound(address); place != blocks.begin()) {
      --place;
      if (address < place->first + place->second->run_bytes) {
        return place->second;
      }
    }
    if (auto place = slabs.upper_bound(address); place != slabs.begin()) {
      Slab* slab = std::prev(place)->second.get();
      const auto cell = static_cast<size_t>(address - slab->run.data) / slab->cell_bytes;
      return cell < slab->cells.size() ? slab->cells[cell] : nullptr;
    }
    return nullptr;
  }

  void free(Place* place) {
    std::vector<LockedPages> excess;
    {
      std::lock_guard<std::mutex> lock(mutex);
      ++stats.frees;
      --stats.live_blocks;
      stats.allocated_bytes -= place->size_bytes;
      if (place->slab != nullptr) {
        give_cell(place);
      } else {
        blocks.erase(place->data);
        place->kind->heap.give(Run{place->data, place->run_bytes});
      }
      spare_places.push_back(place);
      if (free_bytes() > cache_limit) {
        excess = take_excess(cache_limit);
      }
    }
    unmap(std::move(excess));
  }
};

namespace {

std::atomic<LockedArena*> process_arena{nullptr};

}  // namespace

LockedArena& LockedArena::process() {
  static const bool is_made = [] {
    RangeRegistry::process();  // its fork hooks come first
    process_arena = new LockedArena;
    add_fork_hooks({{}, {}, [] { process_arena = new LockedArena; }});
    return true;
  }();
  static_cast<void>(is_made);
  return *process_arena.load(std::memory_order_acquire);
}

LockedArena::LockedArena() : impl_(new Impl) {}

LockedArena::~LockedArena() {
  LT_CHECK(impl_->stats.live_blocks == 0, "an arena goes after its blocks");
  empty_cache();
  delete impl_;
}

Block* LockedArena::allocate(size_t bytes, const PageOptions& options) {
  LT_CHECK(bytes > 0, "a block has bytes");
  std::unique_lock<std::mutex> lock(impl_->mutex);
  Impl::Kind& kind = impl_->kind_of(options);
  Impl::Place* place;
  if (bytes > page_bytes() - 512) {
    const size_t run_bytes = align_up(bytes, page_bytes());
    const Run run = impl_->take_run(lock, kind, run_bytes);
    place = impl_->new_place();
    place->data = run.data;
    place->run_bytes = run.bytes;
    place->slab = nullptr;
    impl_->blocks.emplace(run.data, place);
  } else {
    place = impl_->take_cell(lock, kind, bytes);
  }
  place->owner = this;
  place->size_bytes = bytes;
  place->pages = options;
  place->is_claimed = false;
  place->in_place_locks = 0;
  place->kind = &kind;
  place->fork_generation = fork_generation();
  place->references.store(1);
  ArenaStats& stats = impl_->stats;
  ++stats.allocations;
  ++stats.live_blocks;
  stats.allocated_bytes += bytes;
  stats.peak_allocated_bytes = std::max(stats.peak_allocated_bytes, stats.allocated_bytes);
  return place;
}

void LockedArena::retain(Block* block) noexcept {
  static_cast<Impl::Place*>(block)->references.fetch_add(1, std::memory_order_relaxed);
}

void LockedArena::release(Block* block) noexcept {
  auto* place = static_cast<Impl::Place*>(block);
  if (place->references.fetch_sub(1, std::memory_order_acq_rel) > 1) {
    return;
  }
  if (place->fork_generation != fork_generation()) {
    return;  // the parent's block: this process only has a copy of its pages, which are not locked
  }
  place->owner->impl_->free(place);
}

Block* LockedArena::hold(const void* address) noexcept {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  auto* at = static_cast<std::byte*>(const_cast<void*>(address));
  Impl::Place* place = impl_->find_live(at);
  if (place == nullptr) {
    return nullptr;
  }
  // A count of zero is a block on its way to free(): it cannot be revived.
  uint32_t references = place->references.load();
  while (references > 0) {
    if (place->references.compare_exchange_weak(references, references + 1)) {
      return place;
    }
  }
  return nullptr;
}

Block* LockedArena::find(const void* address) noexcept {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->find_live(static_cast<std::byte*>(const_cast<void*>(address)));
}

void LockedArena::set_cache_limit(uint64_t bytes) {
  std::vector<LockedPages> excess;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->cache_limit = bytes;
    excess = impl_->take_excess(bytes);
  }
  Impl::unmap(std::move(excess));
}

uint64_t LockedArena::cache_limit() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->cache_limit;
}

void LockedArena::empty_cache() {
  impl_->release_idle();
  impl_->unmap_free();
}

void LockedArena::retry_with_room(const std::function<void()>& lock) {
  impl_->retry_with_room(lock);
}

std::optional<uint64_t> LockedArena::lockable_bytes() const {
  const std::optional<uint64_t> lockable = locked_tensor::lockable_bytes();
  if (!lockable) {
    return std::nullopt;
  }
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return *lockable + impl_->free_bytes();
}

void LockedArena::add_keeper(BlockKeeper* keeper) {
  std::lock_guard<std::mutex> lock(impl_->keepers_mutex);
  impl_->keepers.push_back(keeper);
}

void LockedArena::remove_keeper(BlockKeeper* keeper) {
  std::lock_guard<std::mutex> lock(impl_->keepers_mutex);
  std::erase(impl_->keepers, keeper);
}

ArenaStats LockedArena::stats() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  ArenaStats stats = impl_->stats;
  stats.cached_bytes = impl_->free_bytes();
  for (const Impl::Kind& kind : impl_->kinds) {
    stats.segments += kind.segments.size();
    for (const auto& [data, pages] : kind.segments) {
      if (kind.options.huge_pages != HugePages::kOff) {
        stats.huge_page_bytes += align_down(pages.size(), kHugePageBytes);
      }
    }
  }
  return stats;
}

uint64_t LockedArena::reserved_bytes() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->stats.reserved_bytes;
}

void LockedArena::reset_peak_stats() {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->stats.peak_allocated_bytes = impl_->stats.allocated_bytes;
  impl_->stats.peak_reserved_bytes = impl_->stats.reserved_bytes;
}

}  // namespace locked_tensor
