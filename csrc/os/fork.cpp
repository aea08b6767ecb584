#include "os/fork.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "os/status.h"

namespace locked_tensor {

namespace {

// Leaked: a fork may come during static destruction.
struct Forks {
  std::mutex mutex;
  std::vector<ForkHooks> hooks;
  std::atomic<uint64_t> generation{0};
};

Forks& forks();

void before() {
  forks().mutex.lock();
  for (auto hook = forks().hooks.rbegin(); hook != forks().hooks.rend(); ++hook) {
    if (hook->before) {
      hook->before();
    }
  }
}

void in_parent() {
  for (ForkHooks& hook : forks().hooks) {
    if (hook.in_parent) {
      hook.in_parent();
    }
  }
  forks().mutex.unlock();
}

void in_child() {
  forks().generation.fetch_add(1);
  for (ForkHooks& hook : forks().hooks) {
    if (hook.in_child) {
      hook.in_child();
    }
  }
  forks().mutex.unlock();
}

Forks& forks() {
  static Forks* forks = [] {
    auto* made = new Forks;
    LT_CHECK(::pthread_atfork(before, in_parent, in_child) == 0, "fork hooks are installed");
    return made;
  }();
  return *forks;
}

}  // namespace

void add_fork_hooks(ForkHooks hooks) {
  std::lock_guard<std::mutex> lock(forks().mutex);
  forks().hooks.push_back(std::move(hooks));
}

uint64_t fork_generation() {
  return forks().generation.load(std::memory_order_relaxed);
}

}  // namespace locked_tensor
