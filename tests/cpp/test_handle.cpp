// The handle against a model: random programs over a scripted engine, every byte and error
// compared.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <future>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "handle/aio_handle.h"
#include "handle/layout.h"
#include "memory/locked_arena.h"
#include "os/align.h"
#include "scripted_engine.h"
#include "support.h"

using namespace locked_tensor;
using testing::Folder;
using testing::Script;
using testing::ScriptedEngine;

namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::mt19937_64& random, size_t count) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Bytes file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

void write_file(const std::string& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<long>(bytes.size()));
}

// One operation of a program, with its own memory: locked or not, contiguous or strided.
struct Step {
  Operation operation;
  uint64_t offset;
  Block* block = nullptr;
  Bytes ordinary;
  size_t memory_bytes;
  std::vector<Layout> memory;
  Bytes before;  // all of the memory
  Bytes stream;  // its logical bytes when the step was made
  std::shared_ptr<Transfer> transfer;

  std::byte* base() { return block != nullptr ? block->data : ordinary.data(); }
  uint64_t bytes() const { return stream.size(); }
  ~Step() {
    if (block != nullptr) LockedArena::release(block);
  }
};

Bytes gathered(const Layout& layout) {
  Bytes bytes(layout.bytes());
  layout.gather(0, layout.bytes(), bytes.data());
  return bytes;
}

std::unique_ptr<Step> random_step(std::mt19937_64& random, uint64_t offset, uint64_t most_bytes) {
  auto step = std::make_unique<Step>();
  step->operation = random() % 2 == 0 ? Operation::kRead : Operation::kWrite;
  step->offset = offset;
  step->memory_bytes = most_bytes * 3 + 8192;
  if (random() % 3 != 0) {
    step->block =
        LockedArena::process().allocate(step->memory_bytes, PageOptions{HugePages::kOff, -1});
  } else {
    step->ordinary.resize(step->memory_bytes);
  }
  step->before = random_bytes(random, step->memory_bytes);
  std::memcpy(step->base(), step->before.data(), step->memory_bytes);
  const size_t shifts[] = {0, 0, 0, 512, 64, 1};
  std::byte* data = step->base() + shifts[random() % 6];
  if (random() % 3 != 0) {
    const uint64_t sizes[] = {most_bytes, most_bytes & ~uint64_t{511},
                              most_bytes & ~uint64_t{4095}};
    step->memory.emplace_back(data, std::max<uint64_t>(sizes[random() % 3], 1));
  } else {
    const size_t items[] = {1, 4, 512, 4096};
    const size_t item = items[random() % 4];
    const auto rows = static_cast<int64_t>(1 + random() % 7);
    const auto columns = static_cast<int64_t>(most_bytes / item / static_cast<uint64_t>(rows));
    if (columns == 0) {
      step->memory.emplace_back(data, most_bytes);
    } else if (random() % 2 == 0) {
      step->memory.emplace_back(data, item, std::vector<int64_t>{rows, columns},
                                std::vector<int64_t>{columns * 2, 1});
    } else {
      step->memory.emplace_back(data, item, std::vector<int64_t>{columns, rows},
                                std::vector<int64_t>{1, columns});
    }
  }
  step->stream = gathered(step->memory[0]);
  if (random() % 6 == 0) {
    // The same bytes as a device would have them: only a copier reaches them.
    step->memory.insert(
        step->memory.begin(),
        Layout(step->stream.size(), [layout = step->memory[0]](uint64_t offset, uint64_t bytes,
                                                               std::byte* host, bool to_host) {
          to_host ? layout.gather(offset, bytes, host) : layout.scatter(offset, bytes, host);
        }));
    step->memory.pop_back();
  }
  return step;
}

}  // namespace

TEST_CASE("a layout's stream is its elements in row-major order, at any offset") {
  std::mt19937_64 random(testing::seed());
  for (uint64_t round = 0; round < testing::rounds(300); ++round) {
    const size_t item = size_t{1} << (random() % 5);
    std::vector<int64_t> sizes(1 + random() % 4);
    for (int64_t& size : sizes) size = static_cast<int64_t>(1 + random() % 6);
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    std::vector<size_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t dim : order) {
      strides[dim] = stride;
      stride *= sizes[dim] + static_cast<int64_t>(random() % 2);
    }
    Bytes memory = random_bytes(random, static_cast<size_t>(stride) * item);
    const Layout layout(memory.data(), item, sizes, strides);
    Bytes expected;
    std::vector<int64_t> index(sizes.size(), 0);
    while (true) {
      int64_t at = 0;
      for (size_t i = 0; i < index.size(); ++i) at += index[i] * strides[i];
      const auto element = memory.begin() + at * static_cast<int64_t>(item);
      expected.insert(expected.end(), element, element + static_cast<long>(item));
      size_t dim = index.size();
      while (dim > 0 && ++index[dim - 1] == sizes[dim - 1]) index[--dim] = 0;
      if (dim == 0) break;
    }
    INFO("seed " << testing::seed() << " round " << round);
    REQUIRE(layout.bytes() == expected.size());
    REQUIRE(gathered(layout) == expected);
    const uint64_t offset = random() % layout.bytes();
    const uint64_t bytes = random() % (layout.bytes() - offset + 1);
    Bytes part(bytes);
    layout.gather(offset, bytes, part.data());
    REQUIRE(std::equal(part.begin(), part.end(), expected.begin() + static_cast<long>(offset)));
    const Bytes fresh = random_bytes(random, bytes);
    layout.scatter(offset, bytes, fresh.data());
    std::copy(fresh.begin(), fresh.end(), expected.begin() + static_cast<long>(offset));
    REQUIRE(gathered(layout) == expected);
  }
}

TEST_CASE("random programs over a misbehaving engine move the right bytes and lose no error") {
  const Folder disk(Folder::Where::kDisk);
  const Folder tmpfs(Folder::Where::kTmpfs);
  LockedArena::process().set_cache_limit(64 << 20);
  for (uint64_t round = 0; round < testing::rounds(2000); ++round) {
    INFO("LOCKED_TENSOR_SEED=" << testing::seed() << " round " << round);
    std::mt19937_64 random(testing::seed() * 1'000'003 + round);
    const std::string path = (round % 4 == 3 ? tmpfs : disk).file("file");
    Script script;
    script.seed = random();
    const bool is_calm = round % 3 == 0;
    script.short_transfer = random() % 60;
    script.interrupted = random() % 20;
    script.again = random() % 20;
    script.refused_submit = random() % 30;
    script.partial_submit = random() % 60;
    script.late = random() % 50;
    script.lost_slot = random() % 10;
    script.failure = is_calm ? 0 : random() % 8;
    script.zero = is_calm ? 0 : random() % 4;
    HandleOptions options;
    options.block_size_bytes = 4096 << (random() % 3);
    options.queue_depth = 1 + random() % 8;
    options.single_submit = random() % 4 == 0;
    options.intra_op_parallelism = 1 + random() % 2;
    options.staging_bytes = 65536;
    options.vector_run_bytes = 512 << (random() % 4);
    auto owned = std::make_unique<ScriptedEngine>(script, options.queue_depth);
    const ScriptedEngine& engine = *owned;

    Bytes model = random_bytes(random, random() % 40000);
    write_file(path, model);
    const uint64_t size_before = model.size();
    std::vector<std::unique_ptr<Step>> steps;
    {
      AioHandle handle(options, std::move(owned));
      uint64_t offset = random() % 3 == 0 ? 0 : random() % 9000;
      for (uint64_t i = 0; i < 1 + random() % 6; ++i) {
        if (random() % 2 == 0) offset = align_up(offset, random() % 2 == 0 ? 512 : 4096);
        steps.push_back(random_step(random, offset, 1 + random() % 20000));
        offset += steps.back()->bytes() + (random() % 2 == 0 ? 0 : random() % 5000);
      }
      // Reads race with the growth that later writes bring; writes first, then reads.
      for (const Operation operation : {Operation::kWrite, Operation::kRead}) {
        for (auto& step : steps) {
          if (step->operation != operation) continue;
          TransferSpec spec;
          spec.operation = operation;
          spec.memory = step->memory;
          spec.file = path;
          spec.file_offset_bytes = static_cast<int64_t>(step->offset);
          spec.validates = random() % 4 == 0;
          spec.is_durable = random() % 16 == 0;
          step->transfer = handle.start(std::move(spec), Report::kTicket);
        }
        for (auto& step : steps) {
          if (step->operation == operation) {
            REQUIRE(handle.wait_for(step->transfer, -1));
          }
        }
        if (operation == Operation::kWrite) {
          const Bytes after = file_bytes(path);
          uint64_t end = size_before;
          uint64_t most = size_before;
          for (auto& step : steps) {
            if (step->operation != Operation::kWrite) continue;
            most = std::max(most, step->offset + step->bytes());
            if (step->transfer->failure == nullptr) {
              end = std::max(end, step->offset + step->bytes());
            }
          }
          REQUIRE(after.size() >= end);
          REQUIRE(after.size() <= most);
          model.resize(after.size());
          for (auto& step : steps) {
            if (step->operation != Operation::kWrite) continue;
            for (uint64_t i = 0; i < step->bytes() && step->offset + i < after.size(); ++i) {
              // A failed write may have written any part of its range.
              model[step->offset + i] =
                  step->transfer->failure == nullptr ? step->stream[i] : after[step->offset + i];
            }
          }
          REQUIRE(after == model);
        }
      }
      const std::vector<ScriptedEngine::Failed> failed = engine.failed();
      for (auto& step : steps) {
        const bool is_short =
            step->operation == Operation::kRead && step->offset + step->bytes() > model.size();
        const bool was_hit = std::any_of(failed.begin(), failed.end(), [&](const auto& each) {
          return each.request.operation == step->operation &&
                 each.request.offset_bytes >= step->offset &&
                 each.request.offset_bytes < step->offset + step->bytes();
        });
        REQUIRE((step->transfer->failure != nullptr) == (is_short || was_hit));
        if (step->transfer->failure != nullptr) continue;
        Bytes memory = step->before;
        if (step->operation == Operation::kRead) {
          Layout shadow = step->memory[0];
          const Bytes expected(model.begin() + static_cast<long>(step->offset),
                               model.begin() + static_cast<long>(step->offset + step->bytes()));
          REQUIRE(gathered(step->memory[0]) == expected);
          // Beside the elements nothing has changed: put the old ones back and compare all.
          shadow.scatter(0, step->bytes(), step->stream.data());
        }
        REQUIRE(std::memcmp(step->base(), memory.data(), memory.size()) == 0);
      }
      uint64_t failures = 0;
      for (auto& step : steps) failures += step->transfer->failure != nullptr ? 1 : 0;
      if (failures == 0) {
        REQUIRE(handle.wait() == steps.size());
      } else {
        try {
          handle.wait();
          FAIL("failures are thrown");
        } catch (const TransfersFailed& thrown) {
          REQUIRE(thrown.failures().size() == failures);
        }
      }
      REQUIRE(handle.wait() == 0);
      for (const Request& request : engine.accepted()) {
        const int flags = ::fcntl(request.fd, F_GETFL);
        if (flags >= 0 && (flags & O_DIRECT) != 0 && request.vectors == nullptr && path[1] != 'd') {
          REQUIRE(is_aligned(request.buffer, 512));
          REQUIRE(is_aligned(request.length_bytes, 512));
          REQUIRE(is_aligned(request.offset_bytes, 512));
        }
      }
    }
    ::unlink(path.c_str());
  }
  LockedArena::process().empty_cache();
}

TEST_CASE("a failed extension is cut back to what others still own") {
  const Folder disk(Folder::Where::kDisk);
  const std::string path = disk.file("file");
  write_file(path, Bytes(100));
  const auto size = [&] { return file_bytes(path).size(); };
  auto file = OpenFile::from_path(path, Operation::kWrite, DirectMode::kAuto);
  SizeClaim first(file, 4096, 8192, true);
  CHECK(size() == 8192);
  SizeClaim second(file, 8192, 16384, true);
  SizeClaim inside(file, 4096, 6000, false);
  second.finish(0);
  CHECK(size() == 8192);
  first.finish(5000);
  CHECK(size() == 6000);
  inside.finish(6000);
  CHECK(size() == 6000);
  SizeClaim nothing(file, 20000, 30000, true);
  nothing.finish(0);
  CHECK(size() == 6000);
}

TEST_CASE("the million-and-first pending transfer waits for room") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  HandleOptions options;
  options.queue_depth = 2;
  options.max_pending_transfers = 10;
  AioHandle handle(options, std::make_unique<ScriptedEngine>(Script{}, 2));
  Bytes data(64);
  for (int i = 0; i < 1000; ++i) {
    TransferSpec spec;
    spec.operation = Operation::kWrite;
    spec.memory.emplace_back(data.data(), data.size());
    spec.file = tmpfs.file("file");
    spec.file_offset_bytes = 64 * i;
    handle.start(std::move(spec), Report::kWait);
  }
  CHECK(handle.wait() == 1000);
  CHECK(file_bytes(tmpfs.file("file")).size() == 64000);
}

TEST_CASE("an eventfd hears of what was in flight before it was given") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  HandleOptions options;
  options.queue_depth = 8;
  // This engine signals, as kernel AIO does, only for what is submitted from then on.
  AioHandle handle(options, std::make_unique<ScriptedEngine>(Script{}, 8));
  Bytes data(64);
  TransferSpec spec;
  spec.operation = Operation::kWrite;
  spec.memory.emplace_back(data.data(), data.size());
  spec.file = tmpfs.file("file");
  const auto transfer = handle.start(std::move(spec), Report::kTicket);
  const UniqueFd events(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  handle.notify(events.get());
  pollfd waiting{events.get(), POLLIN, 0};
  REQUIRE(::poll(&waiting, 1, 30'000) == 1);
  CHECK(handle.wait_for(transfer, 0));
  CHECK(handle.wait() == 1);
  handle.notify(-1);
}

namespace {

// Keeps its first submit until it is let go, and remembers how many requests came at a time.
class GatedEngine : public ScriptedEngine {
 public:
  GatedEngine() : ScriptedEngine(Script{}, 8) {}

  int64_t submit(std::span<const Request> requests) override {
    std::unique_lock<std::mutex> lock(mutex_);
    batches_.push_back(requests.size());
    if (batches_.size() == 1) {
      is_submitting_.set_value();
      gate_.wait(lock, [this] { return is_open_; });
    }
    return ScriptedEngine::submit(requests);
  }
  void wait_for_submit() { is_submitting_.get_future().wait(); }
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    gate_.notify_all();
  }

  std::vector<size_t> batches() {
    std::lock_guard<std::mutex> lock(mutex_);
    return batches_;
  }

 private:
  std::mutex mutex_;
  std::vector<size_t> batches_;
  std::condition_variable gate_;
  bool is_open_ = false;
  std::promise<void> is_submitting_;
};

}  // namespace

TEST_CASE("what other threads start during a submit goes down in the next one, together") {
  const Folder tmpfs(Folder::Where::kTmpfs);
  HandleOptions options;
  options.queue_depth = 8;
  auto owned = std::make_unique<GatedEngine>();
  GatedEngine& engine = *owned;
  AioHandle handle(options, std::move(owned));
  Bytes data(64, std::byte{7});
  const auto start = [&](int i) {
    TransferSpec spec;
    spec.operation = Operation::kWrite;
    spec.memory.emplace_back(data.data(), data.size());
    spec.file = tmpfs.file("file");
    spec.file_offset_bytes = 64 * i;
    handle.start(std::move(spec), Report::kWait);
  };
  std::thread first([&] { start(0); });
  engine.wait_for_submit();
  start(1);
  start(2);
  start(3);
  engine.open();
  first.join();
  CHECK(handle.wait() == 4);
  CHECK(engine.batches() == std::vector<size_t>{1, 3});
  CHECK(file_bytes(tmpfs.file("file")) == Bytes(256, std::byte{7}));
}
