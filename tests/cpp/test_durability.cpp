// Durable and validated writes over the scripted engine: calls counted, refusals, differences.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "handle/aio_handle.h"
#include "os/status.h"
#include "scripted_engine.h"
#include "support.h"

using namespace locked_tensor;
using testing::Folder;
using testing::Script;
using testing::ScriptedEngine;

namespace {

struct Scripted {
  explicit Scripted(const Script& script)
      : owned(std::make_unique<ScriptedEngine>(script, 4)),
        engine(*owned),
        handle(options(), std::move(owned)) {}

  static HandleOptions options() {
    HandleOptions options;
    options.queue_depth = 4;
    options.block_size_bytes = 4096;
    return options;
  }

  std::unique_ptr<ScriptedEngine> owned;
  ScriptedEngine& engine;
  AioHandle handle;
};

TransferSpec write_of(const std::string& path, std::vector<std::byte>& data) {
  TransferSpec spec;
  spec.operation = Operation::kWrite;
  spec.memory.emplace_back(data.data(), data.size());
  spec.file = path;
  spec.is_durable = true;
  return spec;
}

int errno_of(AioHandle& handle, TransferSpec spec, std::string* path = nullptr) {
  try {
    handle.run(std::move(spec));
    return 0;
  } catch (const KernelError& error) {
    if (path != nullptr) *path = error.path();
    return error.errno_value();
  }
}

uint64_t size_of(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
}

}  // namespace

TEST_CASE("a durable write syncs its file, and its folder until that has worked once") {
  const Folder disk(Folder::Where::kDisk);
  Script script;
  script.sync_results = {{0, -EIO}, {2, -EIO}, {4, -EINVAL}};
  Scripted scripted(script);
  std::vector<std::byte> data(10'000, std::byte{3});
  const std::string path = disk.file("file");
  std::string failed;
  CHECK(errno_of(scripted.handle, write_of(path, data), &failed) == EIO);
  CHECK(failed == path);
  CHECK(scripted.engine.syncs() == 1);
  CHECK(size_of(path) == data.size());  // written it is; only the promise failed
  CHECK(errno_of(scripted.handle, write_of(path, data), &failed) == EIO);
  CHECK(failed == path);
  CHECK(scripted.engine.syncs() == 3);
  CHECK(errno_of(scripted.handle, write_of(path, data)) == 0);  // folders that cannot be synced
  CHECK(scripted.engine.syncs() == 5);
  CHECK(errno_of(scripted.handle, write_of(path, data)) == 0);
  CHECK(scripted.engine.syncs() == 6);
}

TEST_CASE("a durable write that fails syncs nothing, and neither does a read") {
  const Folder disk(Folder::Where::kDisk);
  Script script;
  script.results = {{0, -ENOSPC}};
  Scripted scripted(script);
  std::vector<std::byte> data(8192, std::byte{3});
  CHECK(errno_of(scripted.handle, write_of(disk.file("file"), data)) == ENOSPC);
  CHECK(scripted.engine.syncs() == 0);
  CHECK(errno_of(scripted.handle, write_of(disk.file("file"), data)) == 0);
  CHECK(scripted.engine.syncs() == 2);
  TransferSpec read = write_of(disk.file("file"), data);
  read.operation = Operation::kRead;
  CHECK(errno_of(scripted.handle, std::move(read)) == 0);
  CHECK(scripted.engine.syncs() == 2);
}

TEST_CASE("an unlinked file has no name to make durable") {
  const Folder disk(Folder::Where::kDisk);
  Scripted scripted(Script{});
  const UniqueFd fd = open_file(disk.file("file"), O_RDWR | O_CREAT);
  const auto file = OpenFile::from_path(disk.file("file"), Operation::kWrite, DirectMode::kAuto);
  REQUIRE(::unlink(disk.file("file").c_str()) == 0);
  int calls = 0;
  file->prepare_durable();
  file->make_durable([&](int, bool) {
    ++calls;
    return 0;
  });
  CHECK(calls == 1);
}

TEST_CASE("validate names the first byte that differs") {
  const Folder disk(Folder::Where::kDisk);
  Scripted scripted(Script{});
  std::vector<std::byte> data(3 << 20, std::byte{3});
  // Memory that has changed when it is compared, as if the device had kept something else.
  int gathers = 0;
  TransferSpec spec;
  spec.operation = Operation::kWrite;
  spec.memory.emplace_back(
      data.size(), [&](uint64_t offset, uint64_t bytes, std::byte* host, bool) {
        std::memcpy(host, data.data() + offset, bytes);
        ++gathers;
        if (offset <= 2'000'000 && 2'000'000 < offset + bytes && gathers > 3 << 20 >> 12) {
          host[2'000'000 - offset] = std::byte{4};
        }
      });
  spec.file = disk.file("file");
  spec.file_offset_bytes = 50;
  spec.validates = true;
  CHECK_THROWS_WITH_AS(scripted.handle.run(std::move(spec)),
                       doctest::Contains("differ at offset 2000050"), KernelError);

  TransferSpec good = write_of(disk.file("file"), data);
  good.validates = true;
  CHECK(scripted.handle.run(std::move(good)) == data.size());
}
