// Staging: a share of the lock limit, chunk by chunk, given back when somebody needs it.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "handle/staging.h"
#include "memory/in_place_lock.h"
#include "memory/locked_arena.h"
#include "memory/range_registry.h"
#include "os/align.h"
#include "support.h"

using namespace locked_tensor;
using testing::drop_lock_privilege;
using testing::in_child;
using testing::vm_locked_bytes;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::vector<std::byte*> take(Staging& staging, uint64_t count) {
  std::vector<std::byte*> chunks;
  for (uint64_t i = 0; i < count; ++i) {
    CHECK(staging.reserve());
    chunks.push_back(staging.take());
  }
  return chunks;
}

bool is_locked(const std::byte* chunk) {
  return RangeRegistry::process().contains(chunk, kMiB);
}

}  // namespace

TEST_CASE("staging gives back whole slabs that are idle, and what is out stays") {
  LockedArena& arena = LockedArena::process();
  arena.empty_cache();
  const uint64_t before = vm_locked_bytes();
  {
    Staging staging(kMiB, 8 * kMiB);
    std::vector<std::byte*> chunks = take(staging, 8);
    CHECK_FALSE(staging.reserve());
    CHECK(staging.kept_bytes() == 8 * kMiB);
    for (size_t i = 0; i < chunks.size(); ++i) {
      chunks[i][0] = static_cast<std::byte>(i);
    }
    arena.empty_cache();
    CHECK(vm_locked_bytes() == before + 8 * kMiB);
    std::sort(chunks.begin(), chunks.end());
    const std::byte kept = chunks.back()[0];
    for (size_t i = 0; i + 1 < chunks.size(); ++i) {
      staging.give_back(chunks[i]);
    }
    arena.empty_cache();
    CHECK(staging.kept_bytes() == 2 * kMiB);
    CHECK(vm_locked_bytes() == before + 2 * kMiB);
    CHECK(is_locked(chunks.back()));
    CHECK(chunks.back()[0] == kept);
    // It is as good as new.
    for (std::byte* chunk : take(staging, 7)) {
      CHECK(is_locked(chunk));
      chunk[0] = std::byte{1};
      staging.give_back(chunk);
    }
    staging.give_back(chunks.back());
  }
  arena.empty_cache();
  CHECK(vm_locked_bytes() == before);
}

TEST_CASE("under a limit staging locks half of what is left, and makes room when asked") {
  LockedArena::process().empty_cache();
  const int status = in_child([] {
    drop_lock_privilege(8 * kMiB);
    LockedArena& arena = LockedArena::process();
    Staging staging(kMiB, 32 * kMiB);
    std::vector<std::byte*> chunks;
    for (int i = 0; i < 8; ++i) {
      if (!staging.reserve()) return 1;
      chunks.push_back(staging.take());
    }
    const auto locked = std::count_if(chunks.begin(), chunks.end(), is_locked);
    if (locked != 4 || vm_locked_bytes() != 4 * kMiB) return 2;
    try {
      arena.allocate(5 * kMiB, PageOptions{});
      return 3;
    } catch (const LockRefused& refused) {
      const std::string what = refused.what();
      if (what.find("4.0 MiB already locked, 4.0 MiB of it in use as staging of open aio_handles "
                    "(their staging_bytes= bounds it); raise it") == std::string::npos) {
        return 4;
      }
    }
    for (std::byte* chunk : chunks) {
      staging.give_back(chunk);
    }
    Block* block = arena.allocate(5 * kMiB, PageOptions{});
    if (staging.kept_bytes() != 0 || vm_locked_bytes() != 5 * kMiB) return 5;
    LockedArena::release(block);
    // The same for memory of the caller's own.
    if (!staging.reserve()) return 6;
    staging.give_back(staging.take());
    std::vector<std::byte> own(8 * kMiB - 2 * page_bytes());
    lock_in_place(own.data(), own.size());
    if (!RangeRegistry::process().contains(own.data(), own.size())) return 7;
    unlock_in_place(own.data(), own.size());
    return 0;
  });
  CHECK(status == 0);
}

TEST_CASE("chunks are taken and given back while others ask for room") {
  LockedArena& arena = LockedArena::process();
  Staging staging(kMiB / 4, 4 * kMiB);
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> taken{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 3; ++number) {
    threads.emplace_back([&, number] {
      while (!is_over) {
        if (!staging.reserve()) continue;
        std::byte* chunk = staging.take();
        for (uint64_t at = 0; at < kMiB / 4; at += 4096) {
          chunk[at] = static_cast<std::byte>(number);
        }
        CHECK(chunk[4096] == static_cast<std::byte>(number));
        staging.give_back(chunk);
        ++taken;
      }
    });
  }
  threads.emplace_back([&] {
    while (!is_over) {
      arena.empty_cache();
      Staging other(kMiB, 4 * kMiB);
      CHECK(other.reserve());
      other.give_back(other.take());
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300 * testing::thread_seconds()));
  is_over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(taken > 0);
  CHECK(staging.kept_bytes() <= 4 * kMiB);
}
