#include "handle/file_cache.h"

#include <vector>

namespace locked_tensor {

FileCache::FileCache(DirectMode direct, size_t capacity) : direct_(direct), capacity_(capacity) {}

std::shared_ptr<OpenFile> FileCache::acquire(const std::string& path, Operation operation) {
  const std::string key = (operation == Operation::kRead ? 'r' : 'w') + path;
  struct stat status;
  const bool exists = stat_path(path, &status);
  std::shared_ptr<OpenFile> stale;  // closed after the mutex is given back
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      const auto entry = found->second;
      if (exists && entry->file->id() == FileId{status.st_dev, status.st_ino}) {
        entries_.splice(entries_.begin(), entries_, entry);
        return entry->file;
      }
      stale = std::move(entry->file);
      entries_.erase(entry);
      by_key_.erase(found);
    }
  }
  stale.reset();
  const std::shared_ptr<OpenFile> file = OpenFile::from_path(path, operation, direct_);
  std::shared_ptr<OpenFile> evicted;
  std::lock_guard<std::mutex> lock(mutex_);
  if (by_key_.contains(key)) {
    return file;  // another thread was faster; this one lives as long as its transfer
  }
  entries_.push_front(Entry{key, file});
  by_key_[key] = entries_.begin();
  if (entries_.size() > capacity_) {
    evicted = std::move(entries_.back().file);
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  return file;
}

void FileCache::drop_unlinked() {
  std::vector<std::shared_ptr<OpenFile>> dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    if (entry->file->is_unlinked()) {
      dropped.push_back(std::move(entry->file));
      by_key_.erase(entry->key);
      entry = entries_.erase(entry);
    } else {
      ++entry;
    }
  }
}

void FileCache::clear() {
  Entries dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  by_key_.clear();
  dropped.swap(entries_);
}

}  // namespace locked_tensor
