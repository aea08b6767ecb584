"""Asynchronous file I/O straight from and into locked memory: `aio_handle` and what it returns."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Any, Generator, Iterable, NamedTuple, Optional, Union

import torch

from locked_tensor import _C
from locked_tensor.awaiting import CompletionEvents
from locked_tensor.memory import is_pinned, new_claimed_tensor
from locked_tensor.settings import read_settings
from locked_tensor.tensor import check_is_tensor

File = Union[str, bytes, "os.PathLike[str]", int]


class IoStats(NamedTuple):
    """What a handle has moved since it was made. Bytes unless the name says otherwise."""

    bytes_direct: int  #: O_DIRECT from or to the tensor's own memory
    bytes_bounced: int  #: copied through a locked staging buffer
    bytes_buffered: int  #: through the page cache from or to the tensor's own memory
    operations: int  #: operations ended (a count)
    requests: int  #: requests handed to the kernel (a count)
    retries: int  #: requests handed over again after a short transfer, EINTR or EAGAIN (a count)


class IoRequest(NamedTuple):
    """One operation of `AioHandle.submit_batch`."""

    operation: str  #: "read" or "write"
    buffer: torch.Tensor
    file: File
    file_offset: int = 0
    durable: bool = False  #: of a write: it ends when data, size and name are on the device


_open_handles: weakref.WeakSet[AioHandle] = weakref.WeakSet()
_events_lock = threading.Lock()


def _close_open_handles() -> None:
    for handle in list(_open_handles):
        handle.close()


class AioHandle(_C.AioHandleBase):
    """Moves tensors between memory and files. Make one with `aio_handle`.

    Thread-safe: any thread may start operations and wait. Every method takes any CPU tensor (or CUDA
    tensor, staged through locked buffers), of any dtype, size, strides and offset; the file holds its elements in row-major order. Tensors in locked
    memory (`is_locked`) that meet the file's alignment move directly; the rest is staged through a bounded
    set of locked buffers. A file is a path or an open descriptor (used as it is, never closed).

    Raises:
        ValueError, TypeError: the caller was wrong, at once: a sparse or meta tensor, a
            negative offset, a closed handle.
        OSError: the kernel refused; `errno` and `filename` say what. Asynchronous operations raise
            at `wait`.
        ShortReadError: the file ended before the buffer was full; what the buffer holds then is
            unspecified. It is an `EOFError`, no `OSError`.
        RuntimeError: the storage that a read was to fill was resized or moved meanwhile (`resize_` to
            more, `share_memory_`), so the tensor does not have the bytes; or the handle is the parent
            process's.

    While an operation is pending its bytes stay valid, whatever becomes of the tensor: it may be
    deleted, `set_`, given other `.data` or an empty storage. A write takes what the memory holds; a
    read fills the memory that the tensor had when it was started.

    Memory that cannot be touched (a map without permission, or of a file that was cut) is an OSError
    with errno EFAULT, as the kernel says it. What is not locked is copied by this process: a file
    that another cuts in just that moment is still a SIGBUS, as for any copy of torch.

    Leaving a `with` block closes the handle: what an operation failed with is raised there. When the
    block itself raises too, the operation's exception is the one that arrives, with the block's as
    its `__context__`; call `wait()` inside the block to have the first by itself.
    """

    def __init__(self, *settings: Any, **options: Any) -> None:
        super().__init__(*settings, **options)
        if not _open_handles:
            atexit.unregister(_close_open_handles)
            atexit.register(_close_open_handles)
        _open_handles.add(self)

    @classmethod
    def from_file(
        cls, path: Union[str, "os.PathLike[str]"], *, best_for: Optional[str] = None, **settings: Any
    ) -> AioHandle:
        """A handle with the settings that a file holds.

        Args:
            path: what `locked-tensor tune --save FILE` wrote, or a DeepSpeed configuration (JSON with
                an "aio" object).
            best_for: "read" or "write" for what was found best for that alone; None for what serves both.
            settings: arguments of `aio_handle` that take the place of the file's.

        Raises:
            ValueError: the file is not such a file, or a setting in it is unknown, of another type or
                out of its bounds.
            OSError: the file cannot be read, or the engine that it names is refused by the kernel.
        """
        return aio_handle(**{**read_settings(path, best_for), **settings})

    def get_alignment(self) -> int:
        """Bytes that sizes should be a multiple of for speed; nothing has to be (DeepSpeed's name)."""
        return os.sysconf("SC_PAGE_SIZE")

    def stats(self) -> IoStats:
        """What this handle has moved so far."""
        return IoStats(*self._stats())

    def new_cpu_locked_tensor(
        self,
        num_elem: int,
        example_tensor: Optional[torch.Tensor] = None,
        *,
        example_tenosr: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """A one-dimensional `LockedTensor` of `num_elem` elements with the example's dtype.

        It belongs to no handle: every handle recognises it and it lives as long as its last view.
        `example_tenosr` is DeepSpeed's spelling.

        Raises:
            LockLimitError: the memory could not be locked.
            TypeError, ValueError: `num_elem` is no whole number, negative, or more than memory can have;
                there is no example, or a quantized one.
        """
        example = example_tensor if example_tensor is not None else example_tenosr
        if not isinstance(example, torch.Tensor):
            raise TypeError(
                f"new_cpu_locked_tensor() needs example_tensor, a tensor, for its dtype, got {type(example).__name__}"
            )
        return new_claimed_tensor(num_elem, example.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Gives up the claim that `new_cpu_locked_tensor` of any handle made.

        When nothing else uses the storage its memory is given back at once and `tensor` becomes
        empty; otherwise the memory goes with its last view. False for anything else, also the
        second time.

        Raises:
            TypeError: not a tensor.
        """
        check_is_tensor("free_cpu_locked_tensor", tensor)
        return _C.free_claimed_tensor(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True for locked memory, and for memory that torch has pinned for an accelerator."""
        return is_pinned(tensor)

    def submit_pread(self, buffer: torch.Tensor, file: File, file_offset: int = 0) -> IoTicket:
        """Starts a read; the ticket is waited for, asked or awaited by itself.

        Args:
            file: a path or an open descriptor, in the same place.
        """
        return IoTicket(self._submit_pread(buffer, file, file_offset), self)

    def submit_pwrite(
        self, buffer: torch.Tensor, file: File, file_offset: int = 0, *, durable: bool = False
    ) -> IoTicket:
        """Starts a write; the ticket is waited for, asked or awaited by itself.

        Args:
            file: a path or an open descriptor, in the same place.
            durable: it ends when data, size and name are on the device; see `sync_pwrite`.
        """
        return IoTicket(self._submit_pwrite(buffer, file, file_offset, durable=durable), self)

    def submit_batch(self, requests: Iterable[IoRequest]) -> list[IoTicket]:
        """Starts many operations together; a ticket for each, in order.

        Raises:
            TypeError, ValueError: a request is not ("read" | "write", buffer, file, file_offset=0,
                durable=False), or what `submit_pread` and `submit_pwrite` raise at once; none of them
                is started then.
        """
        return [IoTicket(ticket, self) for ticket in self._submit_batch(iter(requests))]

    def close(self) -> None:
        """Finishes what is in flight and releases everything. Idempotent.

        Raises what `wait` would have raised. What a signal handler raises while it waits leaves the
        handle open: close it again.
        """
        try:
            super().close()
        finally:
            if self.closed:
                self._forget_open()

    def _forget_open(self) -> None:
        _open_handles.discard(self)
        with _events_lock:
            events, self._completion_events = self._completion_events, None
        if events is not None:
            events.wake()  # every ticket has ended

    _completion_events: Optional[CompletionEvents] = None

    def _events(self) -> CompletionEvents:
        with _events_lock:
            if self._completion_events is None:
                events = CompletionEvents(self)
                self._notify(events.fd)
                self._completion_events = events
            return self._completion_events

    def __enter__(self) -> AioHandle:
        if self.closed:
            raise ValueError("this handle is closed; make a new one with aio_handle()")
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<AioHandle closed>"
        return (
            f"<AioHandle {self.engine} block_size={self.get_block_size()} "
            f"queue_depth={self.get_queue_depth()}>"
        )


def check_handle(handle: object) -> None:
    """Raises TypeError for what is not an `AioHandle`, and ValueError for a closed one."""
    if not isinstance(handle, AioHandle):
        raise TypeError(f"aio_handle must be an AioHandle, as aio_handle() makes, got {type(handle).__name__}")
    if handle.closed:
        raise ValueError("aio_handle is closed; make a new one with aio_handle()")


class IoTicket:
    """One operation that was submitted: wait for it, ask it, or `await` it."""

    __slots__ = ("_ticket", "_handle")

    def __init__(self, ticket: _C.IoTicketBase, handle: AioHandle) -> None:
        self._ticket = ticket
        self._handle = handle

    def wait(self, timeout: Optional[float] = None) -> int:
        """Waits and returns the bytes moved.

        Args:
            timeout: seconds at most; None waits as long as it takes.

        Raises:
            TimeoutError: it has not ended yet. It goes on, and can be waited for again.
            OSError, ShortReadError, RuntimeError: the operation failed (see `AioHandle`); `AioHandle.wait`
                does not raise it again.
        """
        return self._ticket.wait(timeout)

    def done(self) -> bool:
        """Has it ended, well or not? Never waits."""
        return self._ticket.done()

    def exception(self) -> Optional[BaseException]:
        """Waits and returns what `wait` would raise, or None. Counts as taken."""
        return self._ticket.exception()

    def __await__(self) -> Generator[Any, None, int]:
        return self._handle._events().wait_for(self).__await__()


def aio_handle(
    block_size: int = 1 << 20,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = False,
    intra_op_parallelism: int = 1,
    *,
    engine: str = "auto",
    direct: str = "auto",
    staging_bytes: int = 32 << 20,
    vector_run_bytes: int = 64 << 10,
    max_pending: int = 1 << 16,
) -> AioHandle:
    """Makes a handle for file I/O. The positional arguments are DeepSpeed's `aio_handle`'s.

    Args:
        block_size: bytes of one request; a transfer is cut into such.
        queue_depth: requests in flight at once, 1 to 32768.
        single_submit: one request a system call.
        overlap_events: accepted for DeepSpeed's sake; submitting and reaping always overlap.
        intra_op_parallelism: threads that share one large transfer.
        engine: "auto" (the best usable), "io_uring", "libaio" or "threads"; see `engines`.
        direct: "auto" (O_DIRECT where the file system grants it; parts of sectors at the ends of a
            range go through the page cache), "require" (no byte goes through the page cache: OSError
            where the file system does not grant it, ValueError at once for offsets and sizes that are
            no multiples of its sectors, of which the message tells the size) or "never" (through the
            page cache).
        staging_bytes: memory at most for what cannot move directly, locked where the lock limit leaves
            room: at most half of what it leaves. Idle staging is given back by `empty_cache`, and where
            locked memory is refused.
        vector_run_bytes: strided tensors whose contiguous runs are at least this long, and aligned,
            move directly in vectored requests; shorter runs are staged.
        max_pending: operations that may be pending; starting one more waits for room.

    Raises:
        ValueError: a setting is out of its bounds.
        TypeError: a setting is of another type; a bool is no whole number.
        OSError: the named engine is refused by the kernel; the message says why.
    """
    return AioHandle(
        block_size,
        queue_depth,
        single_submit,
        overlap_events,
        intra_op_parallelism,
        engine=engine,
        direct=direct,
        staging_bytes=staging_bytes,
        vector_run_bytes=vector_run_bytes,
        max_pending=max_pending,
    )
