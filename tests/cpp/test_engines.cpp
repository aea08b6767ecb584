// One suite for every engine: what the handle relies on.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <tuple>
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

// Submits all of them, whatever number the engine takes at a time.
void submit_all(Engine& engine, std::span<const Request> requests) {
  while (!requests.empty()) {
    const int64_t accepted = engine.submit(requests);
    REQUIRE(accepted > 0);
    requests = requests.subspan(static_cast<size_t>(accepted));
  }
}

// Results of `count` requests in flight, by id; each completes once.
std::map<uint64_t, int64_t> reap_all(Engine& engine, size_t count) {
  std::map<uint64_t, int64_t> results;
  while (results.size() < count) {
    Completion completions[16];
    const int64_t reaped = reap(engine, completions, 1, -1);
    REQUIRE(reaped >= 0);
    for (int64_t i = 0; i < reaped; ++i) {
      REQUIRE(results.emplace(completions[i].id, completions[i].result).second);
    }
  }
  return results;
}

}  // namespace

TEST_CASE("requests move their bytes, or say in their result why not") {
  const Folder disk(Folder::Where::kDisk);
  const Folder tmpfs(Folder::Where::kTmpfs);
  for (const std::string& name : usable_engines()) {
    for (const Folder* folder : {&disk, &tmpfs}) {
      INFO(name);
      const auto engine = make(name, 8);
      const UniqueFd fd = open_file(folder->file(name), O_RDWR | O_CREAT);
      std::vector<std::byte> data(100'000);
      for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7);
      std::vector<std::byte> back(data.size());
      const uint64_t far = uint64_t{5} << 30;
      for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, far}) {
        for (const size_t bytes :
             {size_t{1}, size_t{511}, size_t{512}, size_t{4097}, data.size()}) {
          const auto all = static_cast<int64_t>(bytes);
          CHECK(result_of(*engine, request_for(Operation::kWrite, fd.get(), data.data(), bytes,
                                               offset)) == all);
          std::fill(back.begin(), back.end(), std::byte{0});
          CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), back.data(), bytes,
                                               offset)) == all);
          CHECK(std::equal(back.begin(), back.begin() + all, data.begin()));
          CHECK(std::all_of(back.begin() + all, back.end(),
                            [](std::byte byte) { return byte == std::byte{0}; }));
        }
      }
      const iovec vectors[] = {{data.data() + 10, 100}, {data.data() + 5000, 3000}};
      Request vectored = request_for(Operation::kWrite, fd.get(), nullptr, 3100, 0);
      vectored.vectors = vectors;
      vectored.vector_count = 2;
      CHECK(result_of(*engine, vectored) == 3100);
      CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), back.data(), 3100, 0)) ==
            3100);
      CHECK(std::memcmp(back.data(), data.data() + 10, 100) == 0);
      CHECK(std::memcmp(back.data() + 100, data.data() + 5000, 3000) == 0);

      const uint64_t end = far + data.size();
      CHECK(result_of(*engine,
                      request_for(Operation::kRead, fd.get(), back.data(), 500, end - 100)) == 100);
      CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), back.data(), 500, end)) ==
            0);
      CHECK(result_of(*engine, request_for(Operation::kRead, -1, back.data(), 500, 0)) == -EBADF);
      const UniqueFd directory = open_file(folder->file("."), O_RDONLY);
      CHECK(result_of(*engine,
                      request_for(Operation::kRead, directory.get(), back.data(), 500, 0)) < 0);
      CHECK(engine->sync(fd.get(), false) == 0);
      CHECK(engine->sync(fd.get(), true) == 0);
      CHECK(engine->sync(-1, true) == -EBADF);
    }
  }
}

TEST_CASE(
    "as many requests as the capacity are in flight, each completes once, and some can be waited "
    "for") {
  const Folder disk(Folder::Where::kDisk);
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const auto engine = make(name, 16);
    REQUIRE(engine->capacity() == 16);
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT);
    std::vector<std::byte> data(16 * 4096);
    std::vector<Request> requests;
    for (uint64_t i = 0; i < 16; ++i) {
      requests.push_back(
          request_for(Operation::kWrite, fd.get(), data.data() + 4096 * i, 4096, 4096 * i, i));
    }
    REQUIRE(engine->submit(requests) == 16);
    std::map<uint64_t, int64_t> results;
    while (results.size() < 16) {
      Completion completions[16];
      const int64_t count =
          reap(*engine, completions, std::min<size_t>(4, 16 - results.size()), -1);
      REQUIRE(count >= 0);
      for (int64_t i = 0; i < count; ++i) {
        CHECK(results.emplace(completions[i].id, completions[i].result).second);
        CHECK(completions[i].result == 4096);
      }
    }
    Completion none[1];
    CHECK(reap(*engine, none, 0, 0) == 0);
  }
}

TEST_CASE("a refused request in a batch is refused alone") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const auto engine = make(name, 8);
    const UniqueFd events(::eventfd(0, EFD_CLOEXEC));
    REQUIRE(engine->notify(events.get()) == 0);
    const UniqueFd fd = open_file(tmpfs.file(name), O_RDWR | O_CREAT);
    std::vector<std::byte> data(512);
    std::vector<Request> requests;
    for (uint64_t i = 0; i < 5; ++i) {
      const int where = i == 0 || i == 2 ? -1 : fd.get();
      requests.push_back(request_for(Operation::kWrite, where, data.data(), 512, 512 * i, i));
    }
    submit_all(*engine, requests);
    for (const auto& [id, result] : reap_all(*engine, 5)) {
      CHECK(result == (id == 0 || id == 2 ? -EBADF : 512));
    }
    CHECK(std::filesystem::file_size(tmpfs.file(name)) == 5 * 512);
    REQUIRE(engine->notify(-1) == 0);
  }
}

TEST_CASE("direct descriptors take what is aligned, and a disk's refuse what is not") {
  const Folder disk(Folder::Where::kDisk);
  const Folder tmpfs(Folder::Where::kTmpfs);
  LockedPages pages(1 << 16, PageOptions{});
  for (const std::string& name : usable_engines()) {
    for (const Folder* folder : {&disk, &tmpfs}) {
      INFO(name);
      const auto engine = make(name, 8);
      const UniqueFd fd = open_file(folder->file(name), O_RDWR | O_CREAT | O_DIRECT);
      std::byte* data = pages.data();
      std::byte* back = data + 16384;
      std::memset(data, 99, 8192);
      std::memset(back, 0, 8192);
      CHECK(result_of(*engine, request_for(Operation::kWrite, fd.get(), data, 8192, 4096)) == 8192);
      CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), back, 8192, 4096)) == 8192);
      CHECK(std::memcmp(data, back, 8192) == 0);
      if (folder == &tmpfs) continue;
      for (const auto& [memory, bytes, offset] :
           {std::tuple{1, 4096, 4096}, std::tuple{0, 100, 4096}, std::tuple{0, 4096, 4103}}) {
        CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), back + memory,
                                             static_cast<uint64_t>(bytes),
                                             static_cast<uint64_t>(offset))) == -EINVAL);
      }
    }
  }
}

TEST_CASE(
    "fixed buffers serve while they are set, can be replaced, and a cleared slot is refused") {
  const Folder disk(Folder::Where::kDisk);
  LockedPages pages(1 << 20, PageOptions{});
  std::memset(pages.data(), 42, pages.size());
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const auto engine = make(name, 8);
    const int32_t slots = engine->buffer_slots();
    if (slots == 0) {
      CHECK(engine->set_buffer(0, pages.data(), 4096) == -EOPNOTSUPP);
      continue;
    }
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT | O_DIRECT);
    CHECK(engine->set_buffer(3, nullptr, 0) == 0);
    REQUIRE(engine->set_buffer(3, pages.data(), pages.size()) == 0);
    Request write = request_for(Operation::kWrite, fd.get(), pages.data() + 4096, 8192, 0);
    write.buffer_slot = 3;
    CHECK(result_of(*engine, write) == 8192);
    Request read = write;
    read.operation = Operation::kRead;
    CHECK(result_of(*engine, read) == 8192);
    if (engine->has_fixed_vectors()) {
      const iovec vectors[] = {{pages.data(), 4096}, {pages.data() + 65536, 4096}};
      for (Request vectored : {write, read}) {
        vectored.vectors = vectors;
        vectored.vector_count = 2;
        CHECK(result_of(*engine, vectored) == 8192);
      }
    }
    REQUIRE(engine->set_buffer(3, pages.data() + 65536, 65536) == 0);
    CHECK(result_of(*engine, write) == -EFAULT);
    write.buffer = pages.data() + 65536;
    CHECK(result_of(*engine, write) == 8192);
    REQUIRE(engine->set_buffer(3, nullptr, 0) == 0);
    CHECK(result_of(*engine, write) == -EFAULT);
    CHECK(engine->set_buffer(slots, pages.data(), 4096) == -EINVAL);
    write.buffer_slot = slots;
    CHECK(result_of(*engine, write) == -EFAULT);
    write.buffer_slot = -1;
    CHECK(result_of(*engine, write) == 8192);
  }
}

TEST_CASE("a wait ends when what it waits for is there, or at its deadline") {
  const Folder disk(Folder::Where::kDisk);
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const auto engine = make(name, 8);
    Completion completions[8];
    CHECK(reap(*engine, completions, 0, -1) == 0);
    // Nothing is in flight, so nothing but the deadline can end it. The scripted engine has none.
    if (name != "scripted") CHECK(reap(*engine, completions, 1, 20'000'000) == 0);
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT);
    std::vector<std::byte> data(8 * 4096);
    std::vector<Request> requests;
    for (uint64_t i = 0; i < 8; ++i) {
      requests.push_back(
          request_for(Operation::kWrite, fd.get(), data.data() + 4096 * i, 4096, 4096 * i, i));
    }
    submit_all(*engine, requests);
    CHECK(reap(*engine, {completions, 3}, 3, -1) == 3);
    CHECK(reap(*engine, completions, 5, -1) == 5);
    CHECK(reap(*engine, completions, 0, 0) == 0);
  }
}

TEST_CASE("an eventfd is signalled at each completion, refusals too, until it is taken away") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  for (const std::string& name : usable_engines()) {
    INFO(name);
    const auto engine = make(name, 4);
    const UniqueFd events(::eventfd(0, EFD_CLOEXEC));
    REQUIRE(engine->notify(events.get()) == 0);
    const UniqueFd fd = open_file(tmpfs.file(name), O_RDWR | O_CREAT);
    std::vector<std::byte> data(4096);
    const Request request = request_for(Operation::kWrite, fd.get(), data.data(), 4096, 0);
    REQUIRE(engine->submit({&request, 1}) == 1);
    pollfd waiting{events.get(), POLLIN, 0};
    CHECK(::poll(&waiting, 1, 10'000) == 1);
    Completion completion;
    CHECK(reap(*engine, {&completion, 1}, 1, -1) == 1);
    eventfd_t count = 0;
    REQUIRE(::eventfd_read(events.get(), &count) == 0);
    CHECK(count == 1);
    const Request refused = request_for(Operation::kWrite, -1, data.data(), 4096, 0);
    REQUIRE(engine->submit({&refused, 1}) == 1);
    CHECK(::poll(&waiting, 1, 10'000) == 1);
    CHECK(reap(*engine, {&completion, 1}, 1, -1) == 1);
    CHECK(completion.result == -EBADF);
    REQUIRE(::eventfd_read(events.get(), &count) == 0);
    REQUIRE(engine->notify(-1) == 0);
    CHECK(result_of(*engine, request) == 4096);
    CHECK(::poll(&waiting, 1, 0) == 0);
  }
}
