// KeepAlive: what a transfer holds so that its memory stays valid; Watch: whether that is still the
// memory its owner shows. Opaque to this floor.
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

// Of the memory of a read. Called, moved and destroyed by any thread.
class Watch {
 public:
  Watch() = default;
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  virtual ~Watch() = default;

  // Has the memory's owner, while somebody can see it, other memory now? Then what was read into
  // this memory is lost to them.
  virtual bool has_moved() const = 0;
};

}  // namespace locked_tensor
