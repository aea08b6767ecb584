// Locked pages, the arena and in-place locks: exact, reused, merged, given back.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "memory/in_place_lock.h"
#include "memory/locked_arena.h"
#include "memory/range_registry.h"
#include "os/align.h"
#include "os/locked_pages.h"
#include "os/memory_room.h"
#include "support.h"

using namespace locked_tensor;
using testing::vm_locked_bytes;

namespace {

bool is_locked(const void* data, size_t bytes) {
  return RangeRegistry::process().contains(data, bytes);
}

}  // namespace

TEST_CASE("pages are locked while their owner lives, and no more than asked") {
  const uint64_t before = vm_locked_bytes();
  for (const HugePages kind : {HugePages::kOff, HugePages::kAuto}) {
    LockedPages pages(5 * page_bytes() + 1, PageOptions{kind, -1});
    CHECK(pages.size() == 6 * page_bytes());
    CHECK(vm_locked_bytes() == before + 6 * page_bytes());
    LockedPages tail = pages.split_tail(2 * page_bytes());
    CHECK(tail.data() == pages.data() + 2 * page_bytes());
    { LockedPages gone = tail.split_tail(page_bytes()); }
    CHECK(vm_locked_bytes() == before + 3 * page_bytes());
    pages.append(std::move(tail));
    CHECK(pages.size() == 3 * page_bytes());
  }
  CHECK(vm_locked_bytes() == before);
}

TEST_CASE("large segments begin on a huge page") {
  LockedPages pages(kHugePageBytes + page_bytes(), PageOptions{});
  CHECK(is_aligned(pages.data(), kHugePageBytes));
}

TEST_CASE("an empty hugetlb pool is a refusal with a remedy") {
  try {
    LockedPages pages(size_t{1} << 40, PageOptions{HugePages::k2M, -1});
    FAIL("a tebibyte of hugetlb pages");
  } catch (const LockRefused& refused) {
    CHECK(std::string(refused.what()).find("nr_hugepages") != std::string::npos);
  }
}

TEST_CASE("a NUMA node that does not exist is named, beside those that do") {
  CHECK_THROWS_WITH_AS(LockedPages(4096, PageOptions{HugePages::kOff, 77}),
                       doctest::Contains("numa_node 77 does not exist; this machine has 0"),
                       std::invalid_argument);
}

TEST_CASE("sizes around every power of two are exact and aligned") {
  LockedArena& arena = LockedArena::process();
  arena.set_cache_limit(0);
  const uint64_t before = vm_locked_bytes();
  for (int k = 4; k <= 26; ++k) {
    for (const int delta : {-1, 0, 1}) {
      const size_t bytes = (size_t{1} << k) + static_cast<size_t>(delta);
      Block* block = arena.allocate(bytes, PageOptions{});
      CHECK(block->size_bytes == bytes);
      CHECK(is_aligned(block->data, bytes >= page_bytes() ? page_bytes()
                                    : bytes >= 512        ? 512
                                                          : 64));
      CHECK(is_locked(block->data, bytes));
      if (bytes >= page_bytes()) {
        CHECK(vm_locked_bytes() - before == align_up(bytes, page_bytes()));
      }
      std::memset(block->data, 1, bytes);
      const void* data = block->data;
      LockedArena::release(block);
      CHECK_FALSE(is_locked(data, 1));
    }
  }
  CHECK(vm_locked_bytes() == before);
}

TEST_CASE("a freed block is reused, and what exceeds the cache limit goes, not more") {
  LockedArena arena;
  arena.set_cache_limit(uint64_t{64} << 20);
  Block* block = arena.allocate(8 << 20, PageOptions{});
  std::byte* data = block->data;
  LockedArena::release(block);
  CHECK(arena.stats().cached_bytes == 8 << 20);
  block = arena.allocate(3 << 20, PageOptions{});
  CHECK(block->data == data);
  Block* second = arena.allocate(5 << 20, PageOptions{});
  CHECK(second->data == data + (3 << 20));
  CHECK(arena.stats().segments_mapped == 1);
  LockedArena::release(block);
  LockedArena::release(second);
  CHECK(arena.stats().cached_bytes == 8 << 20);
  block = arena.allocate(8 << 20, PageOptions{});  // neighbours have merged
  CHECK(block->data == data);
  arena.set_cache_limit(4 << 20);
  LockedArena::release(block);
  CHECK(arena.stats().cached_bytes == 4 << 20);
  arena.empty_cache();
  CHECK(arena.stats().reserved_bytes == 0);
  CHECK(arena.stats().segments == 0);
}

TEST_CASE("what is cut from the oldest free run is whole pages: huge ones where it may have them") {
  for (const auto& [huge_pages, kept] :
       {std::pair{HugePages::kOff, (3 << 20) - 4096}, std::pair{HugePages::kAuto, 2 << 20}}) {
    LockedArena arena;
    PageOptions options;
    options.huge_pages = huge_pages;
    arena.set_cache_limit((3 << 20) - 1);
    LockedArena::release(arena.allocate(8 << 20, options));
    CHECK(arena.stats().cached_bytes == static_cast<uint64_t>(kept));
    CHECK(arena.stats().reserved_bytes == static_cast<uint64_t>(kept));
  }
}

TEST_CASE("blocks of another kind of pages are never mixed in") {
  LockedArena arena;
  Block* huge = arena.allocate(4 << 20, PageOptions{HugePages::kAuto, -1});
  const void* data = huge->data;
  LockedArena::release(huge);
  Block* plain = arena.allocate(4 << 20, PageOptions{HugePages::kOff, -1});
  CHECK(plain->data != data);
  LockedArena::release(plain);
}

TEST_CASE("a held block outlives its owner's release, and a dead one cannot be held") {
  LockedArena arena;
  for (const size_t bytes : {size_t{100}, size_t{10000}}) {
    Block* block = arena.allocate(bytes, PageOptions{});
    std::byte* data = block->data;
    Block* held = arena.hold(data + bytes / 2);
    CHECK(held == block);
    LockedArena::release(block);
    CHECK(arena.stats().live_blocks == 1);
    data[0] = std::byte{1};
    LockedArena::release(held);
    CHECK(arena.hold(data) == nullptr);
  }
}

TEST_CASE("random allocations never overlap, are locked, and all comes back") {
  std::mt19937_64 random(testing::seed());
  const uint64_t locked_before = vm_locked_bytes();
  for (uint64_t round = 0; round < testing::rounds(60); ++round) {
    LockedArena arena;
    arena.set_cache_limit(random() % 3 == 0 ? 0 : random() % (32 << 20));
    std::map<std::byte*, Block*> live;
    for (int step = 0; step < 120; ++step) {
      INFO("seed " << testing::seed() << " round " << round << " step " << step);
      if (live.size() < 2 || random() % 2 == 0) {
        const size_t bytes = 1 + random() % (size_t{1} << (4 + random() % 18));
        Block* block = arena.allocate(bytes, PageOptions{HugePages::kOff, -1});
        REQUIRE(is_locked(block->data, bytes));
        const auto next = live.lower_bound(block->data);
        REQUIRE((next == live.end() || block->data + bytes <= next->first));
        if (next != live.begin()) {
          const Block* previous = std::prev(next)->second;
          REQUIRE(previous->data + previous->size_bytes <= block->data);
        }
        live.emplace(block->data, block);
      } else {
        const auto victim = std::next(live.begin(), static_cast<long>(random() % live.size()));
        LockedArena::release(victim->second);
        live.erase(victim);
      }
      const ArenaStats stats = arena.stats();
      REQUIRE(stats.live_blocks == live.size());
      REQUIRE(stats.cached_bytes <= arena.cache_limit());
      uint64_t asked = 0;
      for (const auto& [data, block] : live) asked += block->size_bytes;
      REQUIRE(stats.allocated_bytes == asked);
    }
    for (const auto& [data, block] : live) LockedArena::release(block);
    const ArenaStats stats = arena.stats();
    REQUIRE(stats.reserved_bytes == stats.cached_bytes);
  }
  CHECK(vm_locked_bytes() == locked_before);
}

TEST_CASE("threads allocate, look up, hold and free at random") {
  LockedArena& arena = LockedArena::process();
  arena.set_cache_limit(16 << 20);
  const auto stop =
      std::chrono::steady_clock::now() + std::chrono::seconds(testing::thread_seconds());
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(testing::seed() + static_cast<uint64_t>(i));
      std::vector<Block*> live;
      while (std::chrono::steady_clock::now() < stop) {
        if (live.size() < 8 || (live.size() < 32 && random() % 2 == 0)) {
          const size_t bytes = 1 + random() % (size_t{1} << (6 + random() % 14));
          Block* block = arena.allocate(bytes, PageOptions{HugePages::kOff, -1});
          std::memset(block->data, i, bytes);
          live.push_back(block);
        } else {
          const size_t victim = random() % live.size();
          Block* block = live[victim];
          Block* held = arena.hold(block->data);
          wrong += held == block ? 0 : 1;
          wrong += is_locked(block->data + block->size_bytes / 2, block->size_bytes / 2) ? 0 : 1;
          wrong += block->data[block->size_bytes - 1] == std::byte(i) ? 0 : 1;
          LockedArena::release(block);
          LockedArena::release(held);
          live.erase(live.begin() + static_cast<long>(victim));
        }
      }
      for (Block* block : live) LockedArena::release(block);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(arena.stats().live_blocks == 0);
  arena.empty_cache();
  CHECK(arena.stats().reserved_bytes == 0);
}

TEST_CASE("a forked child forgets the parent's blocks and has an arena of its own") {
  Block* block = LockedArena::process().allocate(1 << 20, PageOptions{});
  block->data[5] = std::byte{42};
  CHECK(testing::in_child([&] {
          if (block->data[5] != std::byte{42} || is_locked(block->data, 1)) return 1;
          LockedArena::release(block);
          if (vm_locked_bytes() != 0 || LockedArena::process().stats().allocations != 0) return 2;
          Block* own = LockedArena::process().allocate(4096, PageOptions{});
          const int status = is_locked(own->data, 4096) ? 0 : 3;
          LockedArena::release(own);
          return status;
        }) == 0);
  CHECK(is_locked(block->data, 1 << 20));
  LockedArena::release(block);
  LockedArena::process().empty_cache();
}

TEST_CASE(
    "without privilege a lock beyond the limit is refused, changes nothing, and less succeeds") {
  for (const uint64_t limit : {uint64_t{64} << 10, uint64_t{8} << 20}) {
    CHECK(testing::in_child([&] {
            testing::drop_lock_privilege(limit);
            LockedArena& arena = LockedArena::process();
            const uint64_t before = vm_locked_bytes();
            try {
              arena.allocate(2 * limit, PageOptions{});
              return 1;
            } catch (const LockRefused& refused) {
              const std::string message = refused.what();
              if (refused.bytes_asked() != 2 * limit || *refused.limit().soft != limit) return 2;
              if (message.find("ulimit -l") == std::string::npos) return 3;
            }
            if (vm_locked_bytes() != before || arena.stats().reserved_bytes != 0) return 4;
            Block* block = arena.allocate(limit / 2, PageOptions{});
            return is_locked(block->data, limit / 2) ? 0 : 5;
          }) == 0);
  }
}

TEST_CASE("spans that share a page are counted, and a span locked twice is unlocked twice") {
  const uint64_t before = vm_locked_bytes();
  auto* pages = static_cast<std::byte*>(::mmap(nullptr, 3 * page_bytes(), PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::byte* second = pages + page_bytes() + 100;
  lock_in_place(pages, page_bytes() + 100);
  lock_in_place(second, page_bytes());
  CHECK(vm_locked_bytes() == before + 3 * page_bytes());
  CHECK(is_locked(pages, 2 * page_bytes() + 100));
  unlock_in_place(pages, page_bytes() + 100);
  CHECK(vm_locked_bytes() == before + 2 * page_bytes());
  CHECK_FALSE(is_locked(pages, 1));
  CHECK(is_locked(second, page_bytes()));
  lock_in_place(second, page_bytes());
  unlock_in_place(second, page_bytes());
  CHECK(is_locked(second, page_bytes()));
  unlock_in_place(second, page_bytes());
  CHECK_FALSE(is_locked(second, 1));
  CHECK(vm_locked_bytes() == before);
  CHECK_THROWS_AS(unlock_in_place(second, page_bytes()), std::invalid_argument);
  ::munmap(pages, 3 * page_bytes());
}

TEST_CASE("more than the machine has is refused before a page of it is touched") {
  const MemoryRoom room = memory_room();
  CHECK(room.total >= room.available / 2);
  const uint64_t before = testing::vm_locked_bytes();
  for (const uint64_t bytes : {room.available + (uint64_t{8} << 30), uint64_t{1} << 45}) {
    try {
      const LockedPages pages(bytes, PageOptions{});
      FAIL("refused");
    } catch (const LockRefused& refused) {
      CHECK(refused.errno_value() == ENOMEM);
      CHECK(refused.bytes_asked() >= bytes);
      CHECK(std::string(refused.what()).find("ask for less") != std::string::npos);
    }
  }
  // Nor may memory that was mapped and never touched be locked in place.
  const uint64_t most = room.total + (uint64_t{1} << 30);
  void* mapped = ::mmap(nullptr, most, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped != MAP_FAILED) {
    CHECK_THROWS_AS(lock_pages(mapped, most), LockRefused);
    ::munmap(mapped, most);
  }
  CHECK(testing::vm_locked_bytes() == before);
}
