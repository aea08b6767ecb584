"""`SwappedOptimizer`: any `torch.optim` optimizer, with its state on disk between steps."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple, Optional, Type, Union

import torch
from torch.optim import Optimizer

from locked_tensor.handle import AioHandle
from locked_tensor.swap.folder import FolderPath
from locked_tensor.swap.optimizer_gradients import SwappedGradients
from locked_tensor.swap.optimizer_state import (
    Field,
    ParamState,
    Piece,
    State,
    as_laid_out,
    in_storage_order,
    is_dense,
    lay_out,
    local,
)
from locked_tensor.swap.optimizer_step import Part, Pipeline, into_chunks
from locked_tensor.swap.pool import buffer_bytes_within
from locked_tensor.swap.store import page_aligned
from locked_tensor.swap.transfer import open_swap_with_pool

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
_REFUSED = {
    torch.optim.LBFGS: "its state is a history over all parameters at once, kept under the first of them"
}

_DEFAULT_BUDGET = 256 << 20
_BUFFERS = 8  # one is updated, three are read ahead, the rest are written
_LARGEST_BUFFER = 32 << 20
_CUT_ELEMENTS = 4096  # pieces begin at multiples, so that their bytes begin at whole pages
_SMALLEST_BUFFER = 16 * _CUT_ELEMENTS  # 16 bytes of state for an element: four of fp32


class OptimizerSwapStats(NamedTuple):
    """What a `SwappedOptimizer` has done."""

    steps: int
    bytes_read: int
    bytes_written: int
    update_seconds: float  #: in the optimizer's own arithmetic
    io_seconds: float  #: in which something was read or written
    wait_seconds: float  #: in which a step stood waiting for it
    overlap: float  #: the share of io_seconds in which the step went on


class SwappedOptimizer(Optimizer):
    """An optimizer whose state lives on disk and is brought to memory part by part at each step.

    A `torch.optim.Optimizer` to everyone: param groups, schedulers, `GradScaler`, hooks, closures,
    `state_dict` and `load_state_dict`, which are interchangeable with those of `optimizer_class`. Trains
    to the same bits as it. `state` is empty: see `get_state` and `set_state`.

    Args:
        params: as `optimizer_class` takes them. On the CPU.
        optimizer_class: every class of `torch.optim` but LBFGS, or your own whose state is tensors and
            scalars for each parameter.
        folder: where the state goes: a path, or a list of paths on several devices. Swap files are
            private, and gone after `close`, at exit, and at the next start after a crash.
        aio_handle: moves the bytes; None makes one and closes it with the optimizer.
        max_locked_bytes: locked memory at most; 256 MiB when None. A handle that is given has its own
            staging memory beside it.
        pipeline: read the next part and write the last while one is updated.
        min_bytes: state tensors of smaller parameters stay in memory.
        swap_gradients: gradients go to disk too, as backward makes them, and add up there until
            `zero_grad`: `param.grad` is None after backward. What works on `param.grad` before the step
            (clipping, `GradScaler`) then finds none.
        on_progress: called as `on_progress(done, total)` after each part of a step.
        **kwargs: `optimizer_class`'s own.

    Raises:
        ValueError: an optimizer that cannot be swapped, `differentiable=True`, a parameter that is
            not on the CPU, or too small a `max_locked_bytes`.
        OSError: the folder may not be written.
        LockLimitError: so much memory may not be locked.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Type[Optimizer],
        *,
        folder: Union[FolderPath, Iterable[FolderPath]],
        aio_handle: Optional[AioHandle] = None,
        max_locked_bytes: Optional[int] = None,
        pipeline: bool = True,
        min_bytes: int = 65536,
        swap_gradients: bool = False,
        on_progress: Optional[Callable[[int, int], None]] = None,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class, kwargs)
        budget = _DEFAULT_BUDGET if max_locked_bytes is None else max_locked_bytes
        buffer_bytes = min(buffer_bytes_within(budget, _BUFFERS, _SMALLEST_BUFFER), _LARGEST_BUFFER)
        self._optimizer_class = optimizer_class
        self._options = kwargs
        self._min_bytes = max(min_bytes, 1)
        self._on_progress = on_progress
        self._gradients: Optional[SwappedGradients] = None
        self._states: dict[torch.Tensor, ParamState] = {}
        self._steps = 0
        self._is_closed = False
        self._layouts: dict[Any, dict[str, torch.dtype]] = {}

        listed = list(params)
        probe = optimizer_class([torch.zeros(1, 1)], **kwargs)
        self._makes_state_early = len(probe.state) > 0  # for all parameters, so not before it is asked
        self._inner = probe if self._makes_state_early else optimizer_class(listed, **kwargs)
        super().__init__(listed, dict(self._inner.defaults))

        self._io, self._store, self._pool, self._close_files = open_swap_with_pool(
            self, folder, aio_handle, _BUFFERS, buffer_bytes, staging_bytes=buffer_bytes
        )
        self._pipeline = Pipeline(self._io, self._pool, self._update, self._min_bytes, pipeline)
        if swap_gradients:
            self._gradients = SwappedGradients(self._io, self._store, self._pool, self._min_bytes)
            for group in self.param_groups:
                for param in group["params"]:
                    self._gradients.watch(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters' state goes to disk too."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.device.type != "cpu":
                self.param_groups.pop()
                raise ValueError(f"SwappedOptimizer updates on the CPU; a parameter is on {param.device}")
            if local(param) is not param and self._optimizer_class not in _ELEMENTWISE:
                self.param_groups.pop()
                raise ValueError(f"{self._optimizer_class.__name__} does not take sharded parameters")
        if self._gradients is not None:
            for param in self.param_groups[-1]["params"]:
                self._gradients.watch(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients on disk are forgotten too."""
        super().zero_grad(set_to_none)
        if self._gradients is not None:
            self._gradients.clear()

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One optimization step; returns what the closure returns.

        Parameters without a gradient cause no I/O and keep their state.

        Raises:
            OSError: the disk failed; the message names the file. Room on disk for new state is taken
                before anything is updated: then nothing has changed. If reading or writing fails
                later, `not_updated` of the exception lists the parameters that this step did not
                update whole; the state of the others is complete, what could not be written of it in
                memory, and is written by the next step.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            parts = self._active_parts()
            chunks = into_chunks(parts, self._pool.buffer_bytes)
            try:
                self._pipeline.run(chunks, lambda done: self._report(done, len(chunks)))
            except (OSError, EOFError) as error:
                error.not_updated = self._not_updated(parts)  # type: ignore[union-attr]
                raise
            for owner in {id(part.piece.owner): part.piece.owner for part in parts}.values():
                if any(piece.resident for piece in owner.pieces):
                    self._lay_out_again(owner)
        self._steps += 1
        return loss

    def get_state(self, param: torch.Tensor) -> State:
        """A copy of a parameter's state, under `optimizer_class`'s names; empty before its first step."""
        self._check_open()
        if param not in self._states:
            self._group_of(param)
            return {}
        copied = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self._states[param].whole().items()
        }
        return copied

    def set_state(self, param: torch.Tensor, state: State) -> None:
        """Replaces a parameter's state, tensors of the shapes that `get_state` gives.

        Raises:
            ValueError: the parameter is not this optimizer's.
            OSError: no room on disk; the state is as before.
        """
        self._check_open()
        self._group_of(param)
        with torch.no_grad():
            self._adopt(param, state)

    def state_dict(self) -> dict[str, Any]:
        """As `optimizer_class`'s. State on disk is mapped, not read: `torch.save` streams it.

        Later steps show in the mapped tensors, as they do in torch's own; clone what must not change.
        """
        self._check_open()
        for param, owner in self._states.items():
            whole = owner.whole()
            if whole:
                self.state[param] = whole
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of `optimizer_class` gave, tensor by tensor.

        Raises:
            ValueError: it has other groups or numbers of parameters.
            OSError: no room on disk.
        """
        self._check_open()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._inner.param_groups = self.param_groups
        self._inner.load_state_dict(state_dict)
        loaded, self._inner.state = dict(self._inner.state), type(self._inner.state)(dict)
        self.param_groups = self._inner.param_groups
        self._forget([param for param in self._states if param not in loaded])
        with torch.no_grad():
            while loaded:
                param, state = loaded.popitem()
                self._adopt(param, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def stats(self) -> OptimizerSwapStats:
        """What was done so far."""
        moved = self._io.stats()
        return OptimizerSwapStats(
            self._steps,
            moved.bytes_read,
            moved.bytes_written,
            self._pipeline.update_seconds,
            moved.io_seconds,
            moved.wait_seconds,
            moved.overlap,
        )

    def close(self) -> None:
        """Removes the state from disk and unlocks all memory. Final and idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._states.clear()
        if self._gradients is not None:
            self._gradients.close()
        self._close_files()
        del self._pool, self._pipeline
        self._gradients = None

    def __enter__(self) -> SwappedOptimizer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __getstate__(self) -> Any:
        raise TypeError("a SwappedOptimizer cannot be pickled or copied: save its state_dict()")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this SwappedOptimizer is closed: its state is gone; make a new one")

    def _report(self, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, total)

    def _group_of(self, param: torch.Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(each is param for each in group["params"]):
                return group
        raise ValueError("the tensor is not a parameter of this optimizer")

    # What is stepped

    def _active_parts(self) -> list[Part]:
        """Every piece of every parameter with a gradient, with room on disk for its state."""
        active = [(group, param) for group in self.param_groups for param in group["params"]]
        active = [(group, param) for group, param in active if self._has_gradient(param)]
        is_cut_class = self._optimizer_class in _ELEMENTWISE
        for _, param in active:
            if is_cut_class and param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(f"{self._optimizer_class.__name__} does not take sparse gradients")
        made = []
        try:
            for group, param in active:
                if param not in self._states:
                    self._states[param] = self._new_state(param, group)
                    made.append(param)
        except BaseException:
            self._forget(made)
            raise
        return [
            Part(piece, group, gradient_extent=extent)
            for group, param in active
            for extent in [None if self._gradients is None else self._gradients.extent(param)]
            for piece in self._states[param].pieces
        ]

    def _has_gradient(self, param: torch.Tensor) -> bool:
        return param.grad is not None or (self._gradients is not None and self._gradients.has(param))

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> ParamState:
        """Room for a parameter that has no state yet, laid out as its optimizer is going to want it."""
        if self._optimizer_class not in _ELEMENTWISE:
            owner = ParamState(param)
            owner.pieces = [Piece(owner, 0, param.numel())]
            return owner  # laid out when its state is seen
        own = local(param)
        like = own if is_dense(own) else torch.empty(own.shape, dtype=own.dtype, device="meta")
        tensors = {
            key: torch.empty_like(like, dtype=dtype, device="meta")
            for key, dtype in self._state_dtypes(own.dtype, group).items()
            if own.numel() * dtype.itemsize >= self._min_bytes
        }
        return self._placed(param, lay_out(tensors))

    def _placed(self, param: torch.Tensor, fields: tuple[Field, ...]) -> ParamState:
        """Room on disk for such fields, cut into pieces that fit a buffer where that may be."""
        own = local(param)
        owner = ParamState(param, fields)
        element_bytes = sum(each.dtype.itemsize for each in fields)
        whole_bytes = owner.nbytes
        if self._gradients is not None and fields:
            element_bytes += own.dtype.itemsize
            whole_bytes += page_aligned(own.nbytes)
        count = own.numel()
        if (
            whole_bytes > self._pool.buffer_bytes
            and self._optimizer_class in _ELEMENTWISE
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

    # Stepping

    def _update(self, parts: list[Part]) -> None:
        """Runs the optimizer on some pieces and no others."""
        tensors = [part.piece.tensor(part.gradient) for part in parts]
        inner = self._inner
        groups: dict[int, dict[str, Any]] = {}
        for part, tensor in zip(parts, tensors):
            subset = groups.setdefault(id(part.group), {**part.group, "params": []})
            subset["params"].append(tensor)
            subset.pop("param_names", None)
            if part.piece.is_fresh and self._makes_state_early:
                maker = self._optimizer_class([{**subset, "params": [tensor]}], **self._options)
                part.state = dict(maker.state[tensor])
        inner.param_groups = list(groups.values())
        for part, tensor in zip(parts, tensors):
            if part.state:
                inner.state[tensor] = part.state
        try:
            step_without_hooks(inner)
            for part, tensor in zip(parts, tensors):
                part.state = dict(inner.state[tensor])
        finally:
            inner.state.clear()
            inner.param_groups = []
            for part, tensor in zip(parts, tensors):
                if part.gradient is not None:
                    tensor.grad = None  # it is on disk still

    def _not_updated(self, parts: list[Part]) -> list[torch.Tensor]:
        left = {id(part.piece.owner): part.piece.owner for part in parts if not part.is_updated}
        return [owner.param for owner in left.values()]

    # State given from outside

    def _adopt(self, param: torch.Tensor, state: State) -> None:
        """Takes a whole parameter's state over, to disk where it belongs there."""
        state = {
            key: local(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
        own = local(param)
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
        owner = self._placed(param, lay_out(swapped))
        for piece in owner.pieces:
            piece.is_fresh = not state
            piece.memory = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
                if key not in swapped
            }
        try:
            self._write_whole(owner, swapped)
        except BaseException:
            self._release(owner)
            raise
        if param in self._states:
            self._release(self._states[param])
        self._states[param] = owner

    def _write_whole(self, owner: ParamState, tensors: dict[str, torch.Tensor]) -> None:
        for each in owner.fields:
            tensor = tensors[each.key]
            flat = in_storage_order(tensor) if is_dense(tensor) else tensor.contiguous().view(-1)
            if owner.extent is not None:
                self._io.write(owner.extent, flat, each.offset).wait()

    def _lay_out_again(self, owner: ParamState) -> None:
        """Moves state to disk that had no room there: a layout that only the first step has shown."""
        self._adopt(owner.param, owner.whole())

    def _release(self, owner: ParamState) -> None:
        if owner.extent is not None:
            self._store.free(owner.extent)

    def _forget(self, params: list[torch.Tensor]) -> None:
        for param in params:
            self._release(self._states.pop(param))


def _check_class(optimizer_class: Type[Optimizer], options: dict[str, Any]) -> None:
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(f"{optimizer_class.__name__} cannot be swapped: {reason}")
    if not issubclass(optimizer_class, Optimizer) or issubclass(optimizer_class, SwappedOptimizer):
        raise ValueError(f"optimizer_class must be a torch.optim.Optimizer, got {optimizer_class!r}")
    if options.get("differentiable"):
        raise ValueError("differentiable=True needs the state in memory: it cannot be swapped")


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
