"""One parameter's optimizer state: how it is cut into pieces, laid out on disk, and put together again."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch

from locked_tensor.errors import InternalError
from locked_tensor.swap.optimizer_masters import MASTER
from locked_tensor.swap.store import Extent, page_aligned

State = dict[str, Any]


def copied(state: State) -> State:
    """The state with tensors of its own."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


class Field(NamedTuple):
    """A state tensor as it lies in its parameter's extent."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  #: of the tensor in memory, which is dense: its storage order is on disk
    offset: int  #: bytes, whole pages

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(eq=False)
class Piece:
    """A part of a parameter that is updated by itself: elements [start, stop) in storage order.

    The only piece of a parameter that is not cut is the parameter as it is.
    """

    owner: ParamState
    start: int
    stop: int
    memory: State = field(default_factory=dict)  #: what stays in memory: scalars, small tensors
    resident: dict[str, torch.Tensor] = field(default_factory=dict)  #: whole state that is not on disk
    is_fresh: bool = True  #: no step yet: the optimizer makes its state
    has_master: bool = False  #: else the next step starts one from the parameter

    def holds(self, key: str) -> bool:
        """Was the piece's part of this field ever given a value?"""
        return self.has_master if key == MASTER else not self.is_fresh

    def drop_master(self) -> None:
        """The next step starts from the parameter again."""
        self.has_master = False
        self.memory.pop(MASTER, None)
        self.resident.pop(MASTER, None)

    def nbytes_of(self, each: Field) -> int:
        return (self.stop - self.start) * each.dtype.itemsize if self.owner.is_cut else each.nbytes

    def offset_of(self, each: Field) -> int:
        """Where the piece's part of a field begins, in bytes from the extent's start: whole pages."""
        return each.offset + (self.start * each.dtype.itemsize if self.owner.is_cut else 0)

    def view(self, each: Field, memory: torch.Tensor) -> torch.Tensor:
        """The bytes of the piece's part of a field, as the optimizer wants them."""
        flat = memory[: self.nbytes_of(each)].view(each.dtype)
        return flat if self.owner.is_cut else flat.as_strided(each.shape, each.stride)

    def tensor(self, from_disk: Optional[torch.Tensor] = None) -> torch.Tensor:
        """What the optimizer updates: the parameter, or a flat view of the piece, with its gradient.

        A gradient that was on disk is given flat, in storage order.
        """
        param = self.owner.param
        if not self.owner.is_cut and local(param) is param:
            if from_disk is not None:
                param.grad = from_disk.as_strided(param.shape, param.stride())
            return param
        own = local(param.detach())
        if self.owner.is_cut:
            flat = in_storage_order(own)[self.start : self.stop]
            flat.grad = from_disk if from_disk is not None else self._part_of(param.grad)
            return flat
        if from_disk is not None:
            own.grad = from_disk.as_strided(own.shape, own.stride())
        elif param.grad is not None:
            own.grad = local(param.grad.detach())
        return own

    def _part_of(self, gradient: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if gradient is None:
            return None
        laid_out = as_laid_out(local(gradient.detach()), local(self.owner.param))
        return in_storage_order(laid_out)[self.start : self.stop]


@dataclass(eq=False)
class ParamState:
    """Where the state of one parameter is."""

    param: torch.Tensor
    fields: tuple[Field, ...] = ()
    extent: Optional[Extent] = None
    is_cut: bool = False
    pieces: list[Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that the fields take on disk."""
        return sum(page_aligned(each.nbytes) for each in self.fields)

    def whole(self) -> State:
        """The state as the optimizer knows it, under its parameter; tensors on disk are mapped."""
        first = self.pieces[0]
        state = dict(first.memory)
        for each in self.fields:
            if first.holds(each.key):
                state[each.key] = self._on_disk(each)
        for key in first.resident.keys() - state.keys():
            state[key] = self._in_memory(key)
        return {key: as_global(value, self.param) for key, value in state.items()}

    def _on_disk(self, each: Field) -> torch.Tensor:
        if not self.is_cut and each.key in self.pieces[0].resident:
            return self.pieces[0].resident[each.key]
        if self.extent is None:
            raise InternalError(f"the state {each.key} has no extent")
        flat = self.extent.map(each.offset, each.dtype, (torch.Size(each.shape).numel(),))
        for piece in self.pieces:
            if each.key in piece.resident:  # the map is private: this changes no file
                flat[piece.start : piece.stop] = piece.resident[each.key]
            elif each.key == MASTER and not piece.has_master:  # a step ended between the pieces
                flat[piece.start : piece.stop] = in_storage_order(local(self.param))[piece.start : piece.stop]
        return flat.as_strided(each.shape, each.stride)

    def _in_memory(self, key: str) -> torch.Tensor:
        if not self.is_cut:
            return self.pieces[0].resident[key]
        own = local(self.param)
        return torch.cat([piece.resident[key] for piece in self.pieces]).as_strided(own.shape, own.stride())


def lay_out(tensors: dict[str, torch.Tensor]) -> tuple[Field, ...]:
    """Fields for these state tensors, one after the other."""
    fields: list[Field] = []
    offset = 0
    for key, tensor in tensors.items():
        like = tensor if is_dense(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        fields.append(Field(key, tensor.dtype, tuple(tensor.shape), tuple(like.stride()), offset))
        offset += page_aligned(fields[-1].nbytes)
    return tuple(fields)


def is_dense(tensor: torch.Tensor) -> bool:
    """Do its elements fill its part of the storage, each once?"""
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def as_laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of `like`; itself if it has them."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    distributed = sys.modules.get("torch.distributed.tensor")  # where it was never imported, none exists
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        return tensor.to_local()
    return tensor


def as_global(value: Any, param: torch.Tensor) -> Any:
    """A state tensor of this rank's part as state of the sharded parameter."""
    own = local(param)
    if own is param or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import DTensor

    if not isinstance(param, DTensor):
        raise InternalError(f"a {type(param).__name__} has a part of its own and is not sharded")
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
