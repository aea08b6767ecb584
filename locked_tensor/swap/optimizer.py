"""`SwappedOptimizer`: any `torch.optim` optimizer, with its state on disk between steps."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple, Optional, Type, Union

import torch
from torch.optim import Optimizer

from locked_tensor.handle import AioHandle
from locked_tensor.movable import check_movable
from locked_tensor.swap.folder import FolderPath
from locked_tensor.swap.optimizer_gradients import SwappedGradients
from locked_tensor.swap.optimizer_masters import MASTER, MASTER_DTYPE, check_master, stand_in, with_gradient
from locked_tensor.swap.optimizer_records import SMALLEST_BUFFER, StateRecords, is_elementwise, step_without_hooks
from locked_tensor.swap.optimizer_scaling import scaling_of
from locked_tensor.swap.optimizer_state import State, copied, local
from locked_tensor.swap.optimizer_step import Part, Pipeline, into_chunks, tell_unfinished
from locked_tensor.swap.pool import buffer_bytes_within
from locked_tensor.swap.transfer import open_swap_with_pool

_REFUSED = {
    torch.optim.LBFGS: "its state is a history over all parameters at once, kept under the first of them"
}

_DEFAULT_BUDGET = 256 << 20
_BUFFERS = 8  # one is updated, three are read ahead, the rest are written
_LARGEST_BUFFER = 32 << 20


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

    A master weight starts as its parameter's value at the first step that updates it. From then on it is
    the truth: what else changes the parameter is overwritten by its next step, unless
    `refresh_master_weights` is called.

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
        master_weights: parameters of bfloat16 and float16 are updated in float32. A master copy of each
            is kept with its state, is updated in its place from the gradient cast to float32, and is
            rounded into it. Its state is float32 too. Wider parameters are their own masters. A
            `GradScaler` then leaves unscaling to the step, and so takes float16 gradients.
        on_progress: called as `on_progress(done, total)` after each part of a step, with the count of
            parts that are updated and of all. A part is what one locked buffer holds: several small
            parameters, or a slice of a large one. What it raises ends the step, once the parameter
            that is being updated is whole.
        **kwargs: `optimizer_class`'s own.

    Raises:
        ValueError: an optimizer that cannot be swapped, `differentiable=True`, a parameter that is
            no strided CPU tensor with bytes of its own, or too small a `max_locked_bytes`.
        TypeError: `on_progress` cannot be called; `aio_handle` or `folder` is none.
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
        master_weights: bool = False,
        on_progress: Optional[Callable[[int, int], None]] = None,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class, kwargs)
        if on_progress is not None and not callable(on_progress):
            raise TypeError(f"on_progress must be a function or None, got {type(on_progress).__name__}")
        budget = _DEFAULT_BUDGET if max_locked_bytes is None else max_locked_bytes
        buffer_bytes = min(buffer_bytes_within(budget, _BUFFERS, SMALLEST_BUFFER), _LARGEST_BUFFER)
        self._optimizer_class = optimizer_class
        self._options = kwargs
        self._min_bytes = max(min_bytes, 1)
        self._on_progress = on_progress
        self._gradients: Optional[SwappedGradients] = None
        self._has_masters = master_weights
        self._step_supports_amp_scaling = master_weights  # see Note [Scaling]
        self._unscale: Optional[float] = None
        self._steps = 0
        self._is_closed = False
        self._last_stats: Optional[OptimizerSwapStats] = None

        listed = list(params)
        probe = optimizer_class([torch.zeros(1, 1)], **kwargs)
        self._makes_state_early = len(probe.state) > 0  # for all parameters, so not before it is asked
        self._inner = probe if self._makes_state_early else optimizer_class(listed, **kwargs)
        super().__init__(listed, dict(self._inner.defaults))

        self._io, self._store, self._pool, self._close_files = open_swap_with_pool(
            self, folder, aio_handle, _BUFFERS, buffer_bytes, staging_bytes=buffer_bytes
        )
        self._records = StateRecords(
            self._io,
            self._store,
            self._pool,
            optimizer_class,
            kwargs,
            min_bytes=self._min_bytes,
            has_gradients=swap_gradients,
            has_masters=master_weights,
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
            try:
                check_movable("a parameter", local(param))
            except ValueError:
                self.param_groups.pop()
                raise
            if local(param) is not param and not is_elementwise(self._optimizer_class):
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

        Parameters without a gradient cause no I/O and keep their state, a master weight included.

        Raises:
            OSError: the disk failed; the message names the file. Room on disk for new state is taken
                before anything is updated: then nothing has changed.
            RuntimeError: sparse gradients that the class does not take, a `GradScaler` with master
                weights while gradients are on disk, or a parameter that `SwappedParameters` keep on
                disk (call their `step`). Nothing has changed.

        Whatever ends a step once updating has begun, an interrupt and what `on_progress` raises included,
        has the attributes `not_updated`, the parameters that this step did not update whole, and
        `half_updated`, those of them that it has changed: in part, or without their state. The others of
        `not_updated`, and their state, are as before the step. The state of parameters that were updated
        is complete, what could not be written of it in memory, and is written by the next step.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), scaling_of(self) as scaling:
            if scaling.is_by_scaler and self._gradients is not None and self._gradients.has_any():
                raise RuntimeError("a GradScaler looks at param.grad, and gradients are on disk")
            if scaling.is_skipped:
                return loss
            self._unscale = scaling.unscale
            self._step_parts(self._active_parts())
        self._steps += 1
        return loss

    def get_state(self, param: torch.Tensor) -> State:
        """A copy of a parameter's state, under `optimizer_class`'s names; empty before its first step.

        Its master weight is `"master_param"`: float32, of its shape.
        """
        self._check_open()
        if param not in self._records:
            self._group_of(param)
            return {}
        return copied(self._records[param].whole())

    def set_state(self, param: torch.Tensor, state: State) -> None:
        """Replaces a parameter's state, tensors of the shapes that `get_state` gives.

        Without `"master_param"` its master weight starts from the parameter at its next step.

        Raises:
            ValueError: the parameter is not this optimizer's, or the master is of another shape.
            OSError: no room on disk; the state is as before.
        """
        self._check_open()
        self._group_of(param)
        if self._records.keeps_master(param):
            check_master(param, state)
        with torch.no_grad():
            self._records.adopt(param, state)

    def refresh_master_weights(self, params: Optional[Iterable[torch.Tensor]] = None) -> None:
        """Takes the values of these parameters, all when None, in the place of their master weights.

        Call it when parameters were changed other than by a step, as by `load_state_dict` of the model
        without one of the optimizer: else the next step updates the masters as they were, and overwrites
        the change. The values are those that each parameter has at its next step; until then its state
        has no master. The rest of its state stays. Costs no I/O.

        Raises:
            ValueError: this optimizer keeps no masters, or a parameter is not its own.
        """
        self._check_open()
        if not self._has_masters:
            raise ValueError("this SwappedOptimizer was made without master_weights=True")
        chosen = None if params is None else list(params)
        for param in chosen or ():
            self._group_of(param)
        self._records.drop_masters(self._records if chosen is None else chosen)

    def state_dict(self) -> dict[str, Any]:
        """As `optimizer_class`'s. State on disk is mapped, not read: `torch.save` streams it.

        Later steps show in the mapped tensors, as they do in torch's own; clone what must not change.
        Master weights are in it as `"master_param"` of each parameter's state, float32 and of the
        parameter's shape: with the parameters themselves all that a run needs to go on to the same bits.
        A map outlives `close`; the disk space of the swap files is free when the last is dropped.
        """
        self._check_open()
        for param in self._records:
            whole = self._records[param].whole()
            if whole:
                self.state[param] = whole
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of `optimizer_class` gave, tensor by tensor.

        With master weights, state of parameters that have them is loaded as float32, and a master that it
        has none of starts from its parameter at its next step. The parameters stay as they are.

        Raises:
            ValueError: it has other groups or numbers of parameters, or a master of another shape;
                nothing has changed.
            OSError: no room on disk.
        """
        self._check_open()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        loaded, self.param_groups = self._cast_to_load(state_dict)
        self._records.forget([param for param in self._records if param not in loaded])
        with torch.no_grad():
            while loaded:
                param, state = loaded.popitem()
                self._records.adopt(param, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def stats(self) -> OptimizerSwapStats:
        """What was done so far, after `close` in all."""
        if self._last_stats is not None:
            return self._last_stats
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
        """Removes the state from disk and unlocks all memory. Final and idempotent.

        Tensors of a `state_dict` that are kept map the removed files: their space on disk is free when
        the last of them is dropped.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._gradients is not None:
            self._gradients.close()
        self._close_files()
        self._last_stats = self.stats()
        del self._pool, self._pipeline, self._records
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

    def _cast_to_load(self, state_dict: dict[str, Any]) -> tuple[dict[torch.Tensor, State], list[dict[str, Any]]]:
        """The states and groups of a state dict, as the class loads them: state of the dtype that is updated."""
        inner = self._inner
        params = {
            stand_in(param) if self._records.keeps_master(param) else param: param
            for group in self.param_groups
            for param in group["params"]
        }
        loading = {param: target for target, param in params.items()}
        inner.param_groups = [
            {**group, "params": [loading[param] for param in group["params"]]} for group in self.param_groups
        ]
        inner.load_state_dict(state_dict)
        groups, inner.param_groups = inner.param_groups, []
        state, inner.state = inner.state, type(inner.state)(dict)
        loaded = {params[target]: each for target, each in state.items()}
        for group in groups:
            group["params"] = [params[target] for target in group["params"]]
        for param, each in loaded.items():
            if self._records.keeps_master(param):
                check_master(param, each)
        return loaded, groups

    # What is stepped

    def _active_parts(self) -> list[Part]:
        """Every piece of every parameter with a gradient, with room on disk for its state."""
        active = [(group, param) for group in self.param_groups for param in group["params"]]
        active = [(group, param) for group, param in active if self._has_gradient(param)]
        for _, param in active:
            _check_in_memory(param)
            if is_elementwise(self._optimizer_class) and param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(f"{self._optimizer_class.__name__} does not take sparse gradients")
        self._records.make(active)
        return [
            Part(piece, group, gradient_extent=extent)
            for group, param in active
            for extent in [None if self._gradients is None else self._gradients.extent(param)]
            for piece in self._records[param].pieces
        ]

    def _has_gradient(self, param: torch.Tensor) -> bool:
        return param.grad is not None or (self._gradients is not None and self._gradients.has(param))

    # Stepping

    def _step_parts(self, parts: list[Part]) -> None:
        chunks = into_chunks(parts, self._pool.buffer_bytes)
        try:
            self._pipeline.run(chunks, lambda done: self._report(done, len(chunks)))
            for owner in dict.fromkeys(part.piece.owner for part in parts):
                if any(piece.resident for piece in owner.pieces):
                    self._records.lay_out_again(owner)
        except BaseException as error:
            tell_unfinished(error, parts)
            raise

    def _update(self, parts: list[Part]) -> None:
        """Runs the optimizer on some pieces and no others."""
        owned: list[torch.Tensor] = []
        tensors: list[torch.Tensor] = []
        try:
            for part in parts:
                owned.append(part.piece.tensor(part.gradient))
                tensors.append(self._stepped(part, owned[-1]))
            self._lend(parts, tensors)
            step_without_hooks(self._inner)
            for part, own, tensor in zip(parts, owned, tensors):
                part.state = dict(self._inner.state[tensor])
                if self._records.keeps_master(part.piece.owner.param):
                    own.copy_(tensor)
                    part.state[MASTER] = tensor
        finally:
            self._inner.state.clear()
            self._inner.param_groups = []
            for own, tensor in zip(owned, tensors):
                if tensor is not own:
                    tensor.grad = None
            for part in parts:
                if part.gradient is not None and not part.piece.owner.is_cut:
                    part.piece.owner.param.grad = None  # it is on disk still

    def _lend(self, parts: list[Part], tensors: list[torch.Tensor]) -> None:
        """Gives the inner optimizer these tensors, each with its part's state and group."""
        groups: dict[int, dict[str, Any]] = {}
        for part, tensor in zip(parts, tensors):
            subset = groups.setdefault(id(part.group), {**part.group, "params": []})
            subset["params"].append(tensor)
            subset.pop("param_names", None)
            if part.piece.is_fresh and self._makes_state_early:
                maker = self._optimizer_class([{**subset, "params": [tensor]}], **self._options)
                part.state = dict(maker.state[tensor])
            if part.state:
                self._inner.state[tensor] = part.state
        self._inner.param_groups = list(groups.values())

    def _stepped(self, part: Part, own: torch.Tensor) -> torch.Tensor:
        """What is updated, with its gradient: a master, the parameter itself, or where gradients are
        unscaled another tensor on its memory."""
        if self._records.keeps_master(part.piece.owner.param):
            master = part.state.pop(MASTER, None)
            if master is None:
                master = own.detach().to(MASTER_DTYPE)
            return with_gradient(master, own.grad, self._unscale)
        return own if self._unscale is None else with_gradient(own.detach(), own.grad, self._unscale)


def _check_in_memory(param: torch.Tensor) -> None:
    own = local(param)
    if own.untyped_storage().nbytes() < own.nbytes:
        raise RuntimeError(
            f"a parameter of shape {tuple(own.shape)} has no memory for its elements: if SwappedParameters keep "
            "it on disk, call swapped.step(optimizer) in the place of optimizer.step()"
        )


def _check_class(optimizer_class: Type[Optimizer], options: dict[str, Any]) -> None:
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(f"{optimizer_class.__name__} cannot be swapped: {reason}")
    if not issubclass(optimizer_class, Optimizer) or issubclass(optimizer_class, SwappedOptimizer):
        raise ValueError(f"optimizer_class must be a torch.optim.Optimizer, got {optimizer_class!r}")
    if options.get("differentiable"):
        raise ValueError("differentiable=True needs the state in memory: it cannot be swapped")
