// Edge pages: writes of this process that touch a part of one page of a file take turns.
//
// Note [Edge pages] A buffered write beside a direct one in flight in the same page makes the
// kernel log possible corruption. Direct requests in flight cover whole pages; what covers a part
// of a page is written here by one system call, under the lock of that page.
#pragma once

#include <cstdint>

#include "handle/layout.h"
#include "handle/open_file.h"
#include "handle/transfer.h"

namespace locked_tensor {

// Writes the layout's [stream_offset, stream_offset + bytes) at file_offset, all of it within one
// page, and returns the road they took: O_DIRECT when whole sectors are written, else buffered;
// staged when they had to be copied first. Throws KernelError.
Road write_edge_page(OpenFile& file, const Layout& layout, uint64_t stream_offset, uint64_t bytes,
                     uint64_t file_offset, bool is_locked);

}  // namespace locked_tensor
