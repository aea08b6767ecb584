#include "handle/file_growth.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <unordered_map>

#include "os/status.h"

namespace locked_tensor {

// What this process is doing to the size of one file. Lives while writes to it do.
struct SizeClaim::Inode {
  std::mutex mutex;
  size_t users = 0;  // guarded by Table::mutex
  std::multiset<uint64_t> live_ends;
  uint64_t base_bytes = 0;     // size when the first of these writes came
  uint64_t done_bytes = 0;     // end of what these writes have finished
  uint64_t granted_bytes = 0;  // size that we have set
  bool has_failure = false;

  // Cuts the file to what is owed to somebody. Nobody else's extension is ever cut.
  void cut_back(const OpenFile& file) {
    uint64_t owed = std::max(base_bytes, done_bytes);
    if (!live_ends.empty()) {
      owed = std::max(owed, *live_ends.rbegin());
    }
    const uint64_t size = file.size_bytes();
    if (size > owed && size <= granted_bytes && ::ftruncate(file.any_fd(), owed) != 0) {
      throw_errno("cut back after a failed write", file.path());
    }
  }
};

struct SizeClaim::Table {
  std::mutex mutex;
  std::unordered_map<FileId, std::shared_ptr<Inode>, FileIdHash> inodes;

  // Leaked: transfers may end during static destruction.
  static Table& process() {
    static Table* table = new Table;
    return *table;
  }
};

namespace {

void set_size(const OpenFile& file, uint64_t from_bytes, uint64_t to_bytes) {
  // Blocks are taken from where the write begins, so that a hole before it stays a hole.
  if (file.alignment().is_direct) {
    int result;
    do {
      result = ::fallocate(file.any_fd(), 0, from_bytes, to_bytes - from_bytes);
    } while (result != 0 && errno == EINTR);
    if (result == 0) {
      return;
    }
    if (errno != EOPNOTSUPP && errno != ENOSYS) {
      throw_errno("make room for " + format_bytes(to_bytes - from_bytes), file.path());
    }
  }
  if (::ftruncate(file.any_fd(), to_bytes) != 0) {
    throw_errno("extend to " + format_bytes(to_bytes), file.path());
  }
}

}  // namespace

SizeClaim::SizeClaim(std::shared_ptr<OpenFile> file, uint64_t begin_bytes, uint64_t end_bytes,
                     bool grows)
    : file_(std::move(file)), end_bytes_(end_bytes) {
  if (!file_->is_regular()) {
    return;
  }
  Table& table = Table::process();
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    std::shared_ptr<Inode>& inode = table.inodes[file_->id()];
    if (inode == nullptr) {
      inode = std::make_shared<Inode>();
    }
    inode_ = inode;
    ++inode_->users;
  }
  try {
    std::lock_guard<std::mutex> lock(inode_->mutex);
    const bool is_first = inode_->live_ends.empty();
    inode_->live_ends.insert(end_bytes_);
    const uint64_t size = file_->size_bytes();
    if (is_first) {
      inode_->base_bytes = size;
      inode_->done_bytes = 0;
      inode_->granted_bytes = size;
      inode_->has_failure = false;
    }
    inode_->granted_bytes = std::max(inode_->granted_bytes, end_bytes_);
    if (grows && end_bytes_ > size) {
      set_size(*file_, std::max(size, begin_bytes), end_bytes_);
    }
  } catch (...) {
    finish(0);
    throw;
  }
}

void SizeClaim::finish(uint64_t written_end_bytes) {
  if (inode_ == nullptr) {
    return;
  }
  const std::shared_ptr<Inode> inode = std::move(inode_);
  struct Leave {
    const FileId id;
    Inode& inode;
    ~Leave() {
      Table& table = Table::process();
      std::lock_guard<std::mutex> lock(table.mutex);
      if (--inode.users == 0) {
        table.inodes.erase(id);
      }
    }
  } leave{file_->id(), *inode};
  std::lock_guard<std::mutex> lock(inode->mutex);
  inode->live_ends.erase(inode->live_ends.find(end_bytes_));
  inode->done_bytes = std::max(inode->done_bytes, written_end_bytes);
  inode->has_failure = inode->has_failure || written_end_bytes < end_bytes_;
  if (inode->has_failure) {
    inode->cut_back(*file_);
  }
}

}  // namespace locked_tensor
