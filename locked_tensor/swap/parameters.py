"""`SwappedParameters`: a module whose parameters live on disk and are in memory while they are used."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Optional, Union

import torch
from torch import nn
from torch.optim import Optimizer

from locked_tensor.handle import AioHandle
from locked_tensor.swap.folder import FolderPath
from locked_tensor.swap.optimizer_records import step_without_hooks
from locked_tensor.swap.parameter_cache import UnitCache, holding
from locked_tensor.swap.parameter_units import Unit, partition
from locked_tensor.swap.saved import Hooks, Kept, Packed, PassedOn, check_unchanged, hooks_around, take
from locked_tensor.swap.store import PAGE_BYTES
from locked_tensor.swap.transfer import SwapStats, open_swap_with_pool


class SwappedParameters:
    """Keeps a module's parameters and buffers on disk and brings them to memory while they are used.

    The module is used as before: forward, and backward when training, find each part's parameters in
    locked memory, read ahead in the order of the last pass and dropped within the budget. Elsewhere a
    parameter is NaN of the right shape, which nothing can write to. Results are those of the module in
    memory, to the bit. `state_dict` and `load_state_dict` of the module work and stream.

        with SwappedParameters(model, folder="/nvme", max_locked_bytes=1 << 30) as swapped:
            loss = model(batch).mean()
            loss.backward()
            swapped.step(optimizer)

    Args:
        module: on the CPU. Its parameters stay the same objects.
        folder: where to: a path, or a list of paths on several devices. Swap files are private, and gone
            after `close`, at exit, and at the next start after a crash.
        aio_handle: moves the bytes; None makes one and closes it at the end.
        max_locked_bytes: locked memory at most. At least twice the largest tensor; a third of it, or
            more, is in use at a time, so a few times a layer is a good budget.

    Raises:
        ValueError: a tensor is not on the CPU, or larger than half of `max_locked_bytes`.
        OSError: the folder may not be written, or has no room.
        LockLimitError: so much memory may not be locked.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        folder: Union[FolderPath, Iterable[FolderPath]],
        aio_handle: Optional[AioHandle] = None,
        max_locked_bytes: int = 1 << 30,
    ) -> None:
        budget = max_locked_bytes // PAGE_BYTES * PAGE_BYTES
        self.module = module
        self._parts = partition(module, max(budget // 3, PAGE_BYTES))
        for unit in self._parts.units:
            _check(unit, budget)
        self._is_closed = False
        self._saved_hooks: list[Any] = []
        self._around: list[Optional[Hooks]] = []
        self._running: list[tuple[nn.Module, list[Unit]]] = []  # what each module that runs keeps
        self._removers: list[Any] = []
        self._io, self._store, pool, self._close_files = open_swap_with_pool(self, folder, aio_handle, 1, budget)
        self._cache = UnitCache(self._parts.units, self._store, self._io, pool)
        try:
            self._cache.swap_out()
        except BaseException:
            self.restore()
            raise
        self._install()

    # What the user calls

    def step(self, optimizer: Optimizer, closure: Optional[Callable[[], Any]] = None) -> Any:
        """`optimizer.step(closure)` within the budget: each part is brought to memory and updated.

        The optimizer's step hooks run once, around the whole. Gradients stay in ordinary memory; a
        `SwappedOptimizer` keeps its state on disk.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        Optimizer.profile_hook_step(self._step_units)(optimizer)
        return loss

    def gather(self, *parameters: torch.Tensor) -> _Gathered:
        """A context in which these parameters or buffers (all when none is given) are in memory, to be
        read or changed.

        Raises:
            ValueError: one is not this module's.
            PoolExhaustedError: they exceed the budget together.
        """
        self._check_open()
        if not parameters:
            return _Gathered(self, self._parts.units)
        unknown = [tensor for tensor in parameters if tensor not in self._parts.unit_of]
        if unknown:
            raise ValueError(f"a tensor of shape {tuple(unknown[0].shape)} is not swapped by this object")
        units = [self._parts.unit_of[tensor] for tensor in parameters]
        return _Gathered(self, list(dict.fromkeys(units)))

    def stats(self) -> SwapStats:
        """What was moved so far."""
        return self._io.stats()

    @property
    def nbytes(self) -> int:
        """Bytes of the module on disk."""
        return sum(unit.nbytes for unit in self._parts.units)

    def restore(self) -> None:
        """Brings everything back to ordinary memory, where the module works by itself; then closes."""
        if not self._is_closed:
            self._cache.restore()
            self.close()

    def close(self) -> None:
        """Removes the parameters from disk and from memory. Final: the module is empty then. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for remover in self._removers:
            remover.remove()
        for module in self.module.modules():
            for name in ("_parameters", "_buffers"):
                setattr(module, name, dict(getattr(module, name)))
        self._cache.empty()
        self._close_files()
        del self._cache

    def __enter__(self) -> SwappedParameters:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("these SwappedParameters are closed: the module's parameters are gone")

    # Use

    def _use(self, unit: Unit) -> None:
        self._check_open()
        self._cache.use(unit)

    def _leave(self, unit: Unit) -> None:
        if not self._is_closed:
            self._cache.leave(unit)

    def _enter(self, module: nn.Module, units: list[Unit]) -> None:
        """A module begins to run: its units stay in memory until `_exit`."""
        kept: list[Unit] = []
        self._running.append((module, kept))
        for unit in units:
            self._use(unit)
            kept.append(unit)

    def _exit(self, module: nn.Module) -> None:
        if self._running and self._running[-1][0] is module:  # not where another hook failed before ours
            for unit in self._running.pop()[1]:
                self._leave(unit)

    def _fetch(self, tensor: torch.Tensor) -> None:
        """A tensor is asked of its module: it is brought, and stays while the innermost module runs."""
        unit = self._parts.unit_of.get(tensor)
        if unit is None or self._is_closed or any(unit in kept for _, kept in self._running):
            return
        self._use(unit)
        if self._running:
            self._running[-1][1].append(unit)
        else:
            self._leave(unit)

    # Hooks

    def _install(self) -> None:
        hooks = self._removers
        hooks.append(self.module.register_forward_pre_hook(self._before_module))
        for module, units in self._parts.needs.items():  # none too: it may ask for others' by name
            hooks.append(module.register_forward_pre_hook(_Before(self, units)))
            hooks.append(module.register_forward_hook(_After(self), always_call=True))
        hooks.append(self.module.register_forward_hook(self._after_module, always_call=True))
        for module in self.module.modules():
            for name in ("_parameters", "_buffers"):
                setattr(module, name, _Asked(self, getattr(module, name)))
            hooks.append(module.register_state_dict_post_hook(_function(self._fill_state_dict)))
            hooks.append(module.register_load_state_dict_pre_hook(_function(self._before_load)))

    @torch._disable_dynamo
    def _before_module(self, module: nn.Module, arguments: Any) -> None:
        self._cache.is_forward = True
        self._around.append(hooks_around())
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, take)
        saved.__enter__()
        self._saved_hooks.append(saved)

    @torch._disable_dynamo
    def _after_module(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if self._saved_hooks:  # not where another hook failed before ours
            self._cache.is_forward = False
            self._saved_hooks.pop().__exit__(None, None, None)
            self._around.pop()

    @torch._disable_dynamo
    def _pack(self, tensor: torch.Tensor) -> Packed:
        unit = holding(self._parts.units, tensor)
        if unit is not None:
            return _ParameterView(self, unit, tensor)
        around = self._around[-1]
        return Kept(tensor) if around is None else PassedOn(tensor, around)

    def _fill_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Puts maps of the swap file in the place of placeholders."""
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                unit = self._parts.unit_of.get(tensor) if tensor is not None else None
                if unit is None or unit.extent is None or prefix + name not in state:
                    continue
                self._cache.flush(unit)
                (entry,) = [each for each in unit.entries if each.tensor is tensor]
                state[prefix + name] = entry.view(unit.extent.map(0, torch.uint8, (unit.nbytes,)))

    def _before_load(
        self, module: nn.Module, state: Any, prefix: str, metadata: Any, *others: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError("load_state_dict(assign=True) would replace swapped parameters: load without it")
        for owned in (module._parameters, module._buffers):
            for tensor in owned.values():
                if tensor is not None and tensor in self._parts.unit_of:
                    unit = self._parts.unit_of[tensor]
                    self._use(unit)
                    self._leave(unit)

    @torch.no_grad()
    def _step_units(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        try:
            for unit in [*self._parts.units, None]:
                subset = [{**group, "params": self._stepped(group["params"], unit)} for group in groups]
                optimizer.param_groups = [group for group in subset if group["params"]]
                if not optimizer.param_groups:
                    continue
                if unit is None:
                    step_without_hooks(optimizer)
                    continue
                self._use(unit)
                try:
                    step_without_hooks(optimizer)
                finally:
                    self._leave(unit)
        finally:
            optimizer.param_groups = groups

    def _stepped(self, params: list[torch.Tensor], unit: Optional[Unit]) -> list[torch.Tensor]:
        return [
            param for param in params if param.grad is not None and self._parts.unit_of.get(param) is unit
        ]


class _Asked(dict[str, Any]):
    """A module's parameters or buffers: what is asked of it by name is brought to memory.

    For modules that use their children's parameters without calling the children.
    """

    def __init__(self, owner: SwappedParameters, tensors: dict[str, Any]) -> None:
        super().__init__(tensors)
        self._owner = owner

    @torch._disable_dynamo
    def __getitem__(self, name: str) -> Any:
        tensor = super().__getitem__(name)
        if tensor is not None:
            self._owner._fetch(tensor)
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module with SwappedParameters cannot be copied or pickled: restore() it, or save its state_dict()"
        )


class _Before:
    """A module is about to run."""

    def __init__(self, owner: SwappedParameters, units: list[Unit]) -> None:
        self._owner = owner
        self._units = units

    @torch._disable_dynamo
    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._owner._enter(module, self._units)


class _After:
    """A module has run, or failed."""

    def __init__(self, owner: SwappedParameters) -> None:
        self._owner = owner

    @torch._disable_dynamo
    def __call__(self, module: nn.Module, arguments: Any, result: Any) -> None:
        self._owner._exit(module)


class _Gathered:
    """Units in memory for the length of a `with`."""

    def __init__(self, owner: SwappedParameters, units: list[Unit]) -> None:
        self._owner = owner
        self._units = units
        self._used: list[Unit] = []

    def __enter__(self) -> None:
        try:
            for unit in self._units:
                self._owner._use(unit)
                self._used.append(unit)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: Any) -> None:
        while self._used:
            self._owner._leave(self._used.pop())


class _ParameterView:
    """A saved tensor that lies in a parameter, which is dropped and brought back meanwhile."""

    def __init__(self, owner: SwappedParameters, unit: Unit, tensor: torch.Tensor) -> None:
        self._owner = owner
        self._unit = unit
        self._offset = tensor.data_ptr() - unit.bytes().data_ptr()
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._entry = unit.entry_at(self._offset)
        self._version = self._entry.tensor._version

    def take(self) -> torch.Tensor:
        check_unchanged(self._entry.tensor, self._version)
        self._owner._use(self._unit)
        try:
            memory = self._unit.bytes()[self._offset :]
            memory = memory[: memory.numel() // self._dtype.itemsize * self._dtype.itemsize]
            return memory.view(self._dtype).as_strided(self._shape, self._stride)
        finally:
            self._owner._leave(self._unit)


def _function(method: Callable[..., None]) -> Callable[..., None]:
    """A plain function, on which torch sets attributes."""
    return lambda *arguments: method(*arguments)


def _check(unit: Unit, budget: int) -> None:
    for entry in unit.entries:
        if entry.tensor.device.type != "cpu":
            raise ValueError(f"SwappedParameters serve modules on the CPU; {entry.name} is on {entry.tensor.device}")
    if 2 * unit.nbytes > budget:
        raise ValueError(
            f"{unit.name} has {unit.nbytes:,} bytes that are used together: "
            f"max_locked_bytes must be at least {2 * unit.nbytes:,}, got {budget:,}"
        )
