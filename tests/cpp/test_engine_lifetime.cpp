// Engines among threads, signals and forks, and how they end.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "engine_suite.h"
#include "os/locked_pages.h"
#include "os/unique_fd.h"
#include "support.h"

using namespace locked_tensor;
using testing::Folder;
using testing::make;
using testing::reap;
using testing::request_for;
using testing::result_of;
using testing::usable_engines;

namespace {

// VmPin: pages held by registered buffers.
uint64_t vm_pinned_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmPin:")) return std::stoull(line.substr(6));
  }
  return 0;
}

size_t open_descriptors() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("threads submit to one engine while one reaps") {
  const Folder disk(Folder::Where::kDisk);
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const auto engine = make(name, 64);
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT);
    std::atomic<int> room{64};
    std::atomic<int> submitted{0};
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    std::vector<std::byte> data(4096, std::byte{7});
    for (uint64_t t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        for (uint64_t i = 0; i < 100; ++i) {
          while (room.fetch_sub(1) <= 0) {
            room.fetch_add(1);
            std::this_thread::yield();
          }
          const Request request = request_for(Operation::kWrite, fd.get(), data.data(), 512,
                                              512 * (100 * t + i), 100 * t + i);
          while (engine->submit({&request, 1}) != 1) {
          }
          ++submitted;
        }
        // io_uring cancels what a thread has queued when that thread ends; the handle would retry.
        while (!is_over) std::this_thread::yield();
      });
    }
    int completed = 0;
    int64_t wrong = 0;
    while (completed < 800) {
      Completion completions[8];
      const int64_t count = reap(*engine, completions, submitted > completed ? 1 : 0, 1'000'000);
      for (int64_t i = 0; i < count; ++i) {
        ++completed;
        if (completions[i].result != 512) wrong = completions[i].result;
        room.fetch_add(1);
      }
    }
    is_over = true;
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE(
    "engines end with requests in flight, leak no descriptor, and a forked child only forgets "
    "them") {
  const Folder disk(Folder::Where::kDisk);
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT);
    std::vector<std::byte> data(1 << 18);
    std::vector<std::byte> back(data.size());
    const size_t before = open_descriptors();
    for (int i = 0; i < 200; ++i) {
      std::fill(data.begin(), data.end(), static_cast<std::byte>(i));
      auto engine = make(name, 4);
      const Request request = request_for(Operation::kWrite, fd.get(), data.data(), data.size(), 0);
      REQUIRE(engine->submit({&request, 1}) == 1);
      engine.reset();
      REQUIRE(::pread(fd.get(), back.data(), back.size(), 0) == static_cast<ssize_t>(back.size()));
      REQUIRE(back == data);
    }
    CHECK(open_descriptors() == before);
    auto engine = make(name, 4);
    CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), data.data(), 100, 0)) == 100);
    CHECK(testing::in_child([&] {
            engine.reset();
            return 0;
          }) == 0);
    CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), data.data(), 100, 0)) == 100);
  }
}

TEST_CASE("a forked child that has closed its engine keeps none of the parent's registered pages") {
  LockedPages pages(1 << 20, PageOptions{});
  const uint64_t before = vm_pinned_kib();
  for (const std::string& name : usable_engines()) {
    auto engine = make(name, 4);
    if (engine->buffer_slots() == 0 || name == "scripted") continue;
    INFO(name);
    REQUIRE(engine->set_buffer(0, pages.data(), pages.size()) == 0);
    CHECK(vm_pinned_kib() == before + 1024);
    int to_parent[2];
    int to_child[2];
    REQUIRE(::pipe2(to_parent, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(to_child, O_CLOEXEC) == 0);
    const UniqueFd ends[] = {UniqueFd(to_parent[0]), UniqueFd(to_parent[1]), UniqueFd(to_child[0]),
                             UniqueFd(to_child[1])};
    char byte = 0;
    const pid_t child = ::fork();
    if (child == 0) {
      engine.reset();
      const bool is_told =
          ::write(to_parent[1], &byte, 1) == 1 && ::read(to_child[0], &byte, 1) == 1;
      ::_exit(is_told ? 0 : 1);
    }
    REQUIRE(::read(to_parent[0], &byte, 1) == 1);
    engine.reset();
    // The kernel takes a ring apart in the background.
    for (int i = 0; i < 500 && vm_pinned_kib() != before; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(vm_pinned_kib() == before);
    REQUIRE(::write(to_child[1], &byte, 1) == 1);
    int status = 1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
}

TEST_CASE("signals do not lose completions") {
  const Folder disk(Folder::Where::kDisk);
  struct sigaction action {};
  action.sa_handler = [](int) {};
  struct sigaction old;
  ::sigaction(SIGUSR1, &action, &old);
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const auto engine = make(name, 4);
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT);
    std::vector<std::byte> data(1 << 20);
    std::atomic<bool> is_stopping{false};
    const pthread_t self = ::pthread_self();
    std::thread storm([&] {
      while (!is_stopping) {
        ::pthread_kill(self, SIGUSR1);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    for (uint64_t i = 0; i < 50; ++i) {
      CHECK(result_of(*engine, request_for(Operation::kWrite, fd.get(), data.data(), data.size(), 0,
                                           i)) == static_cast<int64_t>(data.size()));
    }
    is_stopping = true;
    storm.join();
  }
  ::sigaction(SIGUSR1, &old, nullptr);
}

TEST_CASE("what two engines have as fixed buffers is pinned once, until both have cleared it") {
  LockedPages pages(1 << 20, PageOptions{});
  const Folder disk(Folder::Where::kDisk);
  const uint64_t before = vm_pinned_kib();
  for (const std::string& name : usable_engines()) {
    auto first = make(name, 4);
    if (first->buffer_slots() == 0 || name == "scripted") continue;
    INFO(name);
    auto second = make(name, 4);
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT | O_DIRECT);
    Request write = request_for(Operation::kWrite, fd.get(), pages.data(), 4096, 0);
    write.buffer_slot = 5;
    const auto pinned_becomes = [&](uint64_t kib) {
      // The kernel takes a ring apart in the background.
      for (int i = 0; i < 500 && vm_pinned_kib() != before + kib; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      return vm_pinned_kib() == before + kib;
    };
    REQUIRE(first->set_buffer(2, pages.data(), pages.size()) == 0);
    REQUIRE(second->set_buffer(5, pages.data(), pages.size()) == 0);
    CHECK(vm_pinned_kib() == before + 1024);
    // Below what is in use: registered apart, and nothing behind it is lost.
    REQUIRE(second->set_buffer(4, pages.data(), 4096) == 0);
    CHECK(result_of(*second, write) == 4096);
    write.buffer_slot = 4;
    CHECK(result_of(*second, write) == 4096);
    REQUIRE(second->set_buffer(4, nullptr, 0) == 0);
    write.buffer_slot = 5;
    first.reset();
    CHECK(pinned_becomes(1024));
    CHECK(result_of(*second, write) == 4096);
    REQUIRE(second->set_buffer(5, nullptr, 0) == 0);
    CHECK(pinned_becomes(0));
    CHECK(result_of(*second, write) == -EFAULT);
    REQUIRE(second->set_buffer(5, pages.data(), pages.size()) == 0);
    CHECK(result_of(*second, write) == 4096);
    second.reset();
    CHECK(pinned_becomes(0));
  }
}
