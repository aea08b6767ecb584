"""A fixed number of locked buffers that are leased, packed, and lent again."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import queue
import threading
import time
import weakref
from typing import Any, NamedTuple, Optional, Sequence

import torch

from locked_tensor.handle import AioHandle, check_handle
from locked_tensor.movable import check_dtype
from locked_tensor.swap.free_space import FreeSpace
from locked_tensor.swap.store import PAGE_BYTES, page_aligned
from locked_tensor.tensor import tag


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


class _Slot(NamedTuple):
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
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.free = [FreeSpace(buffer_bytes) for _ in range(count)]
        self.returned: queue.SimpleQueue[_Slot] = queue.SimpleQueue()  # filled by finalizers
        self.lock = threading.Lock()

    def take(self, nbytes: int) -> Optional[_Slot]:
        """Of the buffer with the smallest free piece that fits."""
        with self.lock:
            self._collect()
            fitting = [(fit, buffer) for buffer, free in enumerate(self.free) if (fit := free.fit(nbytes)) is not None]
            if not fitting:
                return None
            _, buffer = min(fitting)
            offset = self.free[buffer].take(nbytes)
            return None if offset is None else _Slot(buffer, offset, nbytes)

    def largest_free(self) -> int:
        with self.lock:
            self._collect()
            return max(free.largest for free in self.free)

    def states(self) -> list[BufferState]:
        with self.lock:
            self._collect()
            return [
                BufferState.FREE if free.total == tensor.nbytes else BufferState.LEASED
                for free, tensor in zip(self.free, self.tensors)
            ]

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                slot = self.returned.get_nowait()
                self.free[slot.buffer].give_back(slot.offset, slot.nbytes)


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
        self._turn = threading.Lock()  # who waits for room waits in line

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
        slot = self._wait_for(page_aligned(nbytes), timeout)
        # Its storage keeps `memory` alive, so that the slot comes back with the last view, whoever has it.
        memory = (ctypes.c_ubyte * slot.nbytes).from_address(
            self._buffers.addresses[slot.buffer] + slot.offset
        )
        weakref.finalize(memory, _give_back, self._buffers, slot).atexit = False
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        if zero:
            flat.zero_()
        tensor = flat[: count * dtype.itemsize].view(dtype).view(shape)
        return Lease(tag(tensor), slot.nbytes)

    def _wait_for(self, nbytes: int, timeout: Optional[float]) -> _Slot:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._turn.acquire(timeout=-1 if timeout is None else timeout):
            raise self._exhausted(nbytes)
        try:
            while (slot := self._buffers.take(nbytes)) is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._exhausted(nbytes)
                try:
                    self._buffers.returned.put(self._buffers.returned.get(timeout=left))
                except queue.Empty:
                    raise self._exhausted(nbytes) from None
            return slot
        finally:
            self._turn.release()

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


def _give_back(buffers: _Buffers, slot: _Slot) -> None:
    buffers.returned.put(slot)  # never a lock: a finalizer may run inside any other call
