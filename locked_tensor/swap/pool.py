"""A fixed number of locked buffers that are leased, packed, and lent again."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import enum
import os
import queue
import threading
import time
import weakref
from typing import Any, Optional, Sequence

import torch

from locked_tensor.errors import InternalError
from locked_tensor.handle import AioHandle, check_handle
from locked_tensor.movable import check_dtype
from locked_tensor.swap.free_space import FreeSpace
from locked_tensor.swap.store import PAGE_BYTES, page_aligned
from locked_tensor.tensor import tag

_MOMENT_SECONDS = 0.05


class PoolExhaustedError(MemoryError):
    """No buffer of the pool has room now."""

    def __init__(self, needed_bytes: int, available_bytes: int, message: str) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes  #: in one piece
        self.available_bytes = available_bytes  #: the largest free piece


class BufferState(enum.Enum):
    """What a buffer of a pool is doing."""

    FREE = "free"  #: nobody has a lease on it
    LEASED = "leased"  #: at least one lease is out


# Note [What is lent is the truth] A loan is a weak reference to the memory that was lent: when the last view
# has gone it is dead, and the callback puts it in a queue. That callback is a C function, so that no signal's
# handler can run inside it, and takes no lock, as it may run inside any other call. What is free is an index of
# the loans: kept up to date piece by piece, and made anew where an interrupt has left it in doubt.


class _Loan(weakref.ref[Any]):
    """Who has a piece of a buffer: alive as long as its memory."""

    buffer: int
    offset: int
    nbytes: int


class _Buffers:
    """The buffers and what is free in them. Outlives its pool until the last lease is gone."""

    def __init__(self, handle: AioHandle, count: int, buffer_bytes: int) -> None:
        example = torch.empty(0, dtype=torch.uint8)
        if count * buffer_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            # All at once is refused at once, with the reason; one by one would fill the machine first.
            handle.new_cpu_locked_tensor(min(count * buffer_bytes, 1 << 62), example)
        self.tensors = [handle.new_cpu_locked_tensor(buffer_bytes, example) for _ in range(count)]
        self.returned: queue.SimpleQueue[_Loan] = queue.SimpleQueue()  # see Note [What is lent is the truth]
        self._loans: dict[tuple[int, int], _Loan] = {}  # by buffer and offset
        self._free = [FreeSpace(buffer_bytes) for _ in range(count)]
        self._is_certain = True  #: is `_free` what the loans leave?
        self._lock = threading.Lock()

    def lend(self, nbytes: int) -> Any:
        """Memory of the buffer with the smallest free piece that fits, or None. It goes back when it dies."""
        with self._lock:
            self._settle()
            fitting = [(fit, buffer) for buffer, free in enumerate(self._free) if (fit := free.fit(nbytes)) is not None]
            if not fitting:
                return None
            self._is_certain = False
            _, buffer = min(fitting)
            offset = self._free[buffer].take(nbytes)
            if offset is None:
                raise InternalError(f"{nbytes} bytes fit a buffer and could not be taken")
            memory: Any = (ctypes.c_ubyte * nbytes).from_address(self.tensors[buffer].data_ptr() + offset)
            loan = _Loan(memory, self.returned.put)
            loan.buffer, loan.offset, loan.nbytes = buffer, offset, nbytes
            self._loans[buffer, offset] = loan
            memory.buffers = self  # until the last view has gone
            self._is_certain = True
            return memory

    def largest_free(self) -> int:
        with self._lock:
            self._settle()
            return max(free.largest for free in self._free)

    def states(self) -> list[BufferState]:
        with self._lock:
            self._settle()
            return [
                BufferState.FREE if free.total == tensor.nbytes else BufferState.LEASED
                for free, tensor in zip(self._free, self.tensors)
            ]

    def _settle(self) -> None:
        """Makes what has come back free."""
        if not self._is_certain:
            self._loans = {key: loan for key, loan in self._loans.items() if loan() is not None}
            self._free = [FreeSpace(tensor.nbytes) for tensor in self.tensors]
            for loan in self._loans.values():
                self._free[loan.buffer].cut(loan.offset, loan.nbytes)
        self._is_certain = False
        with contextlib.suppress(queue.Empty):
            while True:
                loan = self.returned.get_nowait()
                if self._loans.get((loan.buffer, loan.offset)) is loan:
                    del self._loans[loan.buffer, loan.offset]
                    self._free[loan.buffer].give_back(loan.offset, loan.nbytes)
        self._is_certain = True


class _Place:
    """A place in the line of those who wait for room, until it is given up or nobody has it."""

    is_taken = True


class _Line:
    """Who waits for room waits in turn."""

    def __init__(self) -> None:
        self._places: collections.deque[weakref.ref[_Place]] = collections.deque()
        self._moved = threading.Condition()

    def join(self) -> _Place:
        place = _Place()
        self._places.append(weakref.ref(place))
        return place

    def is_first(self, place: _Place) -> bool:
        with self._moved:
            while (first := self._places[0]()) is None or not first.is_taken:
                self._places.popleft()
            return first is place

    def leave(self, place: _Place) -> None:
        place.is_taken = False
        with self._moved:
            self._moved.notify_all()

    def wait(self, timeout: Optional[float]) -> None:
        """Until somebody left, or for a moment: who was interrupted has told nobody."""
        with self._moved:
            self._moved.wait(_MOMENT_SECONDS if timeout is None else min(timeout, _MOMENT_SECONDS))


class Lease:
    """Some of a pool's locked memory, until it is released and nothing uses its tensor any more.

    A context manager that gives the tensor and releases at the end. Dropped without, it goes back too.
    """

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self._tensor: Optional[torch.Tensor] = tensor
        self.nbytes = nbytes  #: bytes of the pool that it takes, whole pages

    @property
    def tensor(self) -> torch.Tensor:
        """The leased tensor. Its memory is the lease's as long as it or a view of it lives."""
        if self._tensor is None:
            raise ValueError("this lease was released")
        return self._tensor

    def release(self) -> None:
        """Gives the lease up. Its tensor is empty then; its memory goes back now, or with the last view
        of it. Idempotent."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            with torch.no_grad():
                tensor.set_(torch.empty(0, dtype=tensor.dtype).untyped_storage(), 0, (0,), (1,))

    def __enter__(self) -> torch.Tensor:
        return self.tensor

    def __exit__(self, *exception: Any) -> None:
        self.release()


def buffer_bytes_within(max_locked_bytes: int, count: int, least: int) -> int:
    """Bytes of each of `count` buffers, and of as much staging beside them, within a budget: whole pages.

    Raises:
        ValueError: that would be less than `least` bytes.
    """
    if max_locked_bytes < least * (count + 1):
        raise ValueError(f"max_locked_bytes must be at least {least * (count + 1)}, got {max_locked_bytes}")
    return max_locked_bytes // (count + 1) // PAGE_BYTES * PAGE_BYTES


class SwapBufferPool:
    """`count` locked buffers of `buffer_bytes` each, from which tensors are leased.

    All of it is locked at once, so that a pool larger than the machine allows fails here. Dropping
    the pool gives the memory back, once the last lease is gone. Thread-safe.

    Args:
        aio_handle: what allocates the buffers; any handle moves them directly.
        count: how many buffers.
        buffer_bytes: bytes of each, rounded up to whole pages; the most that one lease may have.

    Raises:
        LockLimitError: so much memory could not be locked.
        ValueError: `count` or `buffer_bytes` is not positive, or the handle is closed.
        TypeError: not a handle.
    """

    def __init__(self, aio_handle: AioHandle, count: int, buffer_bytes: int) -> None:
        check_handle(aio_handle)
        if count <= 0 or buffer_bytes <= 0:
            raise ValueError(f"count and buffer_bytes must be positive, got {count} and {buffer_bytes}")
        self.count = count
        self.buffer_bytes = page_aligned(buffer_bytes)
        self._buffers = _Buffers(aio_handle, count, self.buffer_bytes)
        self._line = _Line()

    @property
    def nbytes(self) -> int:
        """Bytes locked by the pool."""
        return self.count * self.buffer_bytes

    def available(self) -> int:
        """How many buffers are free."""
        return self.states().count(BufferState.FREE)

    def available_bytes(self) -> int:
        """Bytes of the largest lease that would be given now."""
        return self._buffers.largest_free()

    def states(self) -> list[BufferState]:
        """The state of each buffer."""
        return self._buffers.states()

    def lease(
        self,
        nbytes: int,
        dtype: torch.dtype = torch.uint8,
        shape: Optional[Sequence[int]] = None,
        *,
        timeout: Optional[float] = 0.0,
        zero: bool = True,
    ) -> Lease:
        """Lends `nbytes`, page-aligned, as a `LockedTensor` of this dtype and shape.

        Several leases share a buffer where they fit.

        Args:
            nbytes: bytes to reserve, rounded up to whole pages; at least what the tensor needs.
            dtype: of the tensor.
            shape: of the tensor; None is one dimension of as many elements as fit `nbytes`.
            timeout: seconds to wait for room; None waits as long as it takes.
            zero: fill everything reserved with zeros, padding too. Otherwise it holds what was there.

        Raises:
            PoolExhaustedError: no room, within the timeout.
            ValueError: `nbytes` exceeds a buffer, or is too little for the tensor.
            TypeError: no dtype, or a quantized one.
        """
        check_dtype(dtype)
        shape = (nbytes // dtype.itemsize,) if shape is None else tuple(shape)
        count = torch.Size(shape).numel()
        if any(size < 0 for size in shape):
            raise ValueError(f"shape must have no negative sizes, got {shape}")
        if nbytes < count * dtype.itemsize or nbytes < 0:
            raise ValueError(f"{nbytes} bytes are too few for shape {shape} of {dtype}")
        if nbytes > self.buffer_bytes:
            raise ValueError(f"{nbytes:,} bytes exceed a buffer of this pool ({self.buffer_bytes:,})")
        if count == 0:
            return Lease(torch.empty(shape, dtype=dtype), 0)
        reserved = page_aligned(nbytes)
        # Its storage keeps `memory` alive, so that it comes back with the last view, whoever has it.
        memory = self._wait_for(reserved, timeout)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        if zero:
            flat.zero_()
        tensor = flat[: count * dtype.itemsize].view(dtype).view(shape)
        return Lease(tag(tensor), reserved)

    def _wait_for(self, nbytes: int, timeout: Optional[float]) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        returned = self._buffers.returned
        place = self._line.join()
        try:
            while True:
                is_first = self._line.is_first(place)
                if is_first and (memory := self._buffers.lend(nbytes)) is not None:
                    return memory
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._exhausted(nbytes)
                if not is_first:
                    self._line.wait(left)
                    continue
                with contextlib.suppress(queue.Empty):
                    returned.put(returned.get(timeout=left))
        finally:
            self._line.leave(place)

    def _exhausted(self, nbytes: int) -> PoolExhaustedError:
        available = self.available_bytes()
        return PoolExhaustedError(
            nbytes,
            available,
            f"{nbytes:,} bytes are needed and at most {available:,} are free in one piece of a pool of "
            f"{self.count} buffers of {self.buffer_bytes:,}: release leases, wait with timeout=, "
            "or make the pool larger",
        )

    def __repr__(self) -> str:
        return f"<SwapBufferPool {self.available()} of {self.count} x {self.buffer_bytes:,} bytes free>"

