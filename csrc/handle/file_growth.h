// SizeClaim: a write's claim on the size of its file, process-wide per inode.
//
// Note [File size] Extending writes take the inode lock one by one, so a write past the end sizes
// the file first. If it then fails, the file is cut back to the largest of: its size before, the
// end of what was written without a gap, and the end of every other write of this process that is
// done or under way.
#pragma once

#include <cstdint>
#include <memory>

#include "handle/open_file.h"

namespace locked_tensor {

class SizeClaim {
 public:
  SizeClaim() = default;
  // Announces a write of [begin_bytes, end_bytes). Grows the file to end_bytes when `grows` and it
  // is shorter (fallocate, else ftruncate). Throws KernelError, and the file is as before.
  SizeClaim(std::shared_ptr<OpenFile> file, uint64_t begin_bytes, uint64_t end_bytes, bool grows);
  SizeClaim(SizeClaim&&) noexcept = default;
  SizeClaim& operator=(SizeClaim&&) noexcept = default;

  // The write has ended: everything from begin_bytes to written_end_bytes is in the file. Call
  // once.
  void finish(uint64_t written_end_bytes);

 private:
  struct Inode;
  struct Table;

  std::shared_ptr<OpenFile> file_;
  std::shared_ptr<Inode> inode_;
  uint64_t end_bytes_ = 0;
};

}  // namespace locked_tensor
