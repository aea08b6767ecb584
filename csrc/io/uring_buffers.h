// UringBuffers: memory that io_uring has registered, once for all rings of the process.
//
// Note [Shared buffers] Registering pins every page: 1 GiB took 35 ms in ordinary pages and 6 ms in
// huge ones, and is charged to the lock limit, for each ring anew. So one ring, which does nothing
// else, has it registered, and the others clone its slots: 13 us, and no further charge. Needs
// Linux 6.13. Kernels before 6.19 may lose what a table has behind a cloned slot: a ring clones
// only where nothing is behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

struct io_uring;

namespace locked_tensor {

class UringBuffers {
 public:
  static UringBuffers& process();

  // Has [data, data + bytes) registered, or finds it so, and puts it into `slot` of `ring`, whose
  // table is there. The place to give back later, or -errno; -EOPNOTSUPP where the kernel cannot.
  int32_t lend(io_uring& ring, unsigned slot, std::byte* data, size_t bytes);
  // One ring less has it; the last one's going ends the registration.
  void give_back(int32_t place);

 private:
  using Stretch = std::pair<std::byte*, size_t>;
  struct Lent {
    Stretch stretch;
    size_t rings = 0;
  };

  UringBuffers() = default;
  bool open();
  int32_t enter(const Stretch& stretch);
  void forget_in_child();

  std::mutex mutex_;
  io_uring* ring_ = nullptr;  // leaked, as its process's
  bool is_refused_ = false;   // the kernel has no such thing
  std::vector<Lent> lent_;    // by place, the slot in ring_
  std::vector<int32_t> free_places_;
  std::map<Stretch, int32_t> places_;
};

}  // namespace locked_tensor
