// validate: reads a finished transfer's file bytes again and compares them with its memory.
#pragma once

#include "handle/transfer.h"

namespace locked_tensor {

// Throws KernelError(EIO) that names the first offset where file and memory differ.
void validate(const Transfer& transfer);

}  // namespace locked_tensor
