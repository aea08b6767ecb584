"""`save_on_disk`: tensors that autograd saves for backward wait on disk."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Iterable, Optional, Union

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from locked_tensor.handle import AioHandle
from locked_tensor.movable import is_movable
from locked_tensor.swap.folder import FolderPath
from locked_tensor.swap.optimizer_state import in_storage_order, is_dense
from locked_tensor.swap.pool import buffer_bytes_within
from locked_tensor.swap.saved import Kept, Packed, take
from locked_tensor.swap.store import PAGE_BYTES, Extent
from locked_tensor.swap.transfer import Pending, Spiller, SwapIo, SwapStats, open_swap_with_pool

_BUFFERS = 4
_SMALLEST_BUFFER = 16 * PAGE_BYTES
_READ_AHEAD = 4  # tensors


class save_on_disk(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd saves for backward goes to disk, and comes back when backward needs it.

    The counterpart of `torch.autograd.graph.save_on_cpu`. Gradients are the same bits. Tensors are copied
    to locked buffers and written while forward goes on; backward reads them ahead in reverse order, into
    ordinary memory. Parameters and their views stay where they are, and so do tensors that are not dense
    strided CPU tensors of at least `min_bytes`, as quantized ones and wrappers of other tensors. The files are gone when the last graph is, or at exit.

        with save_on_disk("/nvme") as saved:
            loss = model(batch)
        loss.backward()
        saved.stats()

    Args:
        folder: where to: a path, or a list of paths on several devices.
        min_bytes: smaller tensors stay in memory.
        aio_handle: moves the bytes; None makes one.
        max_locked_bytes: locked memory at most, for the copies.

    Raises:
        OSError: the folder may not be written. In forward: the disk is full. In backward: a tensor could
            not be written or read.
        ValueError: `max_locked_bytes` is too small.
    """

    def __init__(
        self,
        folder: Union[FolderPath, Iterable[FolderPath]],
        *,
        min_bytes: int = 1 << 20,
        aio_handle: Optional[AioHandle] = None,
        max_locked_bytes: int = 160 << 20,
    ) -> None:
        offload = _Offload(folder, aio_handle, max_locked_bytes, max(min_bytes, 1))
        self._offload = offload
        super().__init__(offload.pack, take)

    def __enter__(self) -> save_on_disk:  # type: ignore[override]
        super().__enter__()
        return self

    def stats(self) -> SwapStats:
        """What was moved so far."""
        return self._offload.io.stats()


class _Saved:
    """A tensor on disk, until autograd drops it."""

    def __init__(self, tensor: torch.Tensor, extent: Extent, writes: list[Pending], number: int) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.is_dense = is_dense(tensor)
        self.extent = extent
        self.writes = writes
        self.number = number
        self.coming: Optional[tuple[torch.Tensor, Pending]] = None

    def start_reading(self, io: SwapIo) -> tuple[torch.Tensor, Pending]:
        """What it is read into, and the read; of one that was started before, if any."""
        if self.coming is None:
            for write in self.writes:
                write.wait()
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
            target = in_storage_order(tensor) if self.is_dense else tensor
            self.coming = tensor, io.read(self.extent, target)
        return self.coming

    def finish_reading(self, io: SwapIo) -> torch.Tensor:
        tensor, read = self.start_reading(io)
        self.coming = None
        read.wait()
        return tensor


class _Packed:
    """What autograd holds: a saved tensor, and what brings it back."""

    def __init__(self, offload: _Offload, saved: _Saved) -> None:
        self._offload = offload
        self._saved = saved

    def take(self) -> torch.Tensor:
        return self._offload.unpack(self._saved)


class _Offload:
    """What the tensors of one `save_on_disk` share. Lives as long as it or one of them."""

    def __init__(
        self, folder: Any, handle: Optional[AioHandle], max_locked_bytes: int, min_bytes: int
    ) -> None:
        buffer_bytes = buffer_bytes_within(max_locked_bytes, _BUFFERS, _SMALLEST_BUFFER)
        self.io, self.store, pool, _ = open_swap_with_pool(
            self, folder, handle, _BUFFERS, buffer_bytes, staging_bytes=buffer_bytes
        )
        self._spiller = Spiller(self.io, pool)
        self.min_bytes = min_bytes
        self._lock = threading.RLock()  # autograd's threads unpack, and finalizers run anywhere
        self._living: dict[int, weakref.ref[_Saved]] = {}
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self._dropped: deque[tuple[Extent, list[Pending]]] = deque()
        self._count = 0

    def pack(self, tensor: torch.Tensor) -> Packed:
        if not self._goes_to_disk(tensor):
            return Kept(tensor)
        with self._lock:
            self._collect()
            layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            key = (tensor.data_ptr(), *layout, tensor._version)
            if key in self._known:
                storage, known = self._known[key]
                saved = known()
                if saved is not None and not storage.expired():  # the same bytes, saved by another node
                    return _Packed(self, saved)
            saved = self._save(tensor)
            self._known[key] = StorageWeakRef(tensor.untyped_storage()), weakref.ref(saved)
            owned = (self._living, self._known, key, saved.number, self._dropped, saved.extent, saved.writes)
            weakref.finalize(saved, _drop, *owned).atexit = False
            return _Packed(self, saved)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        with self._lock:
            saved.start_reading(self.io)
            for number in range(saved.number - 1, saved.number - 1 - _READ_AHEAD, -1):
                ahead = self._living[number]() if number in self._living else None
                if ahead is not None:
                    ahead.start_reading(self.io)
            return saved.finish_reading(self.io)

    def _goes_to_disk(self, tensor: torch.Tensor) -> bool:
        if not is_movable(tensor) or tensor.nbytes < self.min_bytes:
            return False
        if any(each.is_leaf and each.requires_grad for each in (tensor, tensor._base) if each is not None):
            return False  # a parameter or its view: it stays in memory anyway
        return is_dense(tensor) or tensor.untyped_storage().nbytes() >= tensor.nbytes  # not an expanded one

    def _save(self, tensor: torch.Tensor) -> _Saved:
        extent = self.store.allocate(tensor.nbytes)
        flat = in_storage_order(tensor.detach()) if is_dense(tensor) else tensor
        saved = _Saved(tensor, extent, self._spiller.spill(extent, flat), self._count)
        self._living[self._count] = weakref.ref(saved)
        self._count += 1
        return saved

    def _collect(self) -> None:
        for _ in range(len(self._dropped)):
            extent, writes = self._dropped.popleft()
            if all(write.done() for write in writes):
                self.store.free(extent)
            else:
                self._dropped.append((extent, writes))


def _drop(
    living: dict[int, Any],
    known: dict[Any, Any],
    key: Any,
    number: int,
    dropped: deque[tuple[Extent, list[Pending]]],
    extent: Extent,
    writes: list[Pending],
) -> None:
    living.pop(number, None)
    if key in known and known[key][1]() is None:
        known.pop(key, None)
    dropped.append((extent, writes))

