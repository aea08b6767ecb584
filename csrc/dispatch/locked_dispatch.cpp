#include "dispatch/locked_dispatch.h"

#include "memory/range_registry.h"

namespace locked_tensor {

ByteExtent byte_extent(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || !tensor.device().is_cpu() ||
      tensor.is_nested() || !tensor.has_storage() ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return {};
  }
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  auto* base = static_cast<std::byte*>(storage->_mutable_data_ptr_no_checks().get());
  if (base == nullptr) {
    return {};
  }
  const size_t item = tensor.element_size();
  std::byte* data = base + static_cast<size_t>(tensor.storage_offset()) * item;
  if (tensor.numel() == 0) {
    return {data, 0};
  }
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += static_cast<size_t>((tensor.size(i) - 1) * tensor.stride(i));
  }
  return {data, (last + 1) * item};
}

bool is_locked(const at::Tensor& tensor) {
  const ByteExtent extent = byte_extent(tensor);
  return extent.data != nullptr && RangeRegistry::process().contains(extent.data, extent.bytes);
}

}  // namespace locked_tensor
