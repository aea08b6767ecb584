// What Python passes to the handle's methods, checked and turned into transfers.
#pragma once

#include <torch/extension.h>

#include <string>
#include <vector>

#include "bindings/given.h"
#include "handle/aio_handle.h"

namespace locked_tensor {

namespace py = pybind11;

// A path (str, bytes, os.PathLike) or an open descriptor (int); `name` is the argument's.
FileName file_of(const char* name, py::handle file);

// A transfer of the tensors' elements in logical order to or from consecutive bytes of a file.
// Holds their storages' bytes. Throws TypeError or ValueError (naming what was passed) for a tensor
// that has no bytes in CPU memory, and for a read into one that overlaps itself.
TransferSpec spec_of(Operation operation, const std::vector<at::Tensor>& buffers,
                     const FileName& file, int64_t file_offset, bool durable,
                     bool validate = false);

// The same from an IoRequest: a sequence ("read" | "write", buffer, file, file_offset, durable), of
// which the last two may be left out.
TransferSpec spec_of_request(py::handle request);

}  // namespace locked_tensor
