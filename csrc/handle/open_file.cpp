#include "handle/open_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <stdexcept>

#include "os/status.h"

namespace locked_tensor {

namespace {

int access_mode(Operation operation) {
  return operation == Operation::kRead ? O_RDONLY : O_WRONLY | O_CREAT;
}

const char* purpose(Operation operation) {
  return operation == Operation::kRead ? "open for reading" : "open for writing";
}

void check_kind(mode_t mode, Operation operation, const std::string& path) {
  if (S_ISDIR(mode)) {
    throw KernelError(EISDIR, purpose(operation), path);
  }
  if (!S_ISREG(mode) && !S_ISBLK(mode)) {
    throw KernelError(
        ESPIPE, std::string(purpose(operation)) + " (it is no regular file or block device)", path);
  }
}

}  // namespace

bool stat_path(const std::string& path, struct stat* status) {
  if (::stat(path.c_str(), status) == 0) {
    return true;
  }
  if (errno != ENOENT) {
    throw_errno("stat", path);
  }
  return false;
}

std::shared_ptr<OpenFile> OpenFile::from_path(const std::string& path, Operation operation,
                                              DirectMode direct) {
  struct stat status;
  if (stat_path(path, &status)) {
    check_kind(status.st_mode, operation, path);  // before open(2), which waits on a FIFO
  }
  const int flags = access_mode(operation);
  UniqueFd fd;
  if (direct != DirectMode::kNever) {
    try {
      fd = open_file(path, flags | O_DIRECT);
    } catch (const KernelError& error) {
      if (error.errno_value() != EINVAL) {  // EINVAL: this file system has no direct I/O
        throw KernelError(error.errno_value(), purpose(operation), path);
      }
    }
  }
  if (!fd.is_open()) {
    try {
      fd = open_file(path, flags);
    } catch (const KernelError& error) {
      throw KernelError(error.errno_value(), purpose(operation), path);
    }
  }
  return std::shared_ptr<OpenFile>(new OpenFile(path, true, operation, std::move(fd), direct));
}

std::shared_ptr<OpenFile> OpenFile::from_descriptor(int fd, Operation operation,
                                                    DirectMode direct) {
  const std::string name = "<file descriptor " + std::to_string(fd) + ">";
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) {
    throw_errno("use the descriptor", name);
  }
  if (operation == Operation::kWrite && (flags & O_APPEND) != 0) {
    throw std::invalid_argument(name + " was opened with O_APPEND, which ignores offsets");
  }
  UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own.is_open()) {
    throw_errno("duplicate the descriptor", name);
  }
  return std::shared_ptr<OpenFile>(new OpenFile(name, false, operation, std::move(own), direct));
}

OpenFile::OpenFile(std::string path, bool has_name, Operation operation, UniqueFd fd,
                   DirectMode direct)
    : path_(std::move(path)),
      operation_(operation),
      fd_(std::move(fd)),
      is_name_durable_(!has_name) {
  struct stat status;
  if (::fstat(fd_.get(), &status) != 0) {
    throw_errno("stat", path_);
  }
  check_kind(status.st_mode, operation, path_);
  id_ = FileId{status.st_dev, status.st_ino};
  is_regular_ = S_ISREG(status.st_mode);
  alignment_ = dio_alignment(fd_.get());
  const bool may_be_direct = alignment_.is_direct;
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags < 0) {
    throw_errno("ask the flags (F_GETFL)", path_);
  }
  const bool has_flag = (flags & O_DIRECT) != 0;
  if (!alignment_.is_direct || !has_flag || direct == DirectMode::kNever) {
    if (direct == DirectMode::kRequire) {
      throw KernelError(EOPNOTSUPP,
                        has_flag || has_name
                            ? "do direct I/O, which this file system does not grant"
                            : "do direct I/O, for which a descriptor needs O_DIRECT",
                        path_);
    }
    alignment_.is_direct = false;
    if (!has_flag) {
      buffered_.store(fd_.get());
    }
  }
  // tmpfs accepts O_DIRECT and grants nothing: such a descriptor serves the buffered road too.
  if (has_flag && !may_be_direct) {
    buffered_.store(fd_.get());
  }
}

int OpenFile::buffered_fd() {
  if (const int fd = buffered_.load(std::memory_order_acquire); fd >= 0) {
    return fd;
  }
  std::lock_guard<std::mutex> lock(buffered_mutex_);
  if (!buffered_owner_.is_open()) {
    // Through /proc it is the same inode, whatever happened to the path meanwhile.
    const std::string link = "/proc/self/fd/" + std::to_string(fd_.get());
    const int flags = operation_ == Operation::kRead ? O_RDONLY : O_WRONLY;
    try {
      buffered_owner_ = open_file(link, flags);
    } catch (const KernelError& error) {
      throw KernelError(error.errno_value(), "open again without O_DIRECT", path_);
    }
    buffered_.store(buffered_owner_.get(), std::memory_order_release);
  }
  return buffered_.load(std::memory_order_relaxed);
}

uint64_t OpenFile::size_bytes() const {
  struct stat status;
  if (::fstat(fd_.get(), &status) != 0) {
    throw_errno("stat", path_);
  }
  if (!is_regular_) {
    const off_t end = ::lseek(fd_.get(), 0, SEEK_END);
    if (end < 0) {
      throw_errno("find the size", path_);
    }
    return static_cast<uint64_t>(end);
  }
  return static_cast<uint64_t>(status.st_size);
}

// Once for each opening, whoever created the file: it may have been this handle a moment ago.
void OpenFile::prepare_durable() {
  std::lock_guard<std::mutex> lock(name_mutex_);
  if (is_name_durable_ || folder_.is_open()) {
    return;
  }
  if (!is_regular_ || is_unlinked()) {
    is_name_durable_ = true;
    return;
  }
  // Where the file is, past symbolic links.
  std::error_code error;
  const std::filesystem::path file =
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd_.get()), error);
  if (error) {
    throw KernelError(error.value(), "find the folder", path_);
  }
  folder_ = open_file(file.parent_path().string(), O_RDONLY | O_DIRECTORY);
}

void OpenFile::make_durable(const Sync& sync) {
  if (const int result = sync(fd_.get(), true); result != 0) {
    throw KernelError(-result, "put on the device what was written", path_);
  }
  std::lock_guard<std::mutex> lock(name_mutex_);
  if (is_name_durable_) {
    return;
  }
  const int result = sync(folder_.get(), false);
  // EINVAL: this file system has nothing to synchronize for a folder.
  if (result != 0 && result != -EINVAL) {
    throw KernelError(-result, "put on the device the name", path_);
  }
  is_name_durable_ = true;
  folder_.reset();
}

UniqueFd OpenFile::open_to_read() const {
  try {
    return open_file("/proc/self/fd/" + std::to_string(fd_.get()), O_RDONLY);
  } catch (const KernelError& error) {
    throw KernelError(error.errno_value(), "open for reading back", path_);
  }
}

bool OpenFile::is_unlinked() const {
  struct stat status;
  return ::fstat(fd_.get(), &status) != 0 || status.st_nlink == 0;
}

}  // namespace locked_tensor
