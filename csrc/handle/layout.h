// Layout: memory read as a row-major stream of bytes, whatever its strides and wherever it is.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "os/mapping.h"

namespace locked_tensor {

class Layout {
 public:
  // Copies a part of the stream between memory that this process cannot address (a device's) and
  // `host`. Called by any thread, several at once; may throw, and the transfer fails with that.
  using Copier =
      std::function<void(uint64_t offset_bytes, uint64_t bytes, std::byte* host, bool to_host)>;

  Layout(std::byte* data, uint64_t bytes);
  // `data` is the address of the first element; strides count elements and are not negative.
  Layout(std::byte* data, size_t element_bytes, std::span<const int64_t> sizes,
         std::span<const int64_t> strides);

  // A stream that only `copier` can reach: it is always staged.
  Layout(uint64_t bytes, Copier copier);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  bool is_contiguous() const { return dims_.empty() && copier_ == nullptr; }
  // Length of the contiguous runs that the stream is made of.
  uint64_t run_bytes() const { return run_bytes_; }
  // Bytes from run to run where all are equally far apart, else 0.
  uint64_t only_stride_bytes() const { return dims_.size() == 1 ? dims_.front().stride_bytes : 0; }
  // From data() to the end of the last byte touched.
  uint64_t extent_bytes() const;
  // Do all runs begin and end on multiples of `alignment_bytes`?
  bool has_aligned_runs(uint64_t alignment_bytes) const;

  // Calls visit(std::byte* run, uint64_t bytes) for the contiguous runs of the stream's
  // [offset_bytes, offset_bytes + bytes), in order.
  template <typename Visit>
  void for_each_run(uint64_t offset_bytes, uint64_t bytes, Visit visit) const;

  // The memory may be a map without permission, or of a file that is shorter by now: it is asked
  // for before it is touched.
  void set_doubtful() { doubt_ = std::make_shared<std::atomic<bool>>(true); }
  // Could that part of the stream be copied now without a signal? Free for memory without doubt.
  // What a file loses between this and the copy goes unseen.
  bool is_touchable(uint64_t offset_bytes, uint64_t bytes, Access access) const;

  // Copies that part of the stream out of, or into, the memory.
  void gather(uint64_t offset_bytes, uint64_t bytes, std::byte* to) const;
  void scatter(uint64_t offset_bytes, uint64_t bytes, const std::byte* from) const;

 private:
  struct Dim {
    uint64_t size;
    uint64_t stride_bytes;
  };

  // Calls visit(first run, runs, stride_bytes) for the rows of whole runs [run, run + count).
  template <typename Visit>
  void for_each_row(uint64_t run, uint64_t count, Visit visit) const;
  template <bool kGather>
  void copy(uint64_t offset_bytes, uint64_t bytes, std::byte* other) const;
  std::byte* run_address(uint64_t run) const;

  std::byte* data_;
  uint64_t bytes_;
  uint64_t run_bytes_;
  std::vector<Dim> dims_;                     // outermost first; empty: one run
  Copier copier_;                             // for memory out of reach, else empty
  std::shared_ptr<std::atomic<bool>> doubt_;  // is there (still) a reason to ask? nullptr: never
};

template <typename Visit>
void Layout::for_each_row(uint64_t run, uint64_t count, Visit visit) const {
  const Dim row = dims_.empty() ? Dim{1, 0} : dims_.back();
  while (count > 0) {
    const uint64_t runs = std::min(count, row.size - run % row.size);
    visit(run_address(run), runs, row.stride_bytes);
    run += runs;
    count -= runs;
  }
}

template <typename Visit>
void Layout::for_each_run(uint64_t offset_bytes, uint64_t bytes, Visit visit) const {
  if (bytes == 0) {
    return;
  }
  uint64_t run = offset_bytes / run_bytes_;
  if (const uint64_t skip = offset_bytes % run_bytes_; skip > 0) {
    const uint64_t head = std::min(bytes, run_bytes_ - skip);
    visit(run_address(run) + skip, head);
    bytes -= head;
    run += 1;
  }
  for_each_row(run, bytes / run_bytes_, [&](std::byte* first, uint64_t runs, uint64_t stride) {
    for (uint64_t i = 0; i < runs; ++i) {
      visit(first + i * stride, run_bytes_);
    }
  });
  if (const uint64_t tail = bytes % run_bytes_; tail > 0) {
    visit(run_address(run + bytes / run_bytes_), tail);
  }
}

}  // namespace locked_tensor
