"""A step by parts: read what comes next, update what is here, write what was."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional

import torch

from locked_tensor.errors import InternalError
from locked_tensor.swap.optimizer_masters import MASTER
from locked_tensor.swap.optimizer_state import Field, ParamState, Piece, State, copied, local
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
    version: Optional[int] = None  #: of the parameter when the update was begun
    is_updated: bool = False  #: whole: the parameter, and its state on disk or in memory

    def begin(self) -> None:
        """Remembers what the parameter is before its update."""
        self.version = self._version()

    @property
    def has_changed(self) -> bool:
        """Was anything written to the parameter since `begin`?"""
        return self.version is not None and (self.version < 0 or self.version != self._version())

    def _version(self) -> int:
        own = local(self.piece.owner.param)
        return -1 if own.is_inference() else own._version  # without a counter: it may have

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
    is_kept: bool = False  #: it holds the state after the update
    is_submitted: bool = False  #: all of that is being written

    def add(self, part: Part) -> None:
        part.offset = self.nbytes
        self.nbytes += part.nbytes
        self.parts.append(part)

    def finish(self) -> None:
        """Its state is where it belongs, on disk or in memory."""
        for part in self.parts:
            part.is_updated = True
        self.drop_memory()

    def drop_memory(self) -> None:
        """Whoever keeps the chunk, as an exception's traceback may, keeps no memory with it."""
        self.lease, self.memory, self.pending = None, torch.empty(0, dtype=torch.uint8), []
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


def tell_unfinished(error: BaseException, parts: list[Part]) -> None:
    """Sets `not_updated` and `half_updated` of what ended a step of these parts early."""
    owners: dict[ParamState, list[Part]] = {}
    for part in parts:
        owners.setdefault(part.piece.owner, []).append(part)
    left = {owner: own for owner, own in owners.items() if not all(part.is_updated for part in own)}
    half = [owner for owner, own in left.items() if any(part.is_updated or part.has_changed for part in own)]
    # Not by setattr, which an exception's class may refuse.
    vars(error).update(not_updated=[owner.param for owner in left], half_updated=[owner.param for owner in half])


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

        Whatever ends it early, parts that are updated are so whole, the state of those that could not be
        written in memory. What `on_progress` raises is raised when no parameter is between its pieces.

        Raises:
            OSError, ShortReadError: the disk failed.
        """
        refusal: Optional[BaseException] = None  # of on_progress
        try:
            started = 0
            for index, chunk in enumerate(chunks):
                while started < min(index + 1 + (_READ_AHEAD if self._is_overlapped else 0), len(chunks)):
                    self._start_reading(chunks[started])
                    started += 1
                for pending in chunk.pending:
                    pending.wait()
                chunk.pending = []
                self._update_and_keep(chunk)
                self._start_writing(chunk)
                if refusal is None:
                    refusal = _refusal(on_progress, index + 1)
                if refusal is not None and not _is_continued(chunks, index):
                    raise refusal
                if not self._is_overlapped:
                    self._finish_oldest()
            while self._writing:
                self._finish_oldest()
        except BaseException as error:
            if refusal is not None and error is not refusal:
                error.__context__ = refusal
            self._abandon(chunks)
            raise
        finally:
            refusal = None  # its traceback has this frame

    def _update_and_keep(self, chunk: Chunk) -> None:
        for part in chunk.parts:
            part.begin()
        began = time.perf_counter()
        self._update(chunk.parts)
        try:
            self._keep_all(chunk)
        except BaseException:  # an interrupt: what is updated is kept all the same
            self._keep_all(chunk)
            raise
        finally:
            self.update_seconds += time.perf_counter() - began

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
            others = {key: value for key, value in part.piece.resident.items() if key not in part.state}
            part.state |= copied(others | part.piece.memory)  # as they are if the update fails
        self._start(self._io.read, reads, chunk)

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
            for each, offset, nbytes in part.slots():
                chunk.memory[offset + part.piece.nbytes_of(each) : offset + nbytes].zero_()
                _append(writes, _run(part.piece, each, offset, nbytes))
        self._writing.append(chunk)
        self._start(self._io.write, writes, chunk)
        chunk.is_submitted = True

    def _start(self, move: Callable[[Extent, torch.Tensor, int], Pending], runs: list[_Run], chunk: Chunk) -> None:
        for run in runs:
            memory = chunk.memory[run.offset : run.offset + run.nbytes]
            chunk.pending.append(move(run.extent, memory, run.file_offset))

    def _keep_all(self, chunk: Chunk) -> None:
        for part in chunk.parts:
            self._keep(part, chunk.memory)
        chunk.is_kept = True
        for part in chunk.parts:
            part.state, part.gradient = {}, None

    def _keep(self, part: Part, memory: torch.Tensor) -> None:
        """Puts the state after an update where it belongs: in the buffer, or in memory."""
        piece = part.piece
        slots = {each.key: (each, offset, nbytes) for each, offset, nbytes in part.slots()}
        in_memory: State = {}
        resident: dict[str, torch.Tensor] = {}
        for key, value in part.state.items():
            if key in slots:
                each, offset, nbytes = slots[key]
                view = piece.view(each, memory[offset : offset + nbytes])
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)
            elif isinstance(value, torch.Tensor) and _is_swapped(value, piece, self._min_bytes):
                resident[key] = value
            else:
                in_memory[key] = value
        piece.memory, piece.resident = in_memory, resident
        piece.is_fresh, piece.has_master = False, MASTER in part.state

    def _finish_oldest(self) -> None:
        for pending in self._writing[0].pending:
            pending.wait()
        self._writing.popleft().finish()

    def _abandon(self, chunks: list[Chunk]) -> None:
        """Ends what is in flight, once an error is on its way, and keeps in memory what was not written."""
        self._writing.clear()
        self._io.drain()
        for chunk in chunks:
            if chunk.is_kept and not chunk.parts[0].is_updated:
                if not chunk.is_submitted or any(pending.failure() is not None for pending in chunk.pending):
                    _rescue(chunk)
                chunk.finish()
            chunk.drop_memory()


def _rescue(chunk: Chunk) -> None:
    for part in chunk.parts:
        for each, offset, nbytes in part.slots():
            view = part.piece.view(each, chunk.memory[offset : offset + nbytes])
            part.piece.resident[each.key] = view.clone()


def _refusal(on_progress: Callable[[int], None], done: int) -> Optional[BaseException]:
    """What it raises, an interrupt included; the caller raises it."""
    try:
        on_progress(done)
    except BaseException as error:
        return error
    return None


def _is_continued(chunks: list[Chunk], index: int) -> bool:
    """Is the last parameter of a chunk updated further in the next?"""
    following = chunks[index + 1 : index + 2]
    return any(chunk.parts[0].piece.owner is chunks[index].parts[-1].piece.owner for chunk in following)


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
