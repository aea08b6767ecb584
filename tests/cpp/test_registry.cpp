// The range registry against a model, and under threads.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "memory/range_registry.h"
#include "support.h"

using namespace locked_tensor;

namespace {

constexpr uintptr_t kBase = uintptr_t{1} << 40;

const void* at(uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}

}  // namespace

TEST_CASE("a span is contained when every byte of it lies in a range") {
  RangeRegistry registry;
  registry.add(kBase + 100, kBase + 5000);
  CHECK(registry.contains(at(kBase + 100), 4900));
  CHECK(registry.contains(at(kBase + 4999), 1));
  CHECK_FALSE(registry.contains(at(kBase + 99), 1));
  CHECK_FALSE(registry.contains(at(kBase + 5000), 1));
  CHECK_FALSE(registry.contains(at(kBase + 4999), 2));
  CHECK_FALSE(registry.contains(at(kBase + 100), 4901));
  CHECK_FALSE(registry.contains(nullptr, 1));
  CHECK_FALSE(registry.contains(at(UINTPTR_MAX - 10), 100));
}

TEST_CASE("no bytes are contained inside a range and at its end, and nowhere else") {
  RangeRegistry registry;
  registry.add(kBase, kBase + 4096);
  CHECK(registry.contains(at(kBase), 0));
  CHECK(registry.contains(at(kBase + 4096), 0));
  CHECK_FALSE(registry.contains(at(kBase + 4097), 0));
  CHECK_FALSE(registry.contains(nullptr, 0));
}

TEST_CASE("ranges that touch are one span, ranges with a gap are not") {
  RangeRegistry registry;
  registry.add(kBase, kBase + 4096);
  registry.add(kBase + 4096, kBase + 8192);
  registry.add(kBase + 8193, kBase + 9000);
  CHECK(registry.contains(at(kBase), 8192));
  CHECK_FALSE(registry.contains(at(kBase), 8193));
  CHECK(registry.find(at(kBase))->id != registry.find(at(kBase + 4096))->id);
}

TEST_CASE("a byte is locked while one of the ranges over it lives") {
  RangeRegistry registry;
  registry.add(kBase, kBase + 1000);
  registry.add(kBase + 500, kBase + 1500);
  registry.remove(kBase, kBase + 1000);
  CHECK_FALSE(registry.contains(at(kBase + 499), 1));
  CHECK(registry.contains(at(kBase + 500), 1000));
  registry.remove(kBase + 500, kBase + 1500);
  CHECK_FALSE(registry.contains(at(kBase + 700), 1));
  CHECK(registry.range_count() == 0);
  CHECK(registry.locked_bytes() == 0);
}

TEST_CASE("an id is never used twice, and a range may be removed piecewise") {
  RangeRegistry registry;
  const uintptr_t end = kBase + (uintptr_t{64} << 20);
  registry.add(kBase, end);
  const uint64_t first = registry.find(at(kBase))->id;
  registry.remove(kBase + (8 << 20), kBase + (24 << 20));
  CHECK(registry.contains(at(kBase), 8 << 20));
  CHECK_FALSE(registry.contains(at(kBase + (8 << 20)), 1));
  CHECK(registry.contains(at(kBase + (24 << 20)), 40 << 20));
  registry.remove(kBase, kBase + (8 << 20));
  registry.remove(kBase + (24 << 20), end);
  registry.add(kBase, end);
  CHECK(registry.find(at(kBase))->id > first);
  CHECK(registry.contains(at(kBase), end - kBase));
}

TEST_CASE("random adds and removes agree with a count for every byte") {
  std::mt19937_64 random(testing::seed());
  for (uint64_t round = 0; round < testing::rounds(300); ++round) {
    RangeRegistry registry;
    constexpr uintptr_t kUnit = 1000;  // pieces share pages, and some cover 16 MiB of them
    const uintptr_t scale = round % 10 == 0 ? 40'000'000 : kUnit;
    std::vector<int> counts(64);
    std::vector<std::pair<int, int>> live;
    for (int step = 0; step < 60; ++step) {
      if (live.empty() || random() % 3 != 0) {
        const int begin = static_cast<int>(random() % 60);
        const int end = begin + 1 + static_cast<int>(random() % (63 - begin));
        registry.add(kBase + begin * scale, kBase + end * scale);
        live.emplace_back(begin, end);
        for (int i = begin; i < end; ++i) ++counts[i];
      } else {
        const size_t victim = random() % live.size();
        const auto [begin, end] = live[victim];
        live.erase(live.begin() + static_cast<long>(victim));
        registry.remove(kBase + begin * scale, kBase + end * scale);
        for (int i = begin; i < end; ++i) --counts[i];
      }
      for (int look = 0; look < 20; ++look) {
        const int begin = static_cast<int>(random() % 62);
        const int end = begin + 1 + static_cast<int>(random() % (63 - begin));
        bool expected = true;
        for (int i = begin; i < end; ++i) expected = expected && counts[i] > 0;
        INFO("seed " << testing::seed() << " round " << round << " step " << step);
        REQUIRE(registry.contains(at(kBase + begin * scale), (end - begin) * scale) == expected);
        REQUIRE(registry.find(at(kBase + begin * scale)).has_value() == (counts[begin] > 0));
      }
    }
  }
}

TEST_CASE("readers are right about a range that stays, while others come and go") {
  RangeRegistry registry;
  registry.add(kBase, kBase + (1 << 20));
  std::atomic<bool> is_stopping{false};
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(static_cast<uint64_t>(i));
      while (!is_stopping) {
        const uintptr_t begin = kBase + random() % (1 << 19);
        wrong += registry.contains(at(begin), random() % (1 << 19)) ? 0 : 1;
        wrong += registry.contains(at(kBase - 4096), 4097) ? 1 : 0;
      }
    });
  }
  for (int i = 0; i < 20000; ++i) {
    const uintptr_t begin = kBase + (1 << 20) + 4096 * (i % 7);
    registry.add(begin, begin + 100);
    registry.add(kBase + 512, kBase + 70000);
    registry.remove(kBase + 512, kBase + 70000);
    registry.remove(begin, begin + 100);
  }
  is_stopping = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(registry.range_count() >= 1);
}

TEST_CASE("release listeners hear of every release until they are removed") {
  struct Listener : ReleaseListener {
    std::vector<std::pair<uintptr_t, uintptr_t>> heard;
    void on_release(uintptr_t begin, uintptr_t end) noexcept override {
      heard.emplace_back(begin, end);
    }
  } listener;
  RangeRegistry registry;
  registry.add_release_listener(&listener);
  registry.announce_release(1, 2);
  registry.remove_release_listener(&listener);
  registry.announce_release(3, 4);
  CHECK(listener.heard == std::vector<std::pair<uintptr_t, uintptr_t>>{{1, 2}});
}

TEST_CASE("a forked child begins with an empty registry") {
  RangeRegistry::process().add(kBase, kBase + 4096);
  CHECK(testing::in_child([] { return RangeRegistry::process().contains(at(kBase), 1) ? 1 : 0; }) ==
        0);
  CHECK(RangeRegistry::process().contains(at(kBase), 4096));
  RangeRegistry::process().remove(kBase, kBase + 4096);
}
