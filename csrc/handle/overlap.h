// Do memory stretches of one operation share bytes?
#pragma once

#include <span>

#include "handle/layout.h"

namespace locked_tensor {

// Exact, whatever the strides. Stretches that only a copier reaches, or of no bytes, share none. A
// list of contiguous ones is sorted; strided ones that lie in each other are compared run by run,
// unless they repeat at the same stride.
bool share_bytes(std::span<const Layout> layouts);

}  // namespace locked_tensor
