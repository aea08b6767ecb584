// What tests of every engine share: which there are, and one request's way through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/engine.h"

namespace locked_tensor::testing {

// The scripted engine, without faults, and each engine that this machine can run.
std::vector<std::string> usable_engines();
std::unique_ptr<Engine> make(const std::string& name, size_t depth);

Request request_for(Operation operation, int fd, std::byte* data, uint64_t bytes, uint64_t offset,
                    uint64_t id = 0);

// Reaps past signals. A ring that was just taken apart on this thread counts as one.
int64_t reap(Engine& engine, std::span<Completion> completions, size_t wait_for,
             int64_t timeout_ns);

// Submits the request and waits for its completion.
int64_t result_of(Engine& engine, const Request& request);

}  // namespace locked_tensor::testing
