// FileCache: the files a handle has open, so that repeated paths are not opened again.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "handle/open_file.h"

namespace locked_tensor {

// A cached file is used only while its path still leads to its device and inode: a stat(2), 1.4 us,
// instead of an open. Thread-safe.
class FileCache {
 public:
  explicit FileCache(DirectMode direct, size_t capacity = 32);

  // Throws what OpenFile::from_path throws.
  std::shared_ptr<OpenFile> acquire(const std::string& path, Operation operation);
  // Forgets files that were unlinked, so that their space is freed.
  void drop_unlinked();
  void clear();

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<OpenFile> file;
  };
  using Entries = std::list<Entry>;

  DirectMode direct_;
  size_t capacity_;
  std::mutex mutex_;
  Entries entries_;  // most recently used first
  std::unordered_map<std::string, Entries::iterator> by_key_;
};

}  // namespace locked_tensor
