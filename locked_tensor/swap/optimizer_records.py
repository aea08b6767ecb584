"""The state of every parameter: laid out as its optimizer wants it, given room on disk, taken over from outside."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Type

import torch
from torch.optim import Optimizer

from locked_tensor.swap.optimizer_masters import MASTER, MASTER_DTYPE, needs_master
from locked_tensor.swap.optimizer_state import (
    Field,
    ParamState,
    Piece,
    State,
    as_laid_out,
    copied,
    in_storage_order,
    is_dense,
    lay_out,
    local,
)
from locked_tensor.swap.pool import SwapBufferPool
from locked_tensor.swap.store import SwapStore, page_aligned
from locked_tensor.swap.transfer import SwapIo

# Note [Cutting] These update each element by itself and keep state of the parameter's own shape, so a
# parameter larger than a buffer is updated in flat pieces, to the same bits. Exactly these classes: one
# derived from them may do anything, and gets whole parameters. (A gradient that is strided otherwise than
# its parameter, which autograd does not make, is copied to the same strides first; torch's arithmetic on
# half-precision tensors of unlike strides may round otherwise.)
_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.ASGD,
)
_CUT_ELEMENTS = 2048  # pieces begin at multiples, so that their bytes, two an element, begin at whole pages
SMALLEST_BUFFER = 32 * _CUT_ELEMENTS  # 32 bytes for an element: three of state and a gradient, all fp64


def is_elementwise(optimizer_class: Type[Optimizer]) -> bool:
    """May a parameter of this class's be updated in pieces?"""
    return optimizer_class in _ELEMENTWISE


class StateRecords:
    """Each parameter's record: a `ParamState` with room on disk.

    Args:
        optimizer_class: makes the state, with `options`.
        min_bytes: state tensors of smaller parameters get no room on disk.
        has_gradients: gradients of the parameters lie beside their state while it is used.
        has_masters: so do master weights of those that need them.
    """

    def __init__(
        self,
        io: SwapIo,
        store: SwapStore,
        pool: SwapBufferPool,
        optimizer_class: Type[Optimizer],
        options: dict[str, Any],
        *,
        min_bytes: int,
        has_gradients: bool,
        has_masters: bool,
    ) -> None:
        self._io = io
        self._store = store
        self._pool = pool
        self._optimizer_class = optimizer_class
        self._options = options
        self._min_bytes = min_bytes
        self._has_gradients = has_gradients
        self._has_masters = has_masters
        self._records: dict[torch.Tensor, ParamState] = {}
        self._layouts: dict[Any, dict[str, torch.dtype]] = {}

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._records

    def __getitem__(self, param: torch.Tensor) -> ParamState:
        return self._records[param]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._records)

    def keeps_master(self, param: torch.Tensor) -> bool:
        """Is there a master weight among the parameter's state?"""
        return self._has_masters and needs_master(param)

    def drop_masters(self, params: Iterable[torch.Tensor]) -> None:
        """The next step of these parameters starts from their values."""
        for param in params:
            if param in self._records and self.keeps_master(param):
                for piece in self._records[param].pieces:
                    piece.drop_master()

    def make(self, active: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Records for those of these parameters, each with its group, that have none: all of them or none.

        Raises:
            OSError: no room on disk.
        """
        made: list[torch.Tensor] = []
        try:
            for group, param in active:
                if param not in self._records:
                    self._records[param] = self._new(param, group)
                    made.append(param)
        except BaseException:
            self.forget(made)
            raise

    def adopt(self, param: torch.Tensor, state: State) -> None:
        """Takes a whole parameter's state over, to disk where it belongs there.

        Raises:
            OSError: no room on disk; the state is as before.
        """
        state = {
            key: local(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
        own = local(param)
        if MASTER in state and self.keeps_master(param):
            state[MASTER] = state[MASTER].to(MASTER_DTYPE)
        elif self._has_masters:
            state.pop(MASTER, None)
        swapped = {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.nbytes >= self._min_bytes and value.dim() > 0
        }
        if is_dense(own):
            swapped = {
                key: as_laid_out(value, own) if value.shape == own.shape else value
                for key, value in swapped.items()
            }
        room = self._empty_like(own, {MASTER: MASTER_DTYPE}) if self.keeps_master(param) else {}
        owner = self._placed(param, lay_out({**room, **swapped}))
        for piece in owner.pieces:
            piece.is_fresh = not state.keys() - {MASTER}
            piece.has_master = MASTER in state
            piece.memory = copied({key: value for key, value in state.items() if key not in swapped})
        try:
            self._write_whole(owner, swapped)
        except BaseException:
            self._release(owner)
            raise
        before = self._records.get(param)
        self._records[param] = owner
        if before is not None:  # last: whatever interrupts this, no room is used twice
            self._release(before)

    def lay_out_again(self, owner: ParamState) -> None:
        """Moves state to disk that had no room there: a layout that only the first step has shown."""
        self.adopt(owner.param, owner.whole())

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Gives up the records of these parameters and their room on disk."""
        for param in params:
            self._release(self._records.pop(param))

    def _new(self, param: torch.Tensor, group: dict[str, Any]) -> ParamState:
        """Room for a parameter that has no state yet, laid out as its optimizer is going to want it."""
        own = local(param)
        is_mastered = self.keeps_master(param)
        dtypes = {MASTER: MASTER_DTYPE} if is_mastered else {}
        if is_elementwise(self._optimizer_class):  # else laid out when its state is seen
            dtypes |= self._state_dtypes(MASTER_DTYPE if is_mastered else own.dtype, group)
        return self._placed(param, lay_out(self._empty_like(own, dtypes)))

    def _empty_like(self, own: torch.Tensor, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """State tensors of a parameter's shape as they will be, without memory; of those that go to disk."""
        like = own if is_dense(own) else torch.empty(own.shape, dtype=own.dtype, device="meta")
        return {
            key: torch.empty_like(like, dtype=dtype, device="meta")
            for key, dtype in dtypes.items()
            if own.numel() * dtype.itemsize >= self._min_bytes
        }

    def _placed(self, param: torch.Tensor, fields: tuple[Field, ...]) -> ParamState:
        """Room on disk for such fields, cut into pieces that fit a buffer where that may be."""
        own = local(param)
        owner = ParamState(param, fields)
        element_bytes = sum(each.dtype.itemsize for each in fields)
        whole_bytes = owner.nbytes
        if self._has_gradients and fields:
            element_bytes += own.dtype.itemsize
            whole_bytes += page_aligned(own.nbytes)
        count = own.numel()
        if (
            whole_bytes > self._pool.buffer_bytes
            and is_elementwise(self._optimizer_class)
            and is_dense(own)
            and all(each.shape == own.shape and each.stride == own.stride() for each in fields)
        ):
            owner.is_cut = True
            count = _piece_elements(own.numel(), self._pool.buffer_bytes // element_bytes)
        owner.pieces = [
            Piece(owner, start, min(start + count, own.numel())) for start in range(0, own.numel(), count or 1)
        ] or [Piece(owner, 0, 0)]
        if fields:
            owner.extent = self._store.allocate(owner.nbytes)
        return owner

    def _state_dtypes(self, dtype: torch.dtype, group: dict[str, Any]) -> dict[str, torch.dtype]:
        """Which state tensors of a parameter's shape these options make: tried on a tiny one."""
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        known = (dtype, repr(sorted(options.items())))
        if known not in self._layouts:
            tiny = torch.zeros(2, dtype=dtype)
            tiny.grad = torch.zeros_like(tiny)
            trial = self._optimizer_class([{**options, "params": [tiny]}], **self._options)
            step_without_hooks(trial)
            self._layouts[known] = {
                key: value.dtype
                for key, value in trial.state[tiny].items()
                if isinstance(value, torch.Tensor) and value.shape == tiny.shape
            }
        return self._layouts[known]

    def _write_whole(self, owner: ParamState, tensors: dict[str, torch.Tensor]) -> None:
        for each in owner.fields:
            if each.key not in tensors:  # a master that is yet to start
                continue
            tensor = tensors[each.key]
            flat = in_storage_order(tensor) if is_dense(tensor) else tensor.contiguous().view(-1)
            if owner.extent is not None:
                self._io.write(owner.extent, flat, each.offset).wait()

    def _release(self, owner: ParamState) -> None:
        if owner.extent is not None:
            self._store.free(owner.extent)


def _piece_elements(count: int, most: int) -> int:
    """Elements of each piece, so that pieces are of like length and none has more than `most`."""
    pieces = -(-count // (most // _CUT_ELEMENTS * _CUT_ELEMENTS))
    return -(-count // (pieces * _CUT_ELEMENTS)) * _CUT_ELEMENTS


def step_without_hooks(optimizer: Optimizer) -> None:
    """The class's own step, without the hooks that torch wraps around it: they run once, around ours."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
