// FileCache: the files a handle has open, so that repeated paths are not opened again.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "handle/open_file.h"

namespace locked_tensor {

// Note [Idle files] A cached file is used only while its path still leads to its device and inode:
// a stat(2), 1.4 us, instead of an open. A file that has no name any more keeps its space on disk
// while it is open: each operation that ends looks whether its file is such a one (fstat(2), on an
// open file a few tenths of that), and now and then one that begins looks at all. All caches of
// the process together keep no more descriptors idle than a small share of what it may open.
//
// Thread-safe. What was acquired is given back before the cache goes.
class FileCache {
 public:
  explicit FileCache(DirectMode direct);
  ~FileCache();
  FileCache(const FileCache&) = delete;
  FileCache& operator=(const FileCache&) = delete;

  // The file for the length of an operation. Throws what OpenFile::from_path throws.
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
  using Files = std::vector<std::shared_ptr<OpenFile>>;
  using Clock = std::chrono::steady_clock;

  // Both under the mutex. What they return is closed after the mutex is given back: the last
  // descriptor of a large file that has no name takes its time.
  std::shared_ptr<OpenFile> take(Entries::iterator entry);
  Files take_unlinked();

  std::shared_ptr<OpenFile> lend(std::shared_ptr<OpenFile> file);
  void drop(const OpenFile& file);

  DirectMode direct_;
  std::mutex mutex_;
  Entries entries_;  // most recently used first
  std::unordered_map<std::string, Entries::iterator> by_key_;
  Clock::time_point looked_ = Clock::now();  // at all of them, for unlinked ones
};

}  // namespace locked_tensor
