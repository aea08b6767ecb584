// What several native tests need: seeds, folders, counters read from the kernel, children.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

namespace locked_tensor::testing {

// LOCKED_TENSOR_SEED or a fixed one; tests print it when they fail.
uint64_t seed();
// LOCKED_TENSOR_ROUNDS or `usual`: how many random programs a property test runs.
uint64_t rounds(uint64_t usual);

// LOCKED_TENSOR_THREAD_SECONDS or 2: how long threads do things at random.
uint64_t thread_seconds();

// VmLck of this process, in bytes.
uint64_t vm_locked_bytes();

// A fresh folder on a real disk (TEST_FOLDER or /var/tmp) or on tmpfs, removed with the object.
class Folder {
 public:
  enum class Where { kDisk, kTmpfs };
  explicit Folder(Where where);
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Runs `work` in a forked child; its return value is the child's exit status (128 + signal if
// killed).
int in_child(const std::function<int()>& work);

// For a child: no CAP_IPC_LOCK, another user, RLIMIT_MEMLOCK of `bytes`.
void drop_lock_privilege(uint64_t bytes);

}  // namespace locked_tensor::testing
