"""How a module's parameters and buffers are grouped: what is brought to memory together."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Iterator, NamedTuple, Optional

import torch
from torch import nn

from locked_tensor.errors import InternalError
from locked_tensor.swap.optimizer_state import is_dense
from locked_tensor.swap.store import Extent, page_aligned
from locked_tensor.swap.transfer import Pending
from locked_tensor.tensor import as_plain

_ENTRY_ALIGNMENT = 64  # bytes: what torch's own allocator gives


class Entry(NamedTuple):
    """A parameter or buffer, and where it lies in its unit."""

    name: str
    tensor: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  #: bytes

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.tensor.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The entry in its unit's bytes."""
        flat = memory[self.offset : self.offset + self.nbytes].view(self.tensor.dtype)
        return flat.as_strided(self.shape, self.stride)


class Use:
    """Somebody's use of units: they stay in memory until it ends, or until nobody has this object.

    Whoever is interrupted before the end lets go of it all the same.
    """

    def __init__(self, will_end: bool = True) -> None:
        self.thread = threading.get_ident()
        self.will_end = will_end  #: by itself, so that other threads may wait for it


@dataclass(eq=False)
class Unit:
    """Parameters and buffers that are read and dropped together: a module's own, or a whole subtree's."""

    index: int
    name: str
    entries: list[Entry]
    nbytes: int  #: whole pages
    extent: Optional[Extent] = None  #: once it has left ordinary memory
    memory: Optional[torch.Tensor] = None  #: leased: present, being read, or written before it goes
    is_filled: bool = False  #: does the memory hold the entries' values?
    is_present: bool = False  #: are the entries in it?
    reading: Optional[Pending] = None
    writing: Optional[Pending] = None
    uses: weakref.WeakSet[Use] = field(default_factory=weakref.WeakSet)  #: that are going on
    versions: list[int] = field(default_factory=list)  #: of the entries, when they were last as on disk

    def bytes(self) -> torch.Tensor:
        """Its memory."""
        if self.memory is None:
            raise InternalError(f"{self.name} is not in memory")
        return self.memory

    def drop_memory(self) -> None:
        self.is_filled = False
        self.memory = self.reading = None

    def note_versions(self) -> None:
        """The entries are as on disk now."""
        self.versions = [entry.tensor._version for entry in self.entries]

    def is_changed(self) -> bool:
        """Has an entry been written to since?"""
        return self.versions != [entry.tensor._version for entry in self.entries]

    def holds(self, address: int) -> bool:
        """Is it the address of an entry's byte?"""
        memory = self.memory  # another thread may drop it
        if memory is None or not self.is_present:
            return False
        return memory.data_ptr() <= address < memory.data_ptr() + self.nbytes

    def entry_at(self, offset: int) -> Entry:
        """The entry that has the byte at `offset`."""
        return max((entry for entry in self.entries if entry.offset <= offset), key=lambda entry: entry.offset)


class Partition(NamedTuple):
    """The units of a module, and which of them each module needs while it runs."""

    units: list[Unit]
    needs: dict[nn.Module, list[Unit]]
    unit_of: dict[torch.Tensor, Unit]


def partition(root: nn.Module, most_bytes: int) -> Partition:
    """The largest subtrees of at most `most_bytes`; a larger module's own tensors are a unit by themselves."""
    parts = Partition([], {}, {})
    _divide(root, "", most_bytes, parts)
    for module, needed in parts.needs.items():  # tied to another unit's
        tensors = module.modules() if _is_whole(module, parts) else [module]
        for each in tensors:
            for _, tensor in _own_tensors(each, ""):
                if tensor in parts.unit_of and parts.unit_of[tensor] not in needed:
                    needed.append(parts.unit_of[tensor])
    return parts


def _divide(module: nn.Module, name: str, most_bytes: int, parts: Partition) -> None:
    whole = [found for path, each in module.named_modules(prefix=name) for found in _own_tensors(each, path)]
    if _packed_bytes(whole, parts) <= most_bytes or not any(True for _ in module.children()):
        _add(module, name, whole, parts)
        return
    _add(module, name, list(_own_tensors(module, name)), parts)
    for child_name, child in module.named_children():
        _divide(child, f"{name}.{child_name}" if name else child_name, most_bytes, parts)


def _is_whole(module: nn.Module, parts: Partition) -> bool:
    return not any(child in parts.needs for child in module.children())


def _own_tensors(module: nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for owned in (module._parameters, module._buffers):
        for name, tensor in owned.items():
            if tensor is not None and tensor.numel() > 0:
                yield (f"{path}.{name}" if path else name), tensor


def _packed_bytes(tensors: list[tuple[str, torch.Tensor]], parts: Partition) -> int:
    once = {tensor: tensor.nbytes for _, tensor in tensors if tensor not in parts.unit_of}
    return page_aligned(sum(_aligned(nbytes) for nbytes in once.values()))


def _add(module: nn.Module, name: str, tensors: list[tuple[str, torch.Tensor]], parts: Partition) -> None:
    entries: list[Entry] = []
    offset = 0
    unit = Unit(len(parts.units), name or type(module).__name__, entries, 0)
    for path, tensor in tensors:
        if tensor in parts.unit_of:
            continue
        stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        entries.append(Entry(path, tensor, tensor.shape, tuple(stride), offset))
        offset += _aligned(tensor.nbytes)
        parts.unit_of[tensor] = unit
    needed = parts.needs.setdefault(module, [])
    if entries:
        unit.nbytes = page_aligned(offset)
        parts.units.append(unit)
        needed.append(unit)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT


def fill(unit: Unit, memory: torch.Tensor) -> None:
    """Copies the entries' present values to where they lie in the unit, zeros between."""
    memory.zero_()
    for entry in unit.entries:
        entry.view(memory).copy_(as_plain(entry.tensor.detach()))


def placeholder(entry: Entry) -> torch.Tensor:
    """Of the entry's shape and dtype, without its bytes; NaN where that exists, and nothing can write to it."""
    value = float("nan") if entry.tensor.dtype.is_floating_point or entry.tensor.dtype.is_complex else 0
    return torch.full((), value, dtype=entry.tensor.dtype).expand(entry.shape)
