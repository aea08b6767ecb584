// What engines do where the kernel refuses: rings, contexts, threads, a batch's rest.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "engine_suite.h"
#include "io/engine_select.h"
#include "io/engine_uring.h"
#include "os/status.h"
#include "os/unique_fd.h"
#include "support.h"

using namespace locked_tensor;
using testing::Folder;
using testing::reap;

namespace {

// A system call that fails with errno_value when its first argument is above `most`.
struct Refusal {
  long call;
  int errno_value;
  unsigned most = 0;
  bool is_always = true;
};

// Runs `work` on a thread of its own for which these calls fail, as for a whole container under a
// seccomp filter.
void with_refused(const std::vector<Refusal>& refusals, const std::function<void()>& work) {
  std::vector<sock_filter> filter;
  for (const Refusal& refusal : refusals) {
    const unsigned answer = SECCOMP_RET_ERRNO | static_cast<unsigned>(refusal.errno_value);
    filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(refusal.call), 0,
                              static_cast<uint8_t>(refusal.is_always ? 1 : 3)));
    if (!refusal.is_always) {
      filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)));
      filter.push_back(BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, refusal.most, 0, 1));
    }
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, answer));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  bool is_filtered = false;
  std::thread([&] {
    const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
    is_filtered = ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
                  ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
    if (is_filtered) work();
  }).join();
  REQUIRE(is_filtered);
}

EngineInfo info_of(const std::string& name) {
  for (const EngineInfo& info : engines()) {
    if (info.name == name) return info;
  }
  throw InternalError("engines() tells of " + name);
}

int errno_of_making(const std::string& name) {
  try {
    make_engine(name, 4, 1);
    return 0;
  } catch (const KernelError& error) {
    return error.errno_value();
  }
}

Request write_of(int fd, std::vector<std::byte>& data, uint64_t id) {
  Request request;
  request.operation = Operation::kWrite;
  request.fd = fd;
  request.buffer = data.data();
  request.length_bytes = data.size();
  request.offset_bytes = id * data.size();
  request.id = id;
  return request;
}

}  // namespace

TEST_CASE("a refused io_uring is explained, and another engine serves") {
  struct Case {
    long call;
    int errno_value;
    const char* remedy;
  };
  for (const Case& each :
       {Case{SYS_io_uring_setup, EPERM, "seccomp"}, Case{SYS_io_uring_setup, ENOSYS, "5.11"},
        Case{SYS_io_uring_setup, ENOMEM, "RLIMIT_MEMLOCK"},
        Case{SYS_io_uring_setup, EACCES, "security module"},
        Case{SYS_io_uring_enter, EPERM, "seccomp"}}) {
    EngineInfo info;
    std::string served;
    int refusal = 0;
    with_refused({{each.call, each.errno_value}}, [&] {
      info = info_of("io_uring");
      served = make_engine("auto", 4, 1)->name();
      refusal = errno_of_making("io_uring");
    });
    INFO(each.remedy);
    CHECK_FALSE(info.usable);
    CHECK(served != "io_uring");
    if (is_uring_built_in()) {
      CHECK(refusal == each.errno_value);
      CHECK(info.reason.find(each.remedy) != std::string::npos);
    } else {
      CHECK(refusal == EOPNOTSUPP);
      CHECK(info.reason.find("install liburing-dev") != std::string::npos);
    }
  }
}

TEST_CASE("kernel AIO takes the room that fs.aio-max-nr leaves, and says so when it leaves none") {
  size_t capacity = 0;
  with_refused({{SYS_io_setup, EAGAIN, 4, false}},
               [&] { capacity = make_engine("libaio", 64, 1)->capacity(); });
  CHECK(capacity == 4);
  EngineInfo info;
  int refusal = 0;
  std::string served;
  with_refused({{SYS_io_setup, EAGAIN}, {SYS_io_uring_setup, EPERM}}, [&] {
    info = info_of("libaio");
    refusal = errno_of_making("libaio");
    served = make_engine("auto", 4, 1)->name();
  });
  CHECK_FALSE(info.usable);
  CHECK(info.reason.find("fs.aio-max-nr") != std::string::npos);
  CHECK(refusal == EAGAIN);
  CHECK(served == "threads");
}

TEST_CASE("the threads engine moves bytes when no thread can be started") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  const UniqueFd fd = open_file(tmpfs.file("file"), O_RDWR | O_CREAT);
  std::vector<std::byte> data(4096, std::byte{5});
  const std::vector<Request> requests = {write_of(fd.get(), data, 0), write_of(fd.get(), data, 1)};
  Completion completions[2];
  int64_t submitted = 0;
  int64_t reaped = 0;
  const auto engine = make_engine("threads", 4, 2);
  with_refused({{SYS_clone3, EAGAIN}, {SYS_clone, EAGAIN}}, [&] {
    submitted = engine->submit(requests);
    reaped = reap(*engine, completions, 2, -1);
  });
  CHECK(submitted == 2);
  REQUIRE(reaped == 2);
  CHECK(completions[0].result == 4096);
  CHECK(completions[1].result == 4096);
  // Threads may be had again.
  CHECK(engine->submit({requests.data(), 1}) == 1);
  CHECK(reap(*engine, completions, 1, -1) == 1);
}

TEST_CASE("a ring hands over what was accepted and nothing that was refused") {
  if (!info_of("io_uring").usable) return;
  const Folder tmpfs(Folder::Where::kTmpfs);
  const UniqueFd fd = open_file(tmpfs.file("file"), O_RDWR | O_CREAT);
  std::vector<std::byte> data(512, std::byte{5});
  const auto engine = make_engine("io_uring", 4, 1);
  for (const int errno_value : {EAGAIN, EBUSY, EPERM}) {
    const std::vector<Request> refused = {write_of(fd.get(), data, 1), write_of(fd.get(), data, 2)};
    const Request accepted = write_of(fd.get(), data, 3);
    int64_t result = 0;
    with_refused({{SYS_io_uring_enter, errno_value}}, [&] { result = engine->submit(refused); });
    CHECK(result == -errno_value);
    REQUIRE(engine->submit({&accepted, 1}) == 1);
    Completion completions[4];
    CHECK(reap(*engine, completions, 1, -1) == 1);
    CHECK(completions[0].id == 3);
    CHECK(completions[0].result == 512);
    CHECK(reap(*engine, completions, 0, 0) == 0);
  }
}

TEST_CASE("an unknown engine is named") {
  CHECK_THROWS_WITH_AS(make_engine("steam", 4, 1), doctest::Contains("\"steam\""),
                       std::invalid_argument);
}
