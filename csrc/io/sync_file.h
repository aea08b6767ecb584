// fsync(2) for engines that have no faster way to it: all of them.
#pragma once

namespace locked_tensor {

// Waits until the file's bytes (and, unless data_only, its metadata) are on the device. 0 or
// -errno.
int sync_file(int fd, bool data_only);

}  // namespace locked_tensor
