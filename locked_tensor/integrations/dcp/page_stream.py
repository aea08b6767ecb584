"""A new file, written front to back in whole pages: small pieces by locked blocks, tensors from where they lie."""

from __future__ import annotations

import os
from typing import Optional, Union

import torch

import locked_tensor as lt

PAGE_BYTES = 4096
BLOCKS = 2  # one is filled while the others are written


class PageStream:
    """What `torch.save` can write to. Not thread-safe; end it with `finish`, or with `abandon`.

    Args:
        handle: does the writing; its other operations are left alone.
        path: is replaced.
        block_bytes: of each of the locked blocks, a multiple of the page.

    Raises:
        OSError: here, or by any later method: what the kernel said to an earlier write.
        LockLimitError: the blocks could not be locked.
    """

    def __init__(self, handle: lt.AioHandle, path: Union[str, "os.PathLike[str]"], block_bytes: int) -> None:
        self._handle = handle
        self._path = os.fspath(path)
        if os.path.lexists(self._path):
            os.unlink(self._path)
        with lt.locked_memory():
            self._blocks = [torch.empty(block_bytes, dtype=torch.uint8) for _ in range(BLOCKS)]
        self._views = [memoryview(block.numpy()) for block in self._blocks]  # type: ignore[arg-type]
        self._block_tickets: list[Optional[lt.IoTicket]] = [None] * BLOCKS
        self._tensor_tickets: list[lt.IoTicket] = []
        self._current = 0
        self._begin = 0  # of what waits in the current block
        self._end = 0
        self._position = 0  # in the file, of the block's end

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def flush(self) -> None:
        """Nothing: `finish` makes things durable. torch.save calls it."""

    def write(self, data: Union[bytes, memoryview]) -> int:
        """Appends a copy of the bytes; returns how many."""
        source = memoryview(data).cast("B")
        done = 0
        while done < len(source):
            view = self._views[self._current]
            count = min(len(source) - done, len(view) - self._end)
            view[self._end : self._end + count] = source[done : done + count]
            self._end += count
            self._position += count
            done += count
            if self._end == len(view):
                self._hand_over_block()
        return done

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Appends a tensor's elements in row-major order, without a copy where its memory is locked.

        It is read until `finish`. Any device, dtype and strides.
        """
        self._hand_over_block()
        self._tensor_tickets.append(self._handle.submit_pwrite(tensor, self._path, self._position))
        self._position += tensor.nbytes
        self._begin = self._end = self._position % PAGE_BYTES

    def align(self) -> None:
        """Leaves a gap of zeros up to the next page of the file."""
        self.write(bytes(-self._position % PAGE_BYTES))

    def finish(self, is_durable: bool) -> None:
        """Waits for everything; `is_durable`: until it is on the device (fsync)."""
        self._hand_over_block()
        for ticket in self._take_tickets():
            ticket.wait()
        if is_durable:
            self._handle.fsync(self._path)

    def abandon(self) -> None:
        """After an error: waits until no memory is read any more, whatever came of it."""
        for ticket in self._take_tickets():
            ticket.exception()

    def _take_tickets(self) -> list[lt.IoTicket]:
        tickets = [each for each in self._block_tickets if each is not None] + self._tensor_tickets
        self._block_tickets = [None] * BLOCKS
        self._tensor_tickets = []
        return tickets

    def _hand_over_block(self) -> None:
        """Writes what waits in the current block and goes on in the next, in step with the file's pages."""
        if self._end > self._begin:
            full = self._blocks[self._current][self._begin : self._end]
            begin = self._position - (self._end - self._begin)
            self._block_tickets[self._current] = self._handle.submit_pwrite(full, self._path, begin)
            self._current = (self._current + 1) % BLOCKS
            ticket, self._block_tickets[self._current] = self._block_tickets[self._current], None
            if ticket is not None:
                ticket.wait()
        self._begin = self._end = self._position % PAGE_BYTES
