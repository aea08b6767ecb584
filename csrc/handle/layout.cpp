#include "handle/layout.h"

#include <cstring>

#include "os/align.h"
#include "os/status.h"

namespace locked_tensor {

namespace {

// memcpy of a length known at compile time becomes one load and one store.
template <size_t kBytes, bool kGather>
void copy_runs(std::byte* memory, uint64_t stride, uint64_t runs, std::byte* packed) {
  for (uint64_t i = 0; i < runs; ++i) {
    if constexpr (kGather) {
      std::memcpy(packed + i * kBytes, memory + i * stride, kBytes);
    } else {
      std::memcpy(memory + i * stride, packed + i * kBytes, kBytes);
    }
  }
}

template <bool kGather>
void copy_runs(std::byte* memory, uint64_t stride, uint64_t runs, uint64_t run_bytes,
               std::byte* packed) {
  switch (run_bytes) {
    case 1:
      return copy_runs<1, kGather>(memory, stride, runs, packed);
    case 2:
      return copy_runs<2, kGather>(memory, stride, runs, packed);
    case 4:
      return copy_runs<4, kGather>(memory, stride, runs, packed);
    case 8:
      return copy_runs<8, kGather>(memory, stride, runs, packed);
    case 16:
      return copy_runs<16, kGather>(memory, stride, runs, packed);
    default:
      for (uint64_t i = 0; i < runs; ++i) {
        std::byte* run = memory + i * stride;
        std::byte* other = packed + i * run_bytes;
        std::memcpy(kGather ? other : run, kGather ? run : other, run_bytes);
      }
  }
}

}  // namespace

Layout::Layout(std::byte* data, uint64_t bytes)
    : data_(data), bytes_(bytes), run_bytes_(std::max<uint64_t>(bytes, 1)) {}

Layout::Layout(std::byte* data, size_t element_bytes, std::span<const int64_t> sizes,
               std::span<const int64_t> strides)
    : data_(data), bytes_(element_bytes), run_bytes_(element_bytes) {
  LT_CHECK(sizes.size() == strides.size(), "a layout has as many strides as sizes");
  for (size_t i = sizes.size(); i-- > 0;) {
    const uint64_t size = static_cast<uint64_t>(sizes[i]);
    const uint64_t stride = static_cast<uint64_t>(strides[i]) * element_bytes;
    bytes_ *= size;
    if (size == 1) {
      continue;
    }
    if (dims_.empty() && stride == run_bytes_) {
      run_bytes_ *= size;
    } else if (!dims_.empty() && stride == dims_.front().size * dims_.front().stride_bytes) {
      dims_.front().size *= size;
    } else {
      dims_.insert(dims_.begin(), Dim{size, stride});
    }
  }
  if (bytes_ == 0) {
    dims_.clear();
    run_bytes_ = 1;
  }
}

Layout::Layout(uint64_t bytes, Copier copier)
    : data_(nullptr),
      bytes_(bytes),
      run_bytes_(std::max<uint64_t>(bytes, 1)),
      copier_(std::move(copier)) {}

uint64_t Layout::extent_bytes() const {
  if (bytes_ == 0) {
    return 0;
  }
  uint64_t extent = run_bytes_;
  for (const Dim& dim : dims_) {
    extent += (dim.size - 1) * dim.stride_bytes;
  }
  return extent;
}

bool Layout::has_aligned_runs(uint64_t alignment_bytes) const {
  bool is_whole = is_aligned(data_, alignment_bytes) && is_aligned(run_bytes_, alignment_bytes);
  for (const Dim& dim : dims_) {
    is_whole = is_whole && is_aligned(dim.stride_bytes, alignment_bytes);
  }
  return is_whole;
}

bool Layout::is_touchable(uint64_t offset_bytes, uint64_t bytes, Access access) const {
  if (doubt_ == nullptr || !doubt_->load(std::memory_order_relaxed)) {
    return true;
  }
  if (is_contiguous()) {
    const Touch touch = try_touch(data_ + offset_bytes, bytes, access);
    if (touch == Touch::kUnknown) {
      doubt_->store(false, std::memory_order_relaxed);
    }
    return touch != Touch::kSignal;
  }
  // Any part of it may have runs all over the memory: it is asked for once, as a whole.
  if (try_touch(data_, extent_bytes(), access) == Touch::kSignal) {
    return false;
  }
  doubt_->store(false, std::memory_order_relaxed);
  return true;
}

std::byte* Layout::run_address(uint64_t run) const {
  std::byte* address = data_;
  for (size_t i = dims_.size(); i-- > 0 && run > 0;) {
    address += run % dims_[i].size * dims_[i].stride_bytes;
    run /= dims_[i].size;
  }
  return address;
}

template <bool kGather>
void Layout::copy(uint64_t offset_bytes, uint64_t bytes, std::byte* other) const {
  const auto copy_part = [&](std::byte* memory, uint64_t length) {
    std::memcpy(kGather ? other : memory, kGather ? memory : other, length);
    other += length;
  };
  const uint64_t skip = offset_bytes % run_bytes_;
  const uint64_t head = skip == 0 ? 0 : std::min(bytes, run_bytes_ - skip);
  for_each_run(offset_bytes, head, copy_part);
  const uint64_t whole = align_down(bytes - head, run_bytes_);
  for_each_row((offset_bytes + head) / run_bytes_, whole / run_bytes_,
               [&](std::byte* first, uint64_t runs, uint64_t stride) {
                 copy_runs<kGather>(first, stride, runs, run_bytes_, other);
                 other += runs * run_bytes_;
               });
  for_each_run(offset_bytes + head + whole, bytes - head - whole, copy_part);
}

void Layout::gather(uint64_t offset_bytes, uint64_t bytes, std::byte* to) const {
  if (copier_ != nullptr) {
    copier_(offset_bytes, bytes, to, true);
    return;
  }
  copy<true>(offset_bytes, bytes, to);
}

void Layout::scatter(uint64_t offset_bytes, uint64_t bytes, const std::byte* from) const {
  if (copier_ != nullptr) {
    copier_(offset_bytes, bytes, const_cast<std::byte*>(from), false);
    return;
  }
  copy<false>(offset_bytes, bytes, const_cast<std::byte*>(from));
}

}  // namespace locked_tensor
