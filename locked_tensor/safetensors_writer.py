"""`save`: a state dict to a safetensors file, by direct I/O, replaced in one step."""

from __future__ import annotations

import os
from typing import Any, Iterable, Iterator, Mapping, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from locked_tensor.files import Path, replacing
from locked_tensor.handle import AioHandle
from locked_tensor.safetensors_format import (
    DTYPE_NAMES,
    METADATA,
    PACKED,
    PAGE_BYTES,
    SMALL_BYTES,
    TensorEntry,
    arrange,
    encode_header,
)
from locked_tensor.scratch import AT_ONCE_BYTES, ScratchRing
from locked_tensor.tensor import LockedTensor, as_bytes, as_plain
from locked_tensor.tickets import Tickets, handle_or_own, named_errors


def save(
    state_dict: Mapping[str, torch.Tensor],
    path: Path,
    *,
    metadata: Optional[Mapping[str, str]] = None,
    aio_handle: Optional[AioHandle] = None,
) -> None:
    """Writes tensors to a file in the safetensors format; returns when it is on the device.

    Takes any strided tensor: locked (moved directly), ordinary or a GPU's (staged), of any strides.
    What shares memory is written once for each name, as the format has no other way. The file is
    replaced in one step: whoever reads the path sees what was there before or the whole new file, and
    an error leaves the path as it was. A process that is killed while it saves leaves a file
    `.locked-tensor-*.tmp` in the folder, which the next save into that folder removes. The safetensors package reads the file, and this reads its.

    Args:
        state_dict: tensors by name; a Parameter is saved as the tensor that it is.
        path: the file; an existing file's permissions are kept, a new one's are 0666 less umask.
        metadata: strings by name, kept in the header.
        aio_handle: the handle to write with; by default one of this call's own.

    Raises:
        TypeError: something is not a dense tensor, or has no bytes yet (`UninitializedParameter`); a name or
            metadata is not a string.
        ValueError: a dtype that the format does not have, a device without bytes, the name
            "__metadata__", or names and metadata of more than 100 MB.
        OSError: the kernel refused; `errno`, `filename`, and the message names the tensor.
    """
    own_path = os.fsdecode(path)
    tensors = {name: _checked(name, tensor) for name, tensor in _items(state_dict)}
    entries = arrange(tensors)
    header = encode_header(entries, _checked_metadata(metadata))
    with handle_or_own(aio_handle) as handle, named_errors(own_path), replacing(own_path) as fd:
        os.posix_fallocate(fd, 0, len(header) + sum(entry.nbytes for entry in entries))
        _write_tensors(handle, fd, own_path, header, entries, tensors)


def _items(state_dict: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must map names to tensors, got {type(state_dict).__name__}")
    return state_dict.items()


def _checked(name: Any, tensor: Any) -> torch.Tensor:
    if not isinstance(name, str):
        raise TypeError(f"a tensor's name must be a string, got {name!r}")
    if name == METADATA or not _is_text(name):
        raise ValueError(f"a tensor cannot be named {name!r} in a safetensors file")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} must be a tensor, got {type(tensor).__name__}")
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{name!r} is an {type(tensor).__name__}, which has no bytes yet")
    if isinstance(tensor, FakeTensor) or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name!r} has no bytes here: a {type(tensor).__name__} on device {tensor.device}")
    if not isinstance(tensor, LockedTensor) and is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, which wraps others; save what it wraps")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name!r} must be a strided tensor (to_dense() makes one), got layout {tensor.layout}")
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name!r} has dtype {tensor.dtype}, which the safetensors format does not have")
    if tensor.dtype in PACKED and tensor.dim() == 0:
        raise ValueError(f"{name!r} of dtype {tensor.dtype} must have a dimension: its elements hold several numbers")
    return tensor.detach()


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _checked_metadata(metadata: Optional[Mapping[str, str]]) -> Mapping[str, str]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict of str to str, got {type(metadata).__name__}")
    for pair in (metadata or {}).items():
        if not all(isinstance(each, str) for each in pair):
            raise TypeError(f"metadata must be a dict of str to str, got {pair[0]!r}: {pair[1]!r}")
        if not all(map(_is_text, pair)):
            raise ValueError(f"metadata must be Unicode text, got {pair[0]!r}: {pair[1]!r}")
    return metadata or {}


def _write_tensors(
    handle: AioHandle,
    fd: int,
    path: str,
    header: bytes,
    entries: list[TensorEntry],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    tickets = Tickets(path, "writing")
    tickets.add(handle.submit_pwrite(torch.frombuffer(bytearray(header), dtype=torch.uint8), fd), ["the header"])
    small = []
    for entry in entries:
        tensor = tensors[entry.name]
        if 0 < entry.nbytes < SMALL_BYTES and tensor.is_contiguous():
            small.append(entry)
        elif entry.nbytes > 0:
            tickets.add(handle.submit_pwrite(tensor, fd, len(header) + entry.begin), [repr(entry.name)])
    groups = list(_neighbours(small))
    ring = ScratchRing(PAGE_BYTES + max((group[-1].end - group[0].begin for group in groups), default=0))
    for group in groups:
        _write_together(handle, fd, len(header) + group[0].begin, group, tensors, ring, tickets)
    ring.drain()
    tickets.finish()


def _neighbours(entries: list[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Entries that follow each other without a gap, up to a bound."""
    group: list[TensorEntry] = []
    for entry in entries:
        if group and (entry.begin != group[-1].end or entry.end - group[0].begin > AT_ONCE_BYTES):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _write_together(
    handle: AioHandle,
    fd: int,
    file_offset: int,
    group: list[TensorEntry],
    tensors: Mapping[str, torch.Tensor],
    ring: ScratchRing,
    tickets: Tickets,
) -> None:
    skip = file_offset % PAGE_BYTES
    begin = group[0].begin
    buffer = ring.take()[skip : skip + group[-1].end - begin]
    memory = as_plain(buffer)
    for entry in group:
        memory[entry.begin - begin : entry.end - begin].copy_(as_bytes(tensors[entry.name]))
    ticket = handle.submit_pwrite(buffer, fd, file_offset)
    names = [repr(entry.name) for entry in group]
    ring.on_reuse(lambda: tickets.settle(ticket, names))
