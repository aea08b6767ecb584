"""`TensorSwapper`: tensors on disk by name."""

from __future__ import annotations

import threading
from typing import Any, Iterable, Optional, Union

import torch

from locked_tensor.handle import AioHandle
from locked_tensor.memory import is_locked
from locked_tensor.movable import check_movable
from locked_tensor.swap.folder import FolderPath
from locked_tensor.swap.optimizer_state import in_storage_order, is_dense
from locked_tensor.swap.pool import Lease, PoolExhaustedError, SwapBufferPool
from locked_tensor.swap.store import Extent, page_aligned
from locked_tensor.swap.transfer import Pending, Spiller, SwapStats, open_swap


class _Swapped:
    """One tensor on disk."""

    def __init__(self, name: str, tensor: torch.Tensor, extent: Extent) -> None:
        self.name = name
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        self.nbytes = tensor.nbytes
        self.extent = extent
        self.writes: list[Pending] = []
        self.ahead: Optional[tuple[Lease, Pending]] = None

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        flat = memory[: self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class TensorSwapper:
    """Keeps tensors on disk under names, written and read through a pool of locked buffers.

    All of them share one private file in each folder: any number of tensors, any names. Thread-safe.

    Args:
        aio_handle: moves the bytes.
        folder: where to: a path, or a list of paths on several devices. Swap files are private to the
            process, and gone after `close`, at exit, and at the next start after a crash.
        pool: lends the memory that tensors are read into, and through which unlocked ones are written.

    Raises:
        OSError: the folder may not be written.
    """

    def __init__(
        self, aio_handle: AioHandle, folder: Union[FolderPath, Iterable[FolderPath]], pool: SwapBufferPool
    ) -> None:
        self._io, self._store, self._close_files = open_swap(self, folder, aio_handle)
        self._pool = pool
        self._spiller = Spiller(self._io, pool)
        self._lock = threading.RLock()
        self._swapped: dict[str, _Swapped] = {}
        self._is_closed = False

    def swap_out(self, name: str, tensor: torch.Tensor) -> None:
        """Starts to write a CPU tensor under a name, in the place of what had the name before.

        A locked, dense tensor is written from its own memory and must stay as it is until `flush` or
        `swap_in`; any other is copied first, and is the caller's again at once.

        Raises:
            OSError: no room on disk; what had the name before is as it was.
            TypeError: not a tensor.
            ValueError: not a strided CPU tensor with bytes of its own: a sparse, nested, quantized, meta,
                fake or uninitialized one, or a wrapper of others.
        """
        check_movable("tensor", tensor)
        with self._lock:
            self._check_open()
            swapped = _Swapped(name, tensor, self._store.allocate(tensor.nbytes))
            if name in self._swapped:
                self.discard(name)
            flat = in_storage_order(tensor.detach()) if is_dense(tensor) else tensor
            if is_dense(tensor) and tensor.numel() and is_locked(tensor):
                swapped.writes = [self._io.write(swapped.extent, flat)]
            else:
                swapped.writes = self._spiller.spill(swapped.extent, flat)
            self._swapped[name] = swapped

    def prefetch(self, name: str) -> bool:
        """Starts to read, so that `swap_in` need not wait. False when the pool has no room now.

        Raises:
            KeyError: nothing has that name.
        """
        with self._lock:
            swapped = self._find(name)
            if swapped.ahead is None:
                try:
                    self._start_reading(swapped, timeout=0.0)
                except PoolExhaustedError:
                    return False
            return True

    def swap_in(
        self, name: str, *, out: Optional[torch.Tensor] = None, timeout: Optional[float] = 0.0
    ) -> torch.Tensor:
        """Reads a tensor. It stays on disk too, until it is discarded.

        Args:
            out: read into this tensor, of the same shape and dtype, and return it. Otherwise the result
                is leased from the pool, and its memory goes back with its last view.
            timeout: seconds to wait for room in the pool; None waits as long as it takes.

        Raises:
            KeyError: nothing has that name.
            PoolExhaustedError: the pool has no room.
            OSError, ShortReadError: it could not be written or read.
            TypeError, ValueError: `out` is not such a tensor.
        """
        if out is not None:
            check_movable("out", out)
        with self._lock:
            swapped = self._find(name)
            if out is not None:
                return self._read_into(swapped, out)
            if swapped.ahead is None:
                self._start_reading(swapped, timeout)
            if swapped.ahead is None:
                raise KeyError(name)
            (lease, read), swapped.ahead = swapped.ahead, None
            read.wait()
            return swapped.view(lease.tensor)

    def flush(self) -> None:
        """Waits until everything that was swapped out is written.

        Raises:
            OSError: a tensor could not be written; `name` of the exception says which.
        """
        with self._lock:
            self._check_open()
            for swapped in self._swapped.values():
                self._finish_writing(swapped)

    def discard(self, name: str) -> None:
        """Forgets a tensor; its room on disk is used again.

        Raises:
            KeyError: nothing has that name.
        """
        with self._lock:
            swapped = self._find(name)
            del self._swapped[name]
            _drain(swapped)
            self._store.free(swapped.extent)

    def names(self) -> list[str]:
        """The names of what is on disk, oldest first."""
        return list(self._swapped)

    def __contains__(self, name: object) -> bool:
        return name in self._swapped

    def __len__(self) -> int:
        return len(self._swapped)

    def stats(self) -> SwapStats:
        """What was moved so far."""
        return self._io.stats()

    def close(self) -> None:
        """Removes everything from disk. Tensors that were read stay. Final and idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._swapped.clear()
            self._close_files()

    def __enter__(self) -> TensorSwapper:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this TensorSwapper is closed")

    def _find(self, name: str) -> _Swapped:
        self._check_open()
        if name not in self._swapped:
            raise KeyError(f"nothing was swapped out as {name!r}")
        return self._swapped[name]

    def _finish_writing(self, swapped: _Swapped) -> None:
        for write in swapped.writes:
            try:
                write.wait()
            except BaseException as error:  # and again to whoever asks for the tensor next
                error.name = swapped.name  # type: ignore[attr-defined]
                raise

    def _start_reading(self, swapped: _Swapped, timeout: Optional[float]) -> None:
        self._finish_writing(swapped)
        lease = self._pool.lease(max(page_aligned(swapped.nbytes), 1), zero=False, timeout=timeout)
        swapped.ahead = lease, self._io.read(swapped.extent, lease.tensor)

    def _read_into(self, swapped: _Swapped, out: torch.Tensor) -> torch.Tensor:
        if out.shape != swapped.shape or out.dtype != swapped.dtype:
            raise ValueError(
                f"out must be {swapped.dtype} of shape {tuple(swapped.shape)}, got {out.dtype} of {tuple(out.shape)}"
            )
        self._finish_writing(swapped)
        if is_dense(out) and out.stride() == swapped.stride:
            self._io.read(swapped.extent, in_storage_order(out.detach())).wait()
        else:
            memory = torch.empty(page_aligned(swapped.nbytes), dtype=torch.uint8)
            self._io.read(swapped.extent, memory).wait()
            out.detach().copy_(swapped.view(memory))
        return out


def _drain(swapped: _Swapped) -> None:
    """Nothing is in flight afterwards, whatever came of it."""
    for write in swapped.writes:
        write.drain()
    if swapped.ahead is not None:
        swapped.ahead[1].drain()
        swapped.ahead = None
