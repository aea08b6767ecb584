"""`open_writer`: a binary file object whose bytes leave by direct I/O while the next ones are produced."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from typing import Any, Generator, Optional

from locked_tensor.files import Path, open_direct
from locked_tensor.handle import AioHandle, IoTicket
from locked_tensor.limits import whole_number
from locked_tensor.safetensors_format import PAGE_BYTES
from locked_tensor.scratch import locked_bytes
from locked_tensor.tickets import named_errors


def open_writer(aio_handle: AioHandle, path: Path, *, buffer_bytes: int = 8 << 20) -> FileWriter:
    """Opens a file for writing from its start, for `torch.save(obj, writer)` and anything that writes.

    What is written is copied into one of two locked buffers; a full one is written by direct I/O while
    the other is filled. The file has exactly the bytes that were written. Nothing is sure to be in the
    file before `flush` or `close`, nor on the device before `fsync`.

    Args:
        aio_handle: moves the bytes; stays open, and must until the writer is closed. The writer's
            operations count in what its `wait` returns.
        path: made with 0666 less umask, or emptied. `save` shows how a file is replaced in one step.
        buffer_bytes: of each of the two buffers; a multiple of 4096. Ordinary memory, which the handle
            stages, where the lock limit is reached.

    Raises:
        TypeError: `buffer_bytes` is no whole number.
        ValueError: `buffer_bytes` is not a positive multiple of 4096, or is 2**63 or more.
        LockLimitError: there is no memory, of any kind, for the buffers.
        OSError: the file cannot be opened, or is not a regular file.
    """
    nbytes = whole_number("buffer_bytes", buffer_bytes)
    if not 0 < nbytes < 2**63 or nbytes % PAGE_BYTES != 0:
        raise ValueError(f"buffer_bytes must be a positive multiple of {PAGE_BYTES} below 2**63, got {nbytes}")
    return FileWriter(aio_handle, os.fsdecode(path), nbytes)


class _Buffer:
    """Locked memory, what Python writes it through, and the write of it that is on its way."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = locked_bytes(nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(self.tensor.data_ptr())
        self.bytes = memoryview(memory).cast("B")
        self.ticket: Optional[IoTicket] = None


class FileWriter(io.BufferedIOBase):
    """A binary file, open for writing; made by `open_writer`. For one thread at a time.

    Each method raises the OSError of a write that it meets, be it of bytes given earlier. After that only
    `close` is of use: it raises no more and writes no more.
    """

    mode = "wb"
    _fd = -1

    def __init__(self, aio_handle: AioHandle, path: str, buffer_bytes: int) -> None:
        self.name = path
        self._handle = aio_handle
        self._buffer_bytes = buffer_bytes
        # Each buffer takes every second stretch of buffer_bytes of the file. Before the file is emptied:
        # there may be no memory.
        self._buffers = [_Buffer(buffer_bytes), _Buffer(buffer_bytes)]
        self._fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._position = 0
        self._submitted = 0  # bytes of the file that are written or on their way
        self._has_failed = False

    def write(self, data: Any) -> int:
        """Takes all of a bytes-like object; returns its length in bytes.

        Raises:
            OSError: this or an earlier write failed.
            ValueError: the writer is closed, or failed before.
        """
        self._check_usable()
        given = memoryview(data)
        if given.nbytes == 0:
            return 0
        given = given.cast("B")
        done = 0
        while done < given.nbytes:
            buffer, place = self._current()
            if place == 0:
                self._settle(buffer)
            count = min(given.nbytes - done, self._buffer_bytes - place)
            buffer.bytes[place : place + count] = given[done : done + count]
            done += count
            self._position += count
            if place + count == self._buffer_bytes:
                self._submit(buffer, self._buffer_bytes)
        return done

    def flush(self) -> None:
        """Waits until everything that was written is in the file (and perhaps in the device's cache)."""
        if self._fd < 0 and not self.closed:
            return  # close() calls this once more at its end
        self._check_usable()
        buffer, place = self._current()
        if self._submitted < self._position:
            self._submit(buffer, place)
        for each in self._buffers:
            self._settle(each)

    def fsync(self) -> None:
        """`flush`, then fsync(2): everything that was written is on the device."""
        self.flush()
        with self._noting_failure():
            self._handle.fsync(self._fd)

    def tell(self) -> int:
        """Bytes written so far."""
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        return self._position

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Flushes and closes the file. Idempotent."""
        if self.closed or self._fd < 0:
            return super().close()
        try:
            if not self._has_failed:
                self.flush()
        finally:
            fd, self._fd = self._fd, -1
            self._buffers.clear()
            try:
                os.close(fd)
            finally:
                super().close()

    def __repr__(self) -> str:
        return f"<FileWriter {self.name!r}, {'closed' if self.closed else f'{self._position:,} bytes'}>"

    def _check_usable(self) -> None:
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        if self._has_failed:
            raise ValueError(f"{self!r} has failed before and can only be closed")

    def _current(self) -> tuple[_Buffer, int]:
        """The buffer that takes the next byte, and where in it."""
        stretch, place = divmod(self._position, self._buffer_bytes)
        return self._buffers[stretch % 2], place

    def _submit(self, buffer: _Buffer, end: int) -> None:
        """Starts the write of what the buffer holds from `_submitted` to its byte `end`."""
        begin = self._submitted % self._buffer_bytes
        self._settle(buffer)
        with self._noting_failure():
            buffer.ticket = self._handle.submit_pwrite(buffer.tensor[begin:end], self._fd, self._submitted)
        self._submitted += end - begin

    def _settle(self, buffer: _Buffer) -> None:
        if buffer.ticket is not None:
            with self._noting_failure():
                buffer.ticket.wait()
            buffer.ticket = None  # an interrupt leaves it: the memory is still on its way

    @contextlib.contextmanager
    def _noting_failure(self) -> Generator[None, None, None]:
        try:
            with named_errors(self.name):
                yield
        except Exception:
            self._has_failed = True
            for buffer in self._buffers:  # so that the handle's wait() does not raise them once more
                if buffer.ticket is not None:
                    buffer.ticket.exception()
                    buffer.ticket = None
            raise
