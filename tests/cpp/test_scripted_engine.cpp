// The scripted engine's own word: what it says has not happened has not.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "os/locked_pages.h"
#include "os/unique_fd.h"
#include "scripted_engine.h"
#include "support.h"

using namespace locked_tensor;
using testing::Folder;
using testing::Script;
using testing::ScriptedEngine;

namespace {

int64_t result_of(Engine& engine, const Request& request) {
  REQUIRE(engine.submit({&request, 1}) == 1);
  Completion completion;
  REQUIRE(engine.reap({&completion, 1}, 1, -1) == 1);
  return completion.result;
}

}  // namespace

TEST_CASE("set results end the requests they name, and short transfers leave the rest alone") {
  const Folder disk(Folder::Where::kDisk);
  Script script;
  script.results = {{1, 700}, {3, -EIO}, {4, 10}};
  ScriptedEngine engine(script, 4);
  const UniqueFd fd = open_file(disk.file("file"), O_RDWR | O_CREAT | O_DIRECT);
  LockedPages pages(8192, PageOptions{});
  const auto fill = [&](int value) {
    std::fill_n(pages.data(), 4096, static_cast<std::byte>(value));
  };
  Request write;
  write.operation = Operation::kWrite;
  write.fd = fd.get();
  write.buffer = pages.data();
  write.length_bytes = 4096;
  Request read = write;
  read.operation = Operation::kRead;

  fill(1);
  CHECK(result_of(engine, write) == 4096);
  fill(2);
  CHECK(result_of(engine, write) == 700);
  CHECK(result_of(engine, read) == 4096);
  CHECK(pages.data()[699] == std::byte{2});
  CHECK(pages.data()[700] == std::byte{1});

  fill(3);
  CHECK(result_of(engine, write) == -EIO);
  fill(4);
  const iovec vectors[] = {{pages.data(), 4}, {pages.data() + 100, 4092}};
  read.vectors = vectors;
  read.vector_count = 2;
  CHECK(result_of(engine, read) == 10);
  CHECK(pages.data()[3] == std::byte{2});
  CHECK(pages.data()[4] == std::byte{4});
  CHECK(pages.data()[105] == std::byte{2});
  CHECK(pages.data()[106] == std::byte{4});

  REQUIRE(engine.accepted().size() == 5);
  CHECK(engine.accepted()[1].offset_bytes == 0);
  REQUIRE(engine.failed().size() == 1);
  CHECK(engine.failed()[0].errno_value == EIO);
}

TEST_CASE("a lost slot stays lost until it is set again") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  Script script;
  script.lost_slot = 100;
  ScriptedEngine engine(script, 4);
  const UniqueFd fd = open_file(tmpfs.file("file"), O_RDWR | O_CREAT);
  std::vector<std::byte> data(64);
  REQUIRE(engine.set_buffer(0, data.data(), data.size()) == 0);
  Request write;
  write.operation = Operation::kWrite;
  write.fd = fd.get();
  write.buffer = data.data();
  write.length_bytes = data.size();
  write.buffer_slot = 0;
  CHECK(result_of(engine, write) == -EFAULT);
  CHECK(result_of(engine, write) == -EFAULT);
  write.buffer_slot = -1;
  CHECK(result_of(engine, write) == 64);
}
