#include "support.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "os/status.h"

namespace locked_tensor::testing {

namespace {

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

uint64_t seed() {
  return number_from("LOCKED_TENSOR_SEED", 8212);
}

uint64_t rounds(uint64_t usual) {
  return number_from("LOCKED_TENSOR_ROUNDS", usual);
}

uint64_t thread_seconds() {
  return number_from("LOCKED_TENSOR_THREAD_SECONDS", 2);
}

uint64_t vm_locked_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmLck:")) {
      return std::stoull(line.substr(6)) * 1024;
    }
  }
  return 0;
}

Folder::Folder(Where where) {
  const char* disk = std::getenv("TEST_FOLDER");
  path_ = where == Where::kTmpfs ? "/dev/shm" : disk != nullptr ? disk : "/var/tmp";
  path_ += "/locked_tensor_test_XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr) {
    throw_errno("make a folder", path_);
  }
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

int in_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 125;
    try {
      status = work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(status);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void drop_lock_privilege(uint64_t bytes) {
  constexpr int kCapIpcLock = 14;
  const rlimit limit{bytes, bytes};
  if (::prctl(PR_CAPBSET_DROP, kCapIpcLock) != 0 || ::setrlimit(RLIMIT_MEMLOCK, &limit) != 0 ||
      ::setgid(65534) != 0 || ::setuid(65534) != 0) {
    throw_errno("drop the privilege to lock memory");
  }
}

}  // namespace locked_tensor::testing
