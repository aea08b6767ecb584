// Transfer: one operation of a caller, and how it is cut into pieces that an engine can move.
//
// Note [Roads] Each byte takes one of four roads:
//   direct    O_DIRECT from or to the memory itself: locked, and aligned with the file;
//   vectored  the same for memory made of long, aligned runs;
//   staged    O_DIRECT (or, on a file without it, the page cache) through a locked chunk;
//   buffered  through the page cache from or to the memory itself.
// On a file that grants direct I/O only the parts of pages at a transfer's ends are buffered: see
// Note [Edge pages].
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "handle/file_growth.h"
#include "handle/keep_alive.h"
#include "handle/layout.h"
#include "handle/open_file.h"
#include "io/request.h"

namespace locked_tensor {

// End of file before the buffer was full.
class ShortRead : public std::runtime_error {
 public:
  ShortRead(uint64_t wanted_bytes, uint64_t found_bytes, uint64_t offset_bytes,
            const std::string& path);

  uint64_t wanted_bytes() const { return wanted_bytes_; }
  uint64_t found_bytes() const { return found_bytes_; }
  const std::string& path() const { return path_; }

 private:
  uint64_t wanted_bytes_;
  uint64_t found_bytes_;
  std::string path_;
};

enum class Road : uint8_t { kDirect, kVectored, kStaged, kBuffered };

// What the cutting depends on, besides the file.
struct CutRules {
  uint64_t block_bytes;
  uint64_t chunk_bytes;
  uint64_t vector_run_bytes;
};

// The next stretch of a part: what the engine (or, for an edge write, one system call) moves at
// once.
struct Cut {
  uint64_t offset_bytes;  // in the part's stream
  uint64_t length_bytes;
  Road road;
  bool is_direct;      // on the descriptor with O_DIRECT
  bool is_edge_write;  // part of a page: one system call under the page's lock
};

// One stretch of memory and the file bytes that belong to it.
class Part {
 public:
  // `is_locked`: the registry's answer for the whole extent.
  Part(Layout layout, uint64_t file_offset_bytes, bool is_locked);

  const Layout& layout() const { return layout_; }
  uint64_t file_offset() const { return file_offset_; }
  uint64_t file_end() const { return file_offset_ + layout_.bytes(); }
  bool is_locked() const { return is_locked_; }

  // Chooses the roads. Call once, before peek().
  void plan(const OpenFile& file, Operation operation, const CutRules& rules);
  bool is_finished() const { return cursor_ == layout_.bytes(); }
  // Are there bytes that no edge write covers, so that the file must be sized first?
  bool has_middle() const { return middle_begin_ < middle_end_; }
  // Do some bytes need the descriptor without O_DIRECT?
  bool needs_buffered() const {
    return !is_middle_direct_ || middle_begin_ > 0 || middle_end_ < layout_.bytes();
  }
  Cut peek(const CutRules& rules) const;
  void advance(uint64_t bytes) { cursor_ += bytes; }
  uint64_t cursor() const { return cursor_; }

 private:
  Layout layout_;
  uint64_t file_offset_;
  bool is_locked_;
  uint64_t cursor_ = 0;
  uint64_t middle_begin_ = 0;  // in the stream: [begin, end) goes by middle_road_
  uint64_t middle_end_ = 0;
  Road middle_road_ = Road::kBuffered;
  bool is_middle_direct_ = false;
  bool has_edge_writes_ = false;
};

// Who hears of a transfer's end.
enum class Report : uint8_t {
  kWait,    // wait(): counted, its failure raised there
  kCaller,  // the call that made it, which is waiting
  kTicket,  // a ticket; wait() too unless the ticket's exception was taken
};

// Everything below `parts` is guarded by the driver's mutex.
struct Transfer {
  Operation operation = Operation::kRead;
  std::shared_ptr<OpenFile> file;
  std::unique_ptr<KeepAlive> keep_alive;
  std::unique_ptr<Watch> watch;  // of a read, until its end has been told
  Report report = Report::kWait;
  bool validates = false;
  bool is_durable = false;  // ends when the device has it
  UniqueFd read_back;       // open when it validates
  uint64_t sequence = 0;    // order of starting
  uint64_t epoch = 0;       // waits before it
  uint64_t bytes = 0;
  std::vector<Part> parts;

  SizeClaim claim;
  size_t part_index = 0;
  uint64_t pieces_out = 0;      // in the engine or in a thread's hands
  std::optional<uint64_t> gap;  // lowest file offset known not to have moved
  std::exception_ptr failure;
  bool is_queued = false;  // in the driver's backlog
  bool is_ending = false;
  bool is_done = false;

  bool has_more() const { return failure == nullptr && part_index < parts.size(); }
  // Remembers the first failure and that the file's bytes from `file_offset` on did not move.
  void fail(std::exception_ptr error, uint64_t file_offset);
  // Fails when the memory that was read into is not its owner's any more.
  void check_not_moved();
  uint64_t file_begin() const { return parts.empty() ? 0 : parts.front().file_offset(); }
  uint64_t file_end() const { return parts.empty() ? 0 : parts.back().file_end(); }
  // Ends of what was written without a gap; 0 when that is nothing.
  uint64_t written_end() const;
};

}  // namespace locked_tensor
