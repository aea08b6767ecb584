// One suite for every engine: what the handle relies on.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <thread>
#include <vector>

#include "io/engine_select.h"
#include "os/locked_pages.h"
#include "os/status.h"
#include "os/unique_fd.h"
#include "scripted_engine.h"
#include "support.h"

using namespace locked_tensor;
using testing::Folder;

namespace {

std::vector<std::string> usable_engines() {
  std::vector<std::string> names = {"scripted"};
  for (const EngineInfo& info : engines()) {
    if (info.usable) names.push_back(info.name);
  }
  return names;
}

std::unique_ptr<Engine> make(const std::string& name, size_t depth) {
  if (name == "scripted") {
    return std::make_unique<testing::ScriptedEngine>(testing::Script{}, depth);
  }
  return make_engine(name, depth, 2);
}

Request request_for(Operation operation, int fd, std::byte* data, uint64_t bytes, uint64_t offset,
                    uint64_t id = 0) {
  Request request;
  request.operation = operation;
  request.fd = fd;
  request.buffer = data;
  request.length_bytes = bytes;
  request.offset_bytes = offset;
  request.id = id;
  return request;
}

int64_t result_of(Engine& engine, const Request& request) {
  REQUIRE(engine.submit({&request, 1}) == 1);
  Completion completion;
  int64_t count;
  do {
    count = engine.reap({&completion, 1}, 1, -1);
  } while (count == -EINTR || count == 0);
  REQUIRE(count == 1);
  REQUIRE(completion.id == request.id);
  return completion.result;
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
        CHECK(result_of(*engine, request_for(Operation::kWrite, fd.get(), data.data(), data.size(),
                                             offset)) == static_cast<int64_t>(data.size()));
        std::fill(back.begin(), back.end(), std::byte{0});
        CHECK(result_of(*engine, request_for(Operation::kRead, fd.get(), back.data(), back.size(),
                                             offset)) == static_cast<int64_t>(data.size()));
        CHECK(back == data);
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
      if (name != "scripted") CHECK(engine->sync(-1, true) == -EBADF);
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
      const int64_t count = engine->reap(completions, std::min<size_t>(4, 16 - results.size()), -1);
      REQUIRE(count >= 0);
      for (int64_t i = 0; i < count; ++i) {
        CHECK(results.emplace(completions[i].id, completions[i].result).second);
        CHECK(completions[i].result == 4096);
      }
    }
    Completion none[1];
    CHECK(engine->reap(none, 0, 0) == 0);
  }
}

TEST_CASE("fixed buffers serve while they are set, and a cleared slot is refused") {
  const Folder disk(Folder::Where::kDisk);
  const auto engine = make_engine("auto", 8, 1);
  if (engine->buffer_slots() == 0) return;
  LockedPages pages(1 << 20, PageOptions{});
  const UniqueFd fd = open_file(disk.file("file"), O_RDWR | O_CREAT | O_DIRECT);
  REQUIRE(engine->set_buffer(3, pages.data(), pages.size()) == 0);
  std::memset(pages.data(), 42, pages.size());
  Request write = request_for(Operation::kWrite, fd.get(), pages.data() + 4096, 8192, 0);
  write.buffer_slot = 3;
  CHECK(result_of(*engine, write) == 8192);
  if (engine->has_fixed_vectors()) {
    const iovec vectors[] = {{pages.data(), 4096}, {pages.data() + 65536, 4096}};
    Request vectored = write;
    vectored.vectors = vectors;
    vectored.vector_count = 2;
    CHECK(result_of(*engine, vectored) == 8192);
  }
  REQUIRE(engine->set_buffer(3, nullptr, 0) == 0);
  CHECK(result_of(*engine, write) == -EFAULT);
}

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
    for (uint64_t t = 0; t < 4; ++t) {
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
    while (completed < 400) {
      Completion completions[8];
      const int64_t count = engine->reap(completions, submitted > completed ? 1 : 0, 1'000'000);
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

TEST_CASE("an eventfd is signalled at completions") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  for (const std::string& name : usable_engines()) {
    if (name == "scripted") continue;
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
    CHECK(engine->reap({&completion, 1}, 1, -1) == 1);
  }
}

TEST_CASE(
    "engines end with requests in flight, leak no descriptor, and a forked child only forgets "
    "them") {
  const Folder disk(Folder::Where::kDisk);
  for (const std::string& name : usable_engines()) {
    if (name == "scripted") continue;
    INFO(name);
    const UniqueFd fd = open_file(disk.file(name), O_RDWR | O_CREAT);
    std::vector<std::byte> data(1 << 20);
    const size_t before = open_descriptors();
    for (int i = 0; i < 50; ++i) {
      const auto engine = make(name, 4);
      const Request request = request_for(Operation::kWrite, fd.get(), data.data(), data.size(), 0);
      REQUIRE(engine->submit({&request, 1}) == 1);
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

TEST_CASE("a refused io_uring is explained, and another engine serves") {
  for (const int refusal : {EPERM, ENOSYS, ENOMEM}) {
    CHECK(testing::in_child([&] {
            sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(refusal)),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
            const sock_fprog program{4, filter};
            if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
                ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
              return 1;
            }
            const EngineInfo best = engines().front();
            if (best.usable || best.reason.find(";") == std::string::npos) return 2;
            if (std::string(make_engine("auto", 4, 1)->name()) != "libaio") return 3;
            try {
              make_engine("io_uring", 4, 1);
              return 4;
            } catch (const KernelError& error) {
              return error.errno_value() == refusal || !LOCKED_TENSOR_HAS_LIBURING ? 0 : 5;
            }
          }) == 0);
  }
}

TEST_CASE("an unknown engine is named") {
  CHECK_THROWS_WITH_AS(make_engine("steam", 4, 1), doctest::Contains("\"steam\""),
                       std::invalid_argument);
}
