// Which tensors are locked, asked of the registry.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace locked_tensor {

// The bytes between a tensor's first and last element; {nullptr, 0} for a tensor without bytes in
// CPU memory (meta, sparse, nested, fake, null). An empty view has a place but no bytes.
struct ByteExtent {
  std::byte* data = nullptr;
  size_t bytes = 0;
};
ByteExtent byte_extent(const at::Tensor& tensor);

// Does the tensor's whole extent lie in live locked memory? False without bytes in CPU memory; for
// an empty view, whether its place does. Touches no storage's copy-on-write state.
bool is_locked(const at::Tensor& tensor);

}  // namespace locked_tensor
