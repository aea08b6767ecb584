"""Gradients that go to disk as backward makes them."""

from __future__ import annotations

import threading
from typing import Any, Optional

import torch

from locked_tensor.swap.optimizer_state import as_laid_out, in_storage_order, is_dense, local
from locked_tensor.swap.pool import SwapBufferPool
from locked_tensor.swap.store import Extent, SwapStore
from locked_tensor.swap.transfer import Pending, Spiller, SwapIo


class _OnDisk:
    """One parameter's gradient: its elements in the parameter's storage order."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.writes: list[Pending] = []
        self.is_there = False  #: since the last zero_grad

    def finish_writing(self) -> None:
        for write in self.writes:
            write.wait()


class SwappedGradients:
    """Takes each gradient from its parameter when backward has accumulated it, and adds up on disk."""

    def __init__(self, io: SwapIo, store: SwapStore, pool: SwapBufferPool, min_bytes: int) -> None:
        self._io = io
        self._store = store
        self._spiller = Spiller(io, pool)
        self._min_bytes = min_bytes
        self._lock = threading.Lock()  # autograd's threads
        self._on_disk: dict[torch.Tensor, _OnDisk] = {}
        self._hooks: list[Any] = []

    def watch(self, param: torch.Tensor) -> None:
        """From now on the parameter's gradients go to disk. Those of small or strided parameters stay."""
        own = local(param)
        if param.requires_grad and own.nbytes >= self._min_bytes and is_dense(own):
            self._hooks.append(param.register_post_accumulate_grad_hook(self._take))

    def extent(self, param: torch.Tensor) -> Optional[Extent]:
        """Where the parameter's gradient is, written whole; None when it has none on disk.

        Raises:
            OSError: it could not be written.
        """
        found = self._on_disk.get(param)
        if found is None or not found.is_there:
            return None
        found.finish_writing()
        return found.extent

    def has(self, param: torch.Tensor) -> bool:
        """Is a gradient on disk, or on its way there?"""
        return param in self._on_disk and self._on_disk[param].is_there

    def has_any(self) -> bool:
        """Has any parameter a gradient on disk?"""
        return any(each.is_there for each in self._on_disk.values())

    def clear(self) -> None:
        """As `zero_grad`: no parameter has a gradient on disk."""
        for each in self._on_disk.values():
            each.is_there = False

    def close(self) -> None:
        """Gradients stay with their parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._on_disk.clear()

    @torch.no_grad()
    def _take(self, param: torch.Tensor) -> None:
        if param.grad is None or param.grad.is_sparse:
            return
        with self._lock:
            gradient = in_storage_order(as_laid_out(local(param.grad.detach()), local(param)))
            if param not in self._on_disk:
                self._on_disk[param] = _OnDisk(self._store.allocate(gradient.nbytes))
            each = self._on_disk[param]
            for write in each.writes:
                write.drain()
            if each.is_there:
                each.finish_writing()
                before = torch.empty_like(gradient)
                self._io.read(each.extent, before).wait()
                gradient = before.add_(gradient)
            each.writes = self._spiller.spill(each.extent, gradient)
            each.is_there = True
            param.grad = None
