// locked_tensor._C
#include <torch/extension.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  locked_tensor::bind_memory(module);
  locked_tensor::bind_contexts(module);
  locked_tensor::bind_io(module);
  locked_tensor::bind_dispatch(module);
}
