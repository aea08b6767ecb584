#include "bindings/io_arguments.h"

#include <algorithm>
#include <cerrno>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

#include "allocator/storage_hold.h"
#include "handle/overlap.h"

namespace locked_tensor {

namespace {

class TensorKeepAlive : public KeepAlive {
 public:
  void add(StorageHold hold) {
    needs_python_ = needs_python_ || hold.needs_python();
    holds_.push_back(std::move(hold));
  }
  // A tensor of ours, such as the conjugated copy of a lazily conjugated one. The reference stays
  // valid.
  const at::Tensor& add(at::Tensor tensor) {
    needs_python_ = true;
    return tensors_.emplace_back(std::move(tensor));
  }
  bool is_free_threaded() const override { return !needs_python_; }

 private:
  std::vector<StorageHold> holds_;
  std::deque<at::Tensor> tensors_;
  bool needs_python_ = false;
};

class StorageWatch : public Watch {
 public:
  // Remembers where the storage's bytes, which must be held, are now.
  void add(const c10::Storage& storage) {
    places_.push_back(
        Place{storage.getWeakStorageImpl(), memory_of(*storage.unsafeGetStorageImpl())});
  }
  // A storage that is gone, or was emptied on purpose, shows nobody other memory.
  bool has_moved() const override {
    return std::any_of(places_.begin(), places_.end(), [](const Place& place) {
      if (place.storage.expired()) {
        return false;
      }
      // Not locked: the last reference is to be dropped with the GIL, never here.
      const void* now = memory_of(*place.storage._unsafe_get_target());
      return now != nullptr && now != place.memory;
    });
  }

 private:
  struct Place {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* memory;
  };

  static const void* memory_of(c10::StorageImpl& storage) {
    return storage._mutable_data_ptr_no_checks().get();
  }

  std::vector<Place> places_;
};

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "None";
  }
  return "a tensor of dtype " + std::string(tensor.dtype().name()) + ", device " +
         tensor.device().str() + " and layout " + c10::str(tensor.layout());
}

bool has_memory(const at::Tensor& buffer) {
  return buffer.has_storage() &&
         buffer.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

// Do elements share memory? Also true of some interleaved strides, which nobody reads into.
bool may_overlap(const at::Tensor& buffer) {
  if (buffer.is_contiguous()) {
    return false;
  }
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // (stride, size)
  for (int64_t dimension = 0; dimension < buffer.dim(); ++dimension) {
    if (buffer.size(dimension) > 1) {
      dimensions.emplace_back(buffer.stride(dimension), buffer.size(dimension));
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t last_element = 0;  // of all dimensions with smaller strides
  for (const auto& [stride, size] : dimensions) {
    if (stride <= last_element) {
      return true;
    }
    last_element += (size - 1) * stride;
  }
  return false;
}

void check_buffer(Operation operation, const at::Tensor& buffer) {
  if (!buffer.defined() || buffer.layout() != c10::kStrided || buffer.is_nested()) {
    throw py::type_error("buffer must be a strided tensor (to_dense() makes one), got " +
                         describe(buffer));
  }
  if (!buffer.device().is_cpu() && !buffer.device().is_cuda()) {
    throw py::value_error("buffer must be in CPU or CUDA memory, got " + describe(buffer));
  }
  if (buffer.numel() > 0 && !has_memory(buffer)) {
    throw py::type_error("buffer has no memory (a fake or zero tensor?), got " + describe(buffer));
  }
  if (operation == Operation::kWrite) {
    return;
  }
  if (may_overlap(buffer)) {
    throw py::value_error(
        "cannot read into a tensor whose elements share memory (expanded?); clone() it first");
  }
  if (buffer.is_conj() || buffer.is_neg()) {
    throw py::value_error(
        "cannot read into a lazily conjugated or negated view; resolve_conj() or resolve_neg() it "
        "first");
  }
}

Layout layout_of(Operation operation, const at::Tensor& buffer) {
  auto* data = static_cast<std::byte*>(operation == Operation::kRead
                                           ? buffer.mutable_data_ptr()
                                           : const_cast<void*>(buffer.const_data_ptr()));
  if (buffer.is_contiguous()) {
    return Layout(data, buffer.nbytes());
  }
  return Layout(data, buffer.element_size(),
                std::span<const int64_t>(buffer.sizes().data(), buffer.sizes().size()),
                std::span<const int64_t>(buffer.strides().data(), buffer.strides().size()));
}

// A device tensor's bytes, staged chunk by chunk: the copies wait for the device.
Layout device_layout(Operation operation, const at::Tensor& buffer, TensorKeepAlive& keep_alive) {
  if (operation == Operation::kRead && !buffer.is_contiguous()) {
    throw py::value_error(
        "cannot read into a device tensor that is not contiguous; read into a "
        "contiguous one and copy_() it");
  }
  const at::Tensor& flat = keep_alive.add(buffer.detach().contiguous().reshape(-1).view(at::kByte));
  return Layout(static_cast<uint64_t>(flat.numel()),
                [&flat](uint64_t offset, uint64_t bytes, std::byte* host, bool to_host) {
                  const at::NoGradGuard no_grad;
                  const auto count = static_cast<int64_t>(bytes);
                  at::Tensor device = flat.narrow(0, static_cast<int64_t>(offset), count);
                  at::Tensor chunk = at::from_blob(host, {count}, at::kByte);
                  if (to_host) {
                    chunk.copy_(device);
                  } else {
                    device.copy_(chunk);
                  }
                });
}

}  // namespace

FileName file_of(const char* name, py::handle file) {
  if (PyLong_Check(file.ptr()) && !PyBool_Check(file.ptr())) {
    const int64_t fd = whole_of(name, file);
    if (fd < 0 || fd > std::numeric_limits<int>::max()) {
      throw py::value_error(std::string(name) +
                            ": a file descriptor must not be negative or huge, got " +
                            std::to_string(fd));
    }
    return static_cast<int>(fd);
  }
  if (!py::isinstance<py::str>(file) && !py::isinstance<py::bytes>(file) &&
      !py::hasattr(file, "__fspath__")) {
    throw py::type_error(std::string(name) + " must be a path or an open descriptor (int), got " +
                         show(file));
  }
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(file.ptr(), &bytes) == 0) {
    throw py::error_already_set();
  }
  std::string path(py::reinterpret_steal<py::bytes>(bytes));
  if (path.empty()) {
    // As open(2), but with the name, which a KernelError without a path has not.
    errno = ENOENT;
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, "");
    throw py::error_already_set();
  }
  return path;
}

TransferSpec spec_of(Operation operation, const std::vector<at::Tensor>& buffers,
                     const FileName& file, int64_t file_offset, bool durable, bool validate) {
  TransferSpec spec;
  spec.operation = operation;
  spec.is_durable = durable;
  spec.validates = validate;
  spec.file = file;
  spec.file_offset_bytes = file_offset;
  auto keep_alive = std::make_unique<TensorKeepAlive>();
  auto watch = operation == Operation::kRead ? std::make_unique<StorageWatch>() : nullptr;
  std::vector<Layout> on_device;
  for (const at::Tensor& given : buffers) {
    check_buffer(operation, given);
    at::Tensor buffer = given;
    if (given.is_conj() || given.is_neg()) {
      buffer = given.resolve_conj().resolve_neg();
      keep_alive->add(buffer);
    }
    if (buffer.device().is_cuda()) {
      if (buffer.nbytes() > 0) {
        spec.memory.push_back(device_layout(operation, buffer, *keep_alive));
        on_device.emplace_back(static_cast<std::byte*>(buffer.data_ptr()), buffer.nbytes());
      }
      continue;
    }
    bool is_foreign = false;
    if (buffer.nbytes() > 0) {
      StorageHold hold = hold_storage(buffer.storage());
      is_foreign = hold.is_foreign();
      keep_alive->add(std::move(hold));
      if (operation == Operation::kRead) {
        watch->add(buffer.storage());
      }
    }
    Layout& layout = spec.memory.emplace_back(layout_of(operation, buffer));
    if (is_foreign) {
      layout.set_doubtful();
    }
    if (operation == Operation::kRead && !buffer.is_inference()) {
      buffer.unsafeGetTensorImpl()->bump_version();  // as every in-place operator does
    }
  }
  if (operation == Operation::kRead && (share_bytes(spec.memory) || share_bytes(on_device))) {
    throw py::value_error(
        "cannot read into a list of tensors that share memory: the last to arrive would win");
  }
  spec.keep_alive = std::move(keep_alive);
  spec.watch = std::move(watch);
  return spec;
}

TransferSpec spec_of_request(py::handle request) {
  if (PySequence_Check(request.ptr()) == 0) {
    throw py::type_error("a request must be an IoRequest, got " + show(request));
  }
  const auto fields = py::reinterpret_borrow<py::sequence>(request);
  if (fields.size() < 3 || fields.size() > 5) {
    throw py::value_error(
        "a request is (\"read\" | \"write\", buffer, file, file_offset=0, durable=False), got " +
        std::to_string(fields.size()) + " fields");
  }
  const auto field = [&](size_t index) -> py::object { return fields[index]; };
  const std::string operation = text_of("a request's operation", field(0));
  if (operation != "read" && operation != "write") {
    throw py::value_error("a request's operation is \"read\" or \"write\", got \"" + operation +
                          "\"");
  }
  const bool is_durable = fields.size() == 5 && flag_of("a request's durable", field(4));
  if (is_durable && operation == "read") {
    throw py::value_error("a request to read cannot be durable");
  }
  return spec_of(operation == "read" ? Operation::kRead : Operation::kWrite,
                 {tensor_of("a request's buffer", field(1))}, file_of("a request's file", field(2)),
                 fields.size() >= 4 ? whole_of("a request's file_offset", field(3)) : 0,
                 is_durable);
}

}  // namespace locked_tensor
