"""A step by parts: read what comes next, update what is here, write what was."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional

import torch

from locked_tensor.errors import InternalError
from locked_tensor.swap.optimizer_masters import MASTER
from locked_tensor.swap.optimizer_state import Field, Piece, State
from locked_tensor.swap.pool import Lease, SwapBufferPool
from locked_tensor.swap.store import Extent, page_aligned
from locked_tensor.swap.transfer import Pending, SwapIo
from locked_tensor.tensor import as_plain

_READ_AHEAD = 3  # chunks: their lengths and the disk's pace vary


@dataclass(eq=False)
class Part:
    """A piece in a chunk: its group, and its state while it is in memory."""

    piece: Piece
    group: dict[str, Any]
    offset: int = 0  #: in the chunk's buffer
    gradient_extent: Optional[Extent] = None  #: of the whole parameter, where its gradient is on disk
    state: State = field(default_factory=dict)
    gradient: Optional[torch.Tensor] = None  #: flat, of the piece, once it is read
    is_updated: bool = False

    @property
    def nbytes(self) -> int:
        fields = sum(page_aligned(self.piece.nbytes_of(each)) for each in self.piece.owner.fields)
        return fields + (page_aligned(self.gradient_bytes) if self.gradient_extent is not None else 0)

    @property
    def gradient_bytes(self) -> int:
        return (self.piece.stop - self.piece.start) * self.piece.owner.param.dtype.itemsize

    def slots(self) -> Iterator[tuple[Field, int, int]]:
        """Each field with where it lies in the chunk's buffer, and its whole pages in bytes."""
        offset = self.offset
        for each in self.piece.owner.fields:
            nbytes = page_aligned(self.piece.nbytes_of(each))
            yield each, offset, nbytes
            offset += nbytes


@dataclass(eq=False)
class Chunk:
    """Parts that are read, updated and written together."""

    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0
    lease: Optional[Lease] = None
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    pending: list[Pending] = field(default_factory=list)

    def add(self, part: Part) -> None:
        part.offset = self.nbytes
        self.nbytes += part.nbytes
        self.parts.append(part)

    def drop_memory(self) -> None:
        """Whoever keeps the chunk, as an exception's traceback may, keeps no memory with it."""
        self.lease, self.memory = None, torch.empty(0, dtype=torch.uint8)
        for part in self.parts:
            part.state, part.gradient = {}, None


#: Updates the parameters of parts, given and leaving their state in the parts.
Update = Callable[[list[Part]], None]


def into_chunks(parts: list[Part], chunk_bytes: int) -> list[Chunk]:
    """Parts in order, packed into chunks of at most `chunk_bytes`; a larger one is a chunk by itself."""
    chunks = [Chunk()]
    for part in parts:
        if chunks[-1].parts and chunks[-1].nbytes + part.nbytes > chunk_bytes:
            chunks.append(Chunk())
        chunks[-1].add(part)
    return chunks if chunks[0].parts else []


class Pipeline:
    """Runs chunks through an update: while one is updated, the next is read and the last is written."""

    def __init__(
        self, io: SwapIo, pool: SwapBufferPool, update: Update, min_bytes: int, is_overlapped: bool
    ) -> None:
        self._io = io
        self._pool = pool
        self._update = update
        self._min_bytes = min_bytes
        self._is_overlapped = is_overlapped
        self._writing: deque[Chunk] = deque()
        self.update_seconds = 0.0

    def run(self, chunks: list[Chunk], on_progress: Callable[[int], None]) -> None:
        """Updates every chunk. However it ends, nothing is in flight afterwards.

        Raises:
            OSError, ShortReadError: the disk failed. The state of chunks that were updated and could
                not be written stays in memory; chunks after them are as they were.
        """
        ahead = _READ_AHEAD if self._is_overlapped else 0
        started = 0
        try:
            for index, chunk in enumerate(chunks):
                while started < min(index + 1 + ahead, len(chunks)):
                    self._start_reading(chunks[started])
                    started += 1
                for pending in chunk.pending:
                    pending.wait()
                chunk.pending = []
                began = time.perf_counter()
                self._update(chunk.parts)
                for part in chunk.parts:
                    part.is_updated = True
                self.update_seconds += time.perf_counter() - began
                self._start_writing(chunk)
                on_progress(index + 1)
                if not self._is_overlapped:
                    self._finish_oldest()
            while self._writing:
                self._finish_oldest()
        finally:
            self._abandon(chunks[:started])

    def _start_reading(self, chunk: Chunk) -> None:
        chunk.memory = self._memory_for(chunk)
        reads: list[_Run] = []
        for part in chunk.parts:
            for each, offset, nbytes in part.slots():
                view = part.piece.view(each, chunk.memory[offset : offset + nbytes])
                if not part.piece.holds(each.key):
                    continue
                if each.key in part.piece.resident:
                    view.copy_(part.piece.resident[each.key])
                else:
                    _append(reads, _run(part.piece, each, offset, nbytes))
                part.state[each.key] = view
            if part.gradient_extent is not None:
                reads.append(self._gradient_run(part, chunk.memory))
            part.state |= {
                key: value for key, value in part.piece.resident.items() if key not in part.state
            }
            part.state |= part.piece.memory
        chunk.pending = [
            self._io.read(run.extent, chunk.memory[run.offset : run.offset + run.nbytes], run.file_offset)
            for run in reads
        ]

    def _gradient_run(self, part: Part, memory: torch.Tensor) -> _Run:
        if part.gradient_extent is None:
            raise InternalError("a part without a gradient on disk")
        piece, nbytes = part.piece, page_aligned(part.gradient_bytes)
        offset = part.offset + part.nbytes - nbytes
        part.gradient = memory[offset : offset + part.gradient_bytes].view(piece.owner.param.dtype)
        start = piece.start * piece.owner.param.dtype.itemsize
        return _Run(part.gradient_extent, start, offset, nbytes)

    def _memory_for(self, chunk: Chunk) -> torch.Tensor:
        if chunk.nbytes > self._pool.buffer_bytes:  # one part that cannot be cut: staged by the handle
            return torch.empty(chunk.nbytes, dtype=torch.uint8)
        while self._writing and self._pool.available_bytes() < page_aligned(chunk.nbytes):
            self._finish_oldest()
        chunk.lease = self._pool.lease(chunk.nbytes, zero=False)
        return as_plain(chunk.lease.tensor)

    def _start_writing(self, chunk: Chunk) -> None:
        writes: list[_Run] = []
        for part in chunk.parts:
            self._keep(part, chunk.memory)
            for each, offset, nbytes in part.slots():
                chunk.memory[offset + part.piece.nbytes_of(each) : offset + nbytes].zero_()
                _append(writes, _run(part.piece, each, offset, nbytes))
        self._writing.append(chunk)
        chunk.pending = [
            self._io.write(run.extent, chunk.memory[run.offset : run.offset + run.nbytes], run.file_offset)
            for run in writes
        ]

    def _keep(self, part: Part, memory: torch.Tensor) -> None:
        """Puts the state after an update where it belongs: in the buffer, or in memory."""
        piece = part.piece
        slots = {each.key: (each, offset, nbytes) for each, offset, nbytes in part.slots()}
        piece.memory, piece.resident, piece.is_fresh = {}, {}, False
        piece.has_master = MASTER in part.state
        for key, value in part.state.items():
            if key in slots:
                each, offset, nbytes = slots[key]
                view = piece.view(each, memory[offset : offset + nbytes])
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)
            elif isinstance(value, torch.Tensor) and _is_swapped(value, piece, self._min_bytes):
                piece.resident[key] = value
            else:
                piece.memory[key] = value
        part.state, part.gradient = {}, None

    def _finish_oldest(self) -> None:
        chunk = self._writing.popleft()
        try:
            for pending in chunk.pending:
                pending.wait()
        except BaseException:
            self._rescue(chunk)
            raise
        chunk.pending = []
        chunk.drop_memory()

    def _rescue(self, chunk: Chunk) -> None:
        """Keeps in memory what could not be written."""
        for pending in chunk.pending:
            pending.drain()
        for part in chunk.parts:
            for each, offset, nbytes in part.slots():
                view = part.piece.view(each, chunk.memory[offset : offset + nbytes])
                part.piece.resident[each.key] = view.clone()
        chunk.pending = []

    def _abandon(self, chunks: list[Chunk]) -> None:
        """Ends what is in flight, once an error is on its way; after a whole run nothing is."""
        while self._writing:
            chunk = self._writing.popleft()
            for pending in chunk.pending:
                pending.drain()
            if any(pending.failure() is not None for pending in chunk.pending):
                self._rescue(chunk)
            chunk.pending = []
        for chunk in chunks:
            for pending in chunk.pending:
                pending.drain()
            chunk.pending = []
            chunk.drop_memory()


@dataclass
class _Run:
    """Bytes that lie together in a swap file and in a chunk's buffer."""

    extent: Extent
    file_offset: int  #: from the extent's start
    offset: int  #: in the buffer
    nbytes: int


def _run(piece: Piece, each: Field, offset: int, nbytes: int) -> _Run:
    if piece.owner.extent is None:
        raise InternalError(f"the state {each.key} has no extent")
    return _Run(piece.owner.extent, piece.offset_of(each), offset, nbytes)


def _append(runs: list[_Run], run: _Run) -> None:
    if runs:
        last = runs[-1]
        is_next_in_file = last.extent.file is run.extent.file and (
            last.extent.offset + last.file_offset + last.nbytes == run.extent.offset + run.file_offset
        )
        if is_next_in_file and last.offset + last.nbytes == run.offset:
            last.nbytes += run.nbytes
            return
    runs.append(run)


def _is_swapped(tensor: torch.Tensor, piece: Piece, min_bytes: int) -> bool:
    if piece.owner.is_cut:
        return tensor.shape == (piece.stop - piece.start,)
    return tensor.nbytes >= min_bytes and tensor.dim() > 0
