// share_bytes against a count of every byte, and try_touch against maps of every kind.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "handle/overlap.h"
#include "os/align.h"
#include "os/mapping.h"
#include "os/unique_fd.h"
#include "support.h"

using namespace locked_tensor;

namespace {

bool share_by_count(const std::vector<Layout>& layouts) {
  std::map<const std::byte*, int> seen;
  for (const Layout& layout : layouts) {
    layout.for_each_run(0, layout.bytes(), [&](const std::byte* run, uint64_t bytes) {
      for (uint64_t i = 0; i < bytes; ++i) {
        ++seen[run + i];
      }
    });
  }
  for (const auto& [byte, count] : seen) {
    if (count > 1) {
      return true;
    }
  }
  return false;
}

struct Map {
  size_t bytes;
  std::byte* data;

  Map(size_t length, int protection, int flags, int fd = -1) : bytes(length) {
    void* mapped = ::mmap(nullptr, bytes, protection, flags, fd, 0);
    REQUIRE(mapped != MAP_FAILED);
    data = static_cast<std::byte*>(mapped);
  }
  ~Map() { ::munmap(data, bytes); }
};

}  // namespace

TEST_CASE("stretches share bytes exactly when a count says so") {
  std::mt19937_64 random(11);
  const auto below = [&](int64_t most) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
  };
  std::vector<std::byte> memory(4096);
  int shared = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<Layout> layouts;
    const int64_t pitch = 4 + below(12);
    for (int64_t count = 1 + below(4); count > 0; --count) {
      std::byte* data = memory.data() + below(500);
      if (below(2) == 0) {
        layouts.emplace_back(data, static_cast<uint64_t>(below(40)));
        continue;
      }
      const std::vector<int64_t> sizes{1 + below(4), 1 + below(6), 1 + below(4)};
      // Without overlap in itself, as a buffer to read into is.
      const std::vector<int64_t> strides{pitch * 8, pitch, 1};
      layouts.emplace_back(data, size_t{1}, sizes, strides);
    }
    const bool expected = share_by_count(layouts);
    shared += expected ? 1 : 0;
    CHECK(share_bytes(layouts) == expected);
  }
  CHECK(shared > 300);
  CHECK(shared < 2700);
}

TEST_CASE("a touch is tried where it would be a signal") {
  const size_t page = page_bytes();
  const testing::Folder folder(testing::Folder::Where::kDisk);
  const std::string path = folder.file("file");
  const UniqueFd file = open_file(path, O_RDWR | O_CREAT);
  REQUIRE(::ftruncate(file.get(), static_cast<off_t>(4 * page)) == 0);
  const Map ordinary(4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
  const Map constant(4 * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS);
  const Map none(4 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS);
  const Map file_map(4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, file.get());
  for (const Access access : {Access::kRead, Access::kWrite}) {
    CHECK(try_touch(ordinary.data + 1, 4 * page - 1, access) != Touch::kSignal);
    CHECK(try_touch(file_map.data, 4 * page, access) != Touch::kSignal);
    CHECK(try_touch(none.data + 5, 1, access) == Touch::kSignal);
    CHECK(try_touch(none.data, 0, access) == Touch::kSafe);
  }
  CHECK(try_touch(constant.data, 4 * page, Access::kRead) != Touch::kSignal);
  CHECK(try_touch(constant.data, 4 * page, Access::kWrite) == Touch::kSignal);
  REQUIRE(::ftruncate(file.get(), static_cast<off_t>(page)) == 0);
  if (try_touch(ordinary.data, page, Access::kRead) != Touch::kSafe) {
    return;  // before Linux 5.14 nobody tells of a shortened file
  }
  CHECK(try_touch(file_map.data, page, Access::kWrite) == Touch::kSafe);
  CHECK(try_touch(file_map.data + page, 1, Access::kRead) == Touch::kSignal);
  CHECK(try_touch(file_map.data, 4 * page, Access::kWrite) == Touch::kSignal);
}
