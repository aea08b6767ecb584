#include "handle/transfer.h"

#include <algorithm>

#include "os/status.h"

namespace locked_tensor {

namespace {

constexpr uint64_t kMaxVectors = 512;  // half of IOV_MAX: a cut may begin and end inside a run

}  // namespace

ShortRead::ShortRead(uint64_t wanted_bytes, uint64_t found_bytes, uint64_t offset_bytes,
                     const std::string& path)
    : std::runtime_error("end of file: wanted " + std::to_string(wanted_bytes) +
                         " bytes at offset " + std::to_string(offset_bytes) + " of " + path +
                         ", found " + std::to_string(found_bytes)),
      wanted_bytes_(wanted_bytes),
      found_bytes_(found_bytes),
      path_(path) {}

Part::Part(Layout layout, uint64_t file_offset_bytes, bool is_locked)
    : layout_(std::move(layout)), file_offset_(file_offset_bytes), is_locked_(is_locked) {}

void Part::plan(const OpenFile& file, Operation operation, const CutRules& rules) {
  const DioAlignment& alignment = file.alignment();
  if (!alignment.is_direct) {
    middle_end_ = layout_.bytes();
    middle_road_ = layout_.is_contiguous() ? Road::kBuffered : Road::kStaged;
    return;
  }
  const uint64_t begin = file_offset_;
  const uint64_t end = file_end();
  const uint64_t sector = alignment.offset_bytes;
  const uint64_t page = std::max<uint64_t>(page_bytes(), sector);
  // A read that begins or ends on a sector goes direct to the last byte; a write's part of a page
  // is an edge, because another write may want the page's other part.
  const bool is_read = operation == Operation::kRead;
  const uint64_t first = is_read && is_aligned(begin, sector) ? begin : align_up(begin, page);
  const uint64_t last = is_read && is_aligned(end, sector) ? end : align_down(end, page);
  has_edge_writes_ = !is_read;
  if (first >= last) {
    return;  // all edge
  }
  middle_begin_ = first - begin;
  middle_end_ = last - begin;
  is_middle_direct_ = true;
  const uint64_t unit = std::max(alignment.memory_bytes, alignment.offset_bytes);
  if (!is_locked_) {
    middle_road_ = Road::kStaged;
  } else if (layout_.is_contiguous()) {
    const bool is_in_phase = is_aligned(layout_.data() + middle_begin_, alignment.memory_bytes);
    middle_road_ = is_in_phase ? Road::kDirect : Road::kStaged;
  } else {
    const bool is_worth_it = layout_.run_bytes() >= rules.vector_run_bytes &&
                             is_aligned(middle_begin_, unit) && layout_.has_aligned_runs(unit);
    middle_road_ = is_worth_it ? Road::kVectored : Road::kStaged;
  }
}

Cut Part::peek(const CutRules& rules) const {
  LT_CHECK(!is_finished(), "a finished part has no next cut");
  const bool is_middle = middle_begin_ <= cursor_ && cursor_ < middle_end_;
  if (is_middle) {
    uint64_t most = middle_road_ == Road::kStaged ? rules.chunk_bytes : rules.block_bytes;
    if (middle_road_ == Road::kVectored) {
      most = std::min(most, kMaxVectors * layout_.run_bytes());
    }
    return Cut{cursor_, std::min(most, middle_end_ - cursor_), middle_road_, is_middle_direct_,
               false};
  }
  const uint64_t stop = cursor_ < middle_begin_ ? middle_begin_ : layout_.bytes();
  if (has_edge_writes_) {
    const uint64_t offset = file_offset_ + cursor_;
    const uint64_t page_end = align_down(offset, page_bytes()) + page_bytes();
    return Cut{cursor_, std::min(stop - cursor_, page_end - offset), Road::kBuffered, false, true};
  }
  const Road road = layout_.is_contiguous() ? Road::kBuffered : Road::kStaged;
  const uint64_t most = road == Road::kStaged ? rules.chunk_bytes : rules.block_bytes;
  return Cut{cursor_, std::min(most, stop - cursor_), road, false, false};
}

void Transfer::fail(std::exception_ptr error, uint64_t file_offset) {
  if (failure == nullptr) {
    failure = std::move(error);
  }
  gap = std::min(gap.value_or(file_offset), file_offset);
}

void Transfer::check_not_moved() {
  if (failure == nullptr && watch != nullptr && watch->has_moved()) {
    fail(std::make_exception_ptr(std::runtime_error(
             "a tensor's storage was resized or moved (resize_, share_memory_) while a read into "
             "it was pending, and does not have the bytes; wait for a read before changing its "
             "storage")),
         file_begin());
  }
}

uint64_t Transfer::written_end() const {
  if (failure == nullptr) {
    return file_end();
  }
  uint64_t end = gap.value_or(file_begin());
  if (part_index < parts.size()) {
    end = std::min(end, parts[part_index].file_offset() + parts[part_index].cursor());
  }
  return end > file_begin() ? end : 0;
}

}  // namespace locked_tensor
