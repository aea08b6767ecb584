"""`load`: tensors of a safetensors file, or parts of them, by direct I/O into locked memory."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from typing import Any, Callable, ContextManager, Iterable, Iterator, Mapping, NamedTuple, Optional, Union

import torch

from locked_tensor.boxes import NEAR_BYTES, Box, Piece, pieces, select
from locked_tensor.contexts import locked_memory
from locked_tensor.files import Path, open_direct
from locked_tensor.handle import AioHandle
from locked_tensor.safetensors_format import (
    LENGTH_BYTES,
    PAGE_BYTES,
    SMALL_BYTES,
    Header,
    TensorEntry,
    header_length,
    parse_header,
)
from locked_tensor.scratch import AT_ONCE_BYTES, ScratchRing
from locked_tensor.tensor import as_plain, tag
from locked_tensor.tickets import Tickets, handle_or_own, named_errors

_Memory = Callable[[], ContextManager[None]]
Names = Union[Iterable[str], Mapping[str, Any]]

_FIRST_READ_BYTES = 64 << 10  # holds most headers
# Dtypes that every operator copies, by element size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load(
    path: Path,
    names: Optional[Names] = None,
    *,
    aio_handle: Optional[AioHandle] = None,
    huge_pages: str = "auto",
    numa_node: Optional[int] = None,
    on_limit: str = "raise",
) -> dict[str, torch.Tensor]:
    """Reads tensors of a safetensors file into locked memory, and nothing else of the file but its header.

    Each tensor has locked memory of its own, which goes with its last view; an empty one is plain.

    Args:
        path: the file, by `save` or by anything else that writes the format.
        names: the tensors to read; None reads all. A mapping also says what to read of each: an
            integer, a slice of step 1, a tuple of such, or None for everything:
            `load(path, {"embed.weight": slice(0, 1000), "head.weight": None})`.
        aio_handle: the handle to read with; by default one of this call's own.
        huge_pages, numa_node, on_limit: as of `locked_memory`. In a virtual machine that gives free
            memory back to its host, `huge_pages="off"` may load faster the first time.

    Returns:
        The tensors by name, in the order of `names` or else of the file.

    Raises:
        ValueError: the file is not valid, and the message says where; or a slice has a step.
        KeyError: the file has no tensor of that name.
        IndexError, TypeError: an index does not fit its tensor's shape, or is no such index.
        LockLimitError: the memory could not be locked.
        OSError: the kernel refused; `errno`, `filename`, and the message names the tensor.
        ShortReadError: the file became shorter meanwhile.
    """
    with open_safetensors(path, aio_handle=aio_handle) as file:
        return file.read(names, huge_pages=huge_pages, numa_node=numa_node, on_limit=on_limit)


def open_safetensors(path: Path, *, aio_handle: Optional[AioHandle] = None) -> SafetensorsFile:
    """Opens a safetensors file and reads its header. Close it, or use it as a context manager.

    Raises:
        ValueError: the file is not valid.
        OSError: the kernel refused.
    """
    return SafetensorsFile(path, aio_handle=aio_handle)


class SafetensorsFile:
    """An open safetensors file: what it holds, and any part of it. Made by `open_safetensors`.

    It stays the file that was opened, also when `save` replaces the path meanwhile.
    """

    def __init__(self, path: Path, *, aio_handle: Optional[AioHandle] = None) -> None:
        self.path = os.fsdecode(path)
        with contextlib.ExitStack() as stack:
            self._fd = open_direct(self.path, os.O_RDONLY)
            stack.callback(os.close, self._fd)
            self._handle = stack.enter_context(handle_or_own(aio_handle))
            self._header = self._read_header()
            self._release = weakref.finalize(self, stack.pop_all().close)

    @property
    def metadata(self) -> dict[str, str]:
        """The strings that were saved beside the tensors."""
        return dict(self._header.metadata)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Name, dtype, shape and place of each tensor, by name, in the order of the file."""
        return dict(self._header.entries)

    def keys(self) -> list[str]:
        """The tensors' names, in the order of the file."""
        return list(self._header.entries)

    def read(
        self,
        names: Optional[Names] = None,
        *,
        huge_pages: str = "auto",
        numa_node: Optional[int] = None,
        on_limit: str = "raise",
    ) -> dict[str, torch.Tensor]:
        """Reads tensors, or parts of them; see `load`."""
        if not self._release.alive:
            raise ValueError(f"{self!r} is closed")
        boxes = {name: self._select(name, index) for name, index in _wanted(names, self.keys())}
        with named_errors(self.path):
            return self._read_boxes(
                boxes, lambda: locked_memory(huge_pages=huge_pages, numa_node=numa_node, on_limit=on_limit)
            )

    def close(self) -> None:
        """Idempotent."""
        self._release()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SafetensorsFile {self.path!r}, {len(self._header.entries)} tensors>"

    def _read_header(self) -> Header:
        with named_errors(self.path):
            file_bytes = os.fstat(self._fd).st_size
            first = self._read_bytes(0, min(file_bytes, _FIRST_READ_BYTES))
            end = LENGTH_BYTES + header_length(first, file_bytes, self.path)
            if end > len(first):
                first += self._read_bytes(len(first), end - len(first))
            return parse_header(first[LENGTH_BYTES:end], file_bytes, self.path)

    def _read_bytes(self, offset: int, nbytes: int) -> bytes:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._handle.sync_pread(buffer, self._fd, offset)
        return buffer.numpy().tobytes()

    def _select(self, name: str, index: Any) -> Box:
        entry = self._header.entries.get(name)
        if entry is None:
            raise KeyError(f"{self.path} has no tensor named {name!r}")
        try:
            return select(entry.shape, index)
        except (TypeError, ValueError, IndexError) as error:
            raise type(error)(f"tensor {name!r}: {error}") from None

    def _read_boxes(self, boxes: dict[str, Box], memory: _Memory) -> dict[str, torch.Tensor]:
        entries = sorted((self._header.entries[name] for name in boxes), key=lambda entry: entry.begin)
        results: dict[str, torch.Tensor] = {}
        tickets = Tickets(self.path, "reading")
        span = entries[-1].end - entries[0].begin if entries else 0
        ring = ScratchRing(PAGE_BYTES + min(span, AT_ONCE_BYTES))
        for group in _grouped(self._allocated(entries, boxes, results, memory)):
            if group.goes_direct:
                piece, name = group.wanted[0]
                tickets.add(self._handle.submit_pread(piece.target, self._fd, piece.file_offset), [repr(name)])
            else:
                _read_together(self._handle, self._fd, group, ring, tickets)
        ring.drain()
        tickets.finish()
        return {name: results[name] for name in boxes}

    def _allocated(
        self, entries: list[TensorEntry], boxes: dict[str, Box], results: dict[str, torch.Tensor], memory: _Memory
    ) -> Iterator[_Wanted]:
        """What to read, in the order of the file; each tensor's memory is taken when its turn comes.

        Taking locked memory is work, so it goes on while what was yielded before is being read.
        """
        for batch in _batches(entries):
            with memory():
                for entry in batch:
                    begin = self._header.data_offset + entry.begin
                    results[entry.name] = _new_tensor(entry.dtype, boxes[entry.name], begin)
            for entry in batch:
                box = boxes[entry.name]
                target = as_plain(results[entry.name]).view(box.sizes)
                for piece in pieces(box, target, self._header.data_offset + entry.begin):
                    yield _Wanted(piece, entry.name)


class _Wanted(NamedTuple):
    piece: Piece
    name: str


class _Group(NamedTuple):
    """Pieces that are read in one stretch, in the order of the file."""

    wanted: list[_Wanted]

    @property
    def begin(self) -> int:
        return self.wanted[0].piece.file_offset

    @property
    def nbytes(self) -> int:
        last = self.wanted[-1].piece
        return last.file_offset + last.nbytes - self.begin

    @property
    def goes_direct(self) -> bool:
        return len(self.wanted) == 1 and self.wanted[0].piece.is_contiguous

    def takes(self, piece: Piece) -> bool:
        gap = piece.file_offset - self.begin - self.nbytes
        return gap <= NEAR_BYTES and self.nbytes + gap + piece.nbytes <= AT_ONCE_BYTES


def _grouped(wanted: Iterable[_Wanted]) -> Iterator[_Group]:
    """Large stretches alone, the others with their neighbours."""
    group: Optional[_Group] = None
    for each in wanted:
        is_alone = each.piece.is_contiguous and each.piece.nbytes >= SMALL_BYTES
        if group is not None and not is_alone and group.takes(each.piece):
            group.wanted.append(each)
            continue
        if group is not None:
            yield group
        group = _Group([each])
        if is_alone:
            yield group
            group = None
    if group is not None:
        yield group


def _batches(entries: list[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Tensors whose memory is taken at once: entering `locked_memory` costs as much as a small tensor."""
    batch: list[TensorEntry] = []
    nbytes = 0
    for entry in entries:
        batch.append(entry)
        nbytes += entry.nbytes
        if nbytes >= AT_ONCE_BYTES:
            yield batch
            batch, nbytes = [], 0
    yield batch


def _wanted(names: Optional[Names], every: list[str]) -> list[tuple[str, Any]]:
    if isinstance(names, (str, bytes)):
        raise TypeError(f"names is a list of names, or a mapping from names, got {names!r}; say [{names!r}]")
    if isinstance(names, Mapping):
        return list(names.items())
    return [(name, None) for name in (every if names is None else names)]


def _new_tensor(dtype: torch.dtype, box: Box, file_offset: int) -> torch.Tensor:
    """Memory for a box; what is read in one stretch begins as far into a page as in the file, to go direct."""
    begin = file_offset + box.offset * dtype.itemsize
    result = torch.empty(0, dtype=dtype)
    nbytes = math.prod(box.shape) * dtype.itemsize
    is_shifted = nbytes >= SMALL_BYTES and box.is_contiguous and begin % dtype.itemsize == 0
    if not is_shifted or begin % PAGE_BYTES == 0:
        return torch.empty(box.shape, dtype=dtype)
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    skip = (begin - memory.data_ptr()) % PAGE_BYTES
    return tag(result.set_(memory.untyped_storage(), skip // dtype.itemsize, box.shape))  # type: ignore[call-overload]


def _read_together(handle: AioHandle, fd: int, group: _Group, ring: ScratchRing, tickets: Tickets) -> None:
    skip = group.begin % PAGE_BYTES
    buffer = ring.take()[skip : skip + group.nbytes]
    ticket = handle.submit_pread(buffer, fd, group.begin)

    def finish() -> None:
        if tickets.settle(ticket, [repr(name) for _, name in group.wanted]):
            memory = as_plain(buffer)
            for piece, _ in group.wanted:
                begin = piece.file_offset - group.begin
                _pick(memory[begin : begin + piece.nbytes], piece)

    ring.on_reuse(finish)


def _pick(memory: torch.Tensor, piece: Piece) -> None:
    """Copies a piece's elements out of the bytes that it spans."""
    bits = _BITS[piece.target.element_size()]
    if memory.storage_offset() % bits.itemsize != 0:
        memory = memory.clone()
    place = memory.storage_offset() // bits.itemsize
    source = torch.as_strided(memory.view(bits), piece.target.shape, piece.strides, place)
    piece.target.view(bits).copy_(source)
