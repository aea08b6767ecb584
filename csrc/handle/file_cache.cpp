#include "handle/file_cache.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace locked_tensor {

namespace {

constexpr uint64_t kMostFiles = 32;          // of one cache
constexpr uint64_t kDescriptorsPerFile = 2;  // one for each road
constexpr uint64_t kShareOfDescriptors = 8;  // one in so many may be idle
constexpr auto kLookAgain = std::chrono::milliseconds(100);

std::atomic<uint64_t> live_caches{0};

// How many files each cache may keep now. The caller may have set another limit meanwhile.
uint64_t capacity() {
  rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return 1;
  }
  const uint64_t caches = std::max<uint64_t>(1, live_caches.load(std::memory_order_relaxed));
  const uint64_t files = limit.rlim_cur / kShareOfDescriptors / kDescriptorsPerFile / caches;
  return std::clamp<uint64_t>(files, 1, kMostFiles);
}

}  // namespace

FileCache::FileCache(DirectMode direct) : direct_(direct) {
  ++live_caches;
}

FileCache::~FileCache() {
  --live_caches;
}

std::shared_ptr<OpenFile> FileCache::acquire(const std::string& path, Operation operation) {
  const std::string key = (operation == Operation::kRead ? 'r' : 'w') + path;
  struct stat status;
  const bool exists = stat_path(path, &status);
  {
    Files stale;
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto now = Clock::now(); now - looked_ >= kLookAgain) {
      looked_ = now;
      stale = take_unlinked();
    }
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      const auto entry = found->second;
      if (exists && entry->file->id() == FileId{status.st_dev, status.st_ino}) {
        entries_.splice(entries_.begin(), entries_, entry);
        return lend(entry->file);
      }
      stale.push_back(take(entry));
    }
  }
  std::shared_ptr<OpenFile> file = OpenFile::from_path(path, operation, direct_);
  Files evicted;
  std::lock_guard<std::mutex> lock(mutex_);
  if (by_key_.contains(key)) {
    return file;  // another thread was faster; this one lives as long as its transfer
  }
  entries_.push_front(Entry{key, file});
  by_key_[key] = entries_.begin();
  for (const uint64_t most = capacity(); entries_.size() > most;) {
    evicted.push_back(take(std::prev(entries_.end())));
  }
  return lend(std::move(file));
}

// The same file, looked at when its borrower is done with it.
std::shared_ptr<OpenFile> FileCache::lend(std::shared_ptr<OpenFile> file) {
  OpenFile* lent = file.get();
  return std::shared_ptr<OpenFile>(lent, [this, file = std::move(file)](OpenFile*) {
    if (file->is_unlinked()) {
      drop(*file);
    }
  });
}

std::shared_ptr<OpenFile> FileCache::take(Entries::iterator entry) {
  std::shared_ptr<OpenFile> file = std::move(entry->file);
  by_key_.erase(entry->key);
  entries_.erase(entry);
  return file;
}

FileCache::Files FileCache::take_unlinked() {
  Files taken;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (entry->file->is_unlinked()) {
      taken.push_back(take(entry));
    }
    entry = next;
  }
  return taken;
}

void FileCache::drop(const OpenFile& file) {
  std::shared_ptr<OpenFile> dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.file.get() == &file; });
  if (found != entries_.end()) {
    dropped = take(found);
  }
}

void FileCache::drop_unlinked() {
  Files dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  dropped = take_unlinked();
}

void FileCache::clear() {
  Entries dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  by_key_.clear();
  dropped.swap(entries_);
}

}  // namespace locked_tensor
