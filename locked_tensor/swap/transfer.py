"""Reading and writing extents through a handle, and counting what it costs."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Callable, Iterable, NamedTuple, Optional, Union

import torch

from locked_tensor.handle import AioHandle, IoTicket, aio_handle, check_handle
from locked_tensor.swap.folder import FolderPath
from locked_tensor.swap.pool import Lease, SwapBufferPool
from locked_tensor.swap.store import Extent, SwapStore, page_aligned
from locked_tensor.tensor import as_bytes


class SwapStats(NamedTuple):
    """What has been swapped, and what it cost, since the object was made. It can be asked after close too."""

    bytes_read: int  #: bytes of the reads that were started, ahead of their use too; failed ones count
    bytes_written: int  #: bytes of the writes that were started
    io_seconds: float  #: in which at least one read or write was under way: two at once count once
    wait_seconds: float  #: in which a caller stood waiting for one to end; of several threads, their sum

    @property
    def overlap(self) -> float:
        """The share of the I/O's time in which the program went on; 0 when nothing was moved."""
        return max(0.0, 1 - self.wait_seconds / self.io_seconds) if self.io_seconds > 0 else 0.0


class Pending:
    """One transfer under way. Keeps its tensor's memory until it has ended."""

    def __init__(self, io: SwapIo, ticket: IoTicket, extent: Extent, lease: Optional[Lease]) -> None:
        self._io = io
        self._ticket = ticket
        self._extent = extent
        self._lease = lease
        self._is_under_way = True

    def done(self) -> bool:
        """Has it ended, well or not?"""
        if self._ticket.done():
            self._settle(0.0)
            return True
        return False

    def drain(self) -> None:
        """Waits for the end, however it ends; what it failed with is left for `wait`."""
        began = time.perf_counter()
        self._ticket.exception()
        self._settle(time.perf_counter() - began)

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            OSError, ShortReadError: it failed; an OSError names the swap file.
        """
        self.drain()
        failure = self.failure()
        if isinstance(failure, OSError):
            failure.filename = str(self._extent.path)
        if failure is not None:
            raise failure

    def failure(self) -> Optional[BaseException]:
        """Waits for the end and returns what it failed with, or None."""
        return self._ticket.exception()

    def _settle(self, waited_seconds: float) -> None:
        if self._is_under_way:
            self._is_under_way = False
            self._lease = None
            self._io._ended(self, waited_seconds)


class SwapIo:
    """Moves tensors between memory and extents. Makes its own handle when given none. Thread-safe."""

    def __init__(self, handle: Optional[AioHandle], staging_bytes: int = 8 << 20) -> None:
        if handle is not None:
            check_handle(handle)
        self._owns_handle = handle is None
        self.handle = aio_handle(staging_bytes=staging_bytes) if handle is None else handle
        self._lock = threading.Lock()
        self._in_flight: set[Pending] = set()
        self._busy_since = 0.0
        self._stats = SwapStats(0, 0, 0.0, 0.0)

    def read(self, extent: Extent, tensor: torch.Tensor, offset: int = 0) -> Pending:
        """Starts to fill the tensor from `offset` bytes into the extent."""
        return self._start(extent, tensor, offset, None, is_read=True)

    def write(
        self, extent: Extent, tensor: torch.Tensor, offset: int = 0, *, lease: Optional[Lease] = None
    ) -> Pending:
        """Starts to write the tensor; a lease given is released when it has ended."""
        return self._start(extent, tensor, offset, lease, is_read=False)

    def stats(self) -> SwapStats:
        """What was moved so far."""
        with self._lock:
            return self._stats

    def drain(self) -> None:
        """Nothing is in flight afterwards, whatever came of it."""
        for pending in list(self._in_flight):
            pending.drain()

    def close(self) -> None:
        """As `drain`, and closes the handle if it was made here."""
        self.drain()
        if self._owns_handle:
            self.handle.close()

    def _start(
        self, extent: Extent, tensor: torch.Tensor, offset: int, lease: Optional[Lease], is_read: bool
    ) -> Pending:
        submit = self.handle.submit_pread if is_read else self.handle.submit_pwrite
        pending = Pending(self, submit(tensor, extent.fd, extent.offset + offset), extent, lease)
        with self._lock:
            if not self._in_flight:
                self._busy_since = time.perf_counter()
            self._in_flight.add(pending)
            moved = tensor.nbytes
            self._stats = self._stats._replace(
                bytes_read=self._stats.bytes_read + (moved if is_read else 0),
                bytes_written=self._stats.bytes_written + (0 if is_read else moved),
            )
        return pending

    def _ended(self, pending: Pending, waited_seconds: float) -> None:
        with self._lock:
            self._in_flight.discard(pending)
            busy = 0.0 if self._in_flight else time.perf_counter() - self._busy_since
            self._stats = self._stats._replace(
                io_seconds=self._stats.io_seconds + busy,
                wait_seconds=self._stats.wait_seconds + waited_seconds,
            )


def open_swap(
    owner: object, folder: Union[FolderPath, Iterable[FolderPath]], handle: Optional[AioHandle], **options: int
) -> tuple[SwapIo, SwapStore, Callable[[], object]]:
    """A store in the folders, what moves bytes to and from it, and what closes both, once.

    Closed by itself when the owner is dropped, and at exit. `options` are those of `SwapIo`.

    Raises:
        OSError: a folder may not be written.
    """
    store = SwapStore(folder)
    try:
        io = SwapIo(handle, **options)
    except BaseException:
        store.close()
        raise
    return io, store, weakref.finalize(owner, _close, io, store, os.getpid())


def open_swap_with_pool(
    owner: object,
    folder: Union[FolderPath, Iterable[FolderPath]],
    handle: Optional[AioHandle],
    buffers: int,
    buffer_bytes: int,
    **options: int,
) -> tuple[SwapIo, SwapStore, SwapBufferPool, Callable[[], object]]:
    """The same, and a pool of locked memory of the handle's.

    Raises:
        OSError, LockLimitError: no file or no memory; then there is neither.
    """
    io, store, close_files = open_swap(owner, folder, handle, **options)
    try:
        pool = SwapBufferPool(io.handle, buffers, buffer_bytes)
    except BaseException:
        close_files()
        raise
    return io, store, pool, close_files


def _close(io: SwapIo, store: SwapStore, process: int) -> None:
    if os.getpid() != process:  # a forked child, to which handle and files do not belong
        store.forget()
        return
    try:
        io.close()
    finally:
        store.close()


class Spiller:
    """Writes ordinary tensors to extents, copied first, so that they may change or go at once.

    The copies are leases of `pool`; when it has no room, the oldest writes are waited for.
    """

    def __init__(self, io: SwapIo, pool: SwapBufferPool) -> None:
        self._io = io
        self._pool = pool
        self._writes: list[Pending] = []

    def spill(self, extent: Extent, tensor: torch.Tensor) -> list[Pending]:
        """Copies the tensor's elements in logical order and starts to write them; the writes."""
        flat = as_bytes(tensor)
        started = []
        for begin in range(0, flat.numel(), self._pool.buffer_bytes):
            part = flat[begin : begin + self._pool.buffer_bytes]
            lease = self.lease(part.numel())
            lease.tensor[: part.numel()].copy_(part)
            lease.tensor[part.numel() :].zero_()
            started.append(self._io.write(extent, lease.tensor, begin, lease=lease))
            self._writes.append(started[-1])
            del lease  # the write has it
        return started

    def lease(self, nbytes: int) -> Lease:
        """A lease of whole pages that hold `nbytes`, uninitialised; waits for writes to make room."""
        nbytes = page_aligned(nbytes)
        self._writes = [write for write in self._writes if not write.done()]
        while self._pool.available_bytes() < nbytes and self._writes:
            self._writes.pop(0).drain()
        return self._pool.lease(nbytes, zero=False)
