#include "engine_suite.h"

#include <doctest/doctest.h>

#include <cerrno>

#include "io/engine_select.h"
#include "scripted_engine.h"

namespace locked_tensor::testing {

std::vector<std::string> usable_engines() {
  std::vector<std::string> names = {"scripted"};
  for (const EngineInfo& info : engines()) {
    if (info.usable) names.push_back(info.name);
  }
  return names;
}

std::unique_ptr<Engine> make(const std::string& name, size_t depth) {
  if (name == "scripted") {
    return std::make_unique<ScriptedEngine>(Script{}, depth);
  }
  return make_engine(name, depth, 2);
}

Request request_for(Operation operation, int fd, std::byte* data, uint64_t bytes, uint64_t offset,
                    uint64_t id) {
  Request request;
  request.operation = operation;
  request.fd = fd;
  request.buffer = data;
  request.length_bytes = bytes;
  request.offset_bytes = offset;
  request.id = id;
  return request;
}

int64_t reap(Engine& engine, std::span<Completion> completions, size_t wait_for,
             int64_t timeout_ns) {
  int64_t count;
  do {
    count = engine.reap(completions, wait_for, timeout_ns);
  } while (count == -EINTR);
  return count;
}

int64_t result_of(Engine& engine, const Request& request) {
  REQUIRE(engine.submit({&request, 1}) == 1);
  Completion completion;
  int64_t count;
  do {
    count = reap(engine, {&completion, 1}, 1, -1);
  } while (count == 0);
  REQUIRE(count == 1);
  REQUIRE(completion.id == request.id);
  return completion.result;
}

}  // namespace locked_tensor::testing
