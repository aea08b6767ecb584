// KeepAlive: what a transfer holds so that its memory stays valid; opaque to this floor.
#pragma once

namespace locked_tensor {

class KeepAlive {
 public:
  KeepAlive() = default;
  KeepAlive(const KeepAlive&) = delete;
  KeepAlive& operator=(const KeepAlive&) = delete;
  virtual ~KeepAlive() = default;

  // May any thread destroy this at any time? Otherwise only the owner of the handle does, by
  // AioHandle::take_retired.
  virtual bool is_free_threaded() const = 0;
};

}  // namespace locked_tensor
