// OpenFile: one file as transfers see it: what it grants, and a descriptor for each road.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "handle/options.h"
#include "io/request.h"
#include "os/align.h"
#include "os/unique_fd.h"

namespace locked_tensor {

// One inode of one device, whatever its path.
struct FileId {
  dev_t device = 0;
  ino_t inode = 0;

  bool operator==(const FileId&) const = default;
};

struct FileIdHash {
  size_t operator()(const FileId& id) const {
    return static_cast<size_t>(id.inode * 0x9e3779b97f4a7c15u ^ id.device);
  }
};

class OpenFile {
 public:
  // Opens `path` for one kind of operation; a write creates it with mode 0666 less umask. Throws
  // KernelError: the open's, EISDIR for a directory, ESPIPE for what has no offsets, EOPNOTSUPP
  // when direct I/O is required and not granted.
  static std::shared_ptr<OpenFile> from_path(const std::string& path, Operation operation,
                                             DirectMode direct);
  // Uses the caller's descriptor as it is: direct if it has O_DIRECT and the file grants it. A
  // duplicate is kept, so the caller may close theirs. Throws std::invalid_argument for O_APPEND.
  static std::shared_ptr<OpenFile> from_descriptor(int fd, Operation operation, DirectMode direct);

  const std::string& path() const { return path_; }
  FileId id() const { return id_; }
  bool is_regular() const { return is_regular_; }
  // is_direct false: every byte goes through the page cache.
  const DioAlignment& alignment() const { return alignment_; }

  int direct_fd() const { return fd_.get(); }
  // A descriptor without O_DIRECT; opened on first use. Thread-safe.
  int buffered_fd();

  uint64_t size_bytes() const;
  bool is_unlinked() const;
  // The descriptor that fsync(2) is called on.
  int any_fd() const { return fd_.get(); }

  // Puts what was written, the size and, for a file that was opened by path, its name on the
  // device. `sync` is fsync(2) or fdatasync(2) of a descriptor: 0 or -errno. prepare_durable()
  // comes first and opens what that needs. Both throw KernelError and are thread-safe.
  using Sync = std::function<int(int fd, bool data_only)>;
  void prepare_durable();
  void make_durable(const Sync& sync);
  // A descriptor to read back what was written, through the page cache.
  UniqueFd open_to_read() const;

 private:
  OpenFile(std::string path, bool has_name, Operation operation, UniqueFd fd, DirectMode direct);

  std::string path_;
  Operation operation_;
  UniqueFd fd_;  // with O_DIRECT exactly when alignment_.is_direct
  FileId id_;
  bool is_regular_ = false;
  DioAlignment alignment_;
  std::mutex buffered_mutex_;
  std::atomic<int> buffered_{-1};
  UniqueFd buffered_owner_;
  std::mutex name_mutex_;
  bool is_name_durable_;  // or is the business of whoever opened the descriptor
  UniqueFd folder_;       // until its name is durable
};

// stat(2) of a path; false when nothing is there. Throws KernelError for every other failure.
bool stat_path(const std::string& path, struct stat* status);

}  // namespace locked_tensor
