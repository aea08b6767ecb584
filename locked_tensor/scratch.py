"""Locked memory through which neighbouring small tensors move together, a bounded amount of it."""

from __future__ import annotations

from typing import Callable, Optional

import torch

from locked_tensor.contexts import locked_memory
from locked_tensor.errors import LockLimitError

AT_ONCE_BYTES = 16 << 20  # at most, of what moves together


def locked_bytes(nbytes: int) -> torch.Tensor:
    """uint8[nbytes] of locked memory; ordinary memory, which the handle stages, where the limit is reached.

    Raises:
        LockLimitError: there is no ordinary memory for it either.
    """
    try:
        with locked_memory():
            return torch.empty(nbytes, dtype=torch.uint8)
    except LockLimitError as refused:
        try:
            return torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError:  # torch's, of what no allocator can give
            raise refused from None


class ScratchRing:
    """A few buffers of one size, used in turn: one is filled or emptied while the others are on their way."""

    def __init__(self, buffer_bytes: int, count: int = 3) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffers: list[Optional[torch.Tensor]] = [None] * count
        self._finish: list[Optional[Callable[[], object]]] = [None] * count
        self._next = 0

    def take(self) -> torch.Tensor:
        """The next buffer, free: what `on_reuse` was given for it has been called."""
        self._settle(self._next)
        buffer = self._buffers[self._next]
        if buffer is None:
            buffer = self._buffers[self._next] = locked_bytes(self._buffer_bytes)
        return buffer

    def on_reuse(self, finish: Callable[[], object]) -> None:
        """Called once, before the buffer that was taken last is taken again, or by `drain`."""
        self._finish[self._next] = finish
        self._next = (self._next + 1) % len(self._buffers)

    def drain(self) -> None:
        """Calls everything that was left to be called, oldest first."""
        for step in range(len(self._buffers)):
            self._settle((self._next + step) % len(self._buffers))

    def _settle(self, index: int) -> None:
        finish, self._finish[index] = self._finish[index], None
        if finish is not None:
            finish()
