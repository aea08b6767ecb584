// What Python's help() says of the handle's compiled methods.
#pragma once

namespace locked_tensor::docs {

constexpr const char* kSimple[] = {
    R"(Reads the whole buffer from the file at file_offset (bytes). Returns 0.

validate=True reads the same bytes again through the page cache; OSError (EIO) where they differ.)",
    R"(Writes the whole buffer to the file at file_offset (bytes). Returns 0.

validate=True reads them back and compares; OSError (EIO) names the first offset that differs.
durable=True returns when data, size and name are on the device: see sync_pwrite.)"};

constexpr const char* kEither[] = {
    R"(async_pread where async is true, else sync_pread; validate as in read.

Returns 0 when asynchronous, else the count of completed operations, 1.)",
    R"(async_pwrite where async is true, else sync_pwrite; validate and durable as in write.

Returns 0 when asynchronous, else the count of completed operations, 1.)"};

constexpr const char* kSync[] = {
    R"(Reads the whole buffer from the file at file_offset (bytes) and returns 1, the operations completed.

filename is a path or an open descriptor (an int).

Raises OSError with errno and filename, or ShortReadError (an EOFError) where the file ends before the
buffer is full; what the buffer holds is then unspecified. After what a signal handler raises the
operation goes on: wait() waits for it.)",
    R"(Writes the whole buffer to the file at file_offset (bytes) and returns 1, the operations completed.

filename is a path or an open descriptor (an int).

durable=True returns when the device has it: fdatasync(2) of the file and, the first time that this
handle has the path open, fsync(2) of its folder. A descriptor's folder is its owner's business.
Without it, the bytes are visible to every reader at once, and a power cut may lose them; one
fsync() after many writes costs less than a durable=True for each.

Raises OSError with errno and filename; the file's size is then at most what was written. After what a
signal handler raises the operation goes on: wait() waits for it.)"};

constexpr const char* kAsync[] = {
    R"(Starts what sync_pread does and returns 0. wait() waits for it and raises its failure.

filename is a path or an open descriptor (an int). fd= is another way to give the descriptor: one of the
two, else ValueError. The descriptor may be closed as soon as this returns.

Until the read has ended the buffer may be deleted or given other .data; its storage may not be resized
to more or moved (resize_, share_memory_): wait() then raises RuntimeError.)",
    R"(Starts what sync_pwrite does and returns 0. wait() waits for it and raises its failure.

filename is a path or an open descriptor (an int). fd= is another way to give the descriptor: one of the
two, else ValueError. The descriptor may be closed as soon as this returns. With durable=True wait()
returns when the device has it.)"};

constexpr const char* kVectored[] = {
    R"(Reads consecutive file bytes from file_offset on into a list of buffers. Returns the bytes moved.

file is a path or an open descriptor. Buffers that share memory are a ValueError.)",
    R"(Writes a list of buffers to consecutive file bytes from file_offset on. Returns the bytes moved.

file is a path or an open descriptor. durable=True as in sync_pwrite.)"};

constexpr const char* kWait =
    R"(Waits for what was started before and returns how many operations have ended since the last wait.

0 when nothing was pending. Raises the first failure in order of starting, with the rest in its
`others`; by then every one of them has ended, and the handle stays usable.)";

constexpr const char* kFsync =
    R"(Waits for this handle's operations, then has the device keep what the file (or folder) holds.

Returns None. fsync(2), or fdatasync(2) with data_only=True. A new file's name is in its folder: fsync that too.)";

}  // namespace locked_tensor::docs
