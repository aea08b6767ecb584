"""`SwappedParameters`: a module whose parameters live on disk and are in memory while they are used."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from typing import Any, Callable, Iterable, Optional, Union

import torch
from torch import nn
from torch.optim import Optimizer

from locked_tensor.handle import AioHandle
from locked_tensor.movable import check_movable
from locked_tensor.swap.folder import FolderPath
from locked_tensor.swap.optimizer_records import step_without_hooks
from locked_tensor.swap.parameter_cache import UnitCache, holding
from locked_tensor.swap.parameter_units import Unit, Use, partition
from locked_tensor.swap.saved import Hooks, Kept, Packed, PassedOn, check_unchanged, hooks_around, take
from locked_tensor.swap.store import PAGE_BYTES
from locked_tensor.swap.transfer import SwapStats, open_swap_with_pool


class SwappedParameters:
    """Keeps a module's parameters and buffers on disk and brings them to memory while they are used.

    The module is used as before: forward, and backward when training, find each part's parameters in
    locked memory, read ahead in the order of the last pass and dropped within the budget. What is not in
    memory just now reads as NaN of the right shape, and writing to it raises: `gather` what you read or
    change yourself. Results are those of the module in memory, to the bit. `state_dict` and
    `load_state_dict` of the module work and stream. Several threads may call the module: they share the
    budget and wait for one another's room. A call that is interrupted, by ctrl-C for one, leaves
    everything usable.

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
        ValueError: a tensor is no strided CPU tensor with bytes of its own, or larger than half of
            `max_locked_bytes`; the module, or a part of it, is swapped already.
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
        _check_module(module)
        budget = max_locked_bytes // PAGE_BYTES * PAGE_BYTES
        self.module = module
        self._parts = partition(module, max(budget // 3, PAGE_BYTES))
        for unit in self._parts.units:
            _check_fits(unit, budget)
        self._is_closed = self._is_restored = False
        self._runs = _Runs()
        self._undo: list[Callable[[], None]] = []  # what makes the module as it was before
        self._io, self._store, pool, self._close_files = open_swap_with_pool(self, folder, aio_handle, 1, budget)
        self._cache = UnitCache(self._parts.units, self._store, self._io, pool)
        try:
            self._cache.swap_out()
            self._install()
        except BaseException:
            self.restore()
            raise

    # What the user calls

    def step(self, optimizer: Optimizer, closure: Optional[Callable[[], Any]] = None) -> Any:
        """`optimizer.step(closure)` within the budget: each part is brought to memory and updated.

        The optimizer's step hooks run once, around the whole. Gradients stay in ordinary memory; a
        `SwappedOptimizer` keeps its state on disk. What ends it early, an interrupt too, has the attribute
        `not_updated`: the parameters that this step did not update, or not all of them whole.
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
            return _Gathered(self, self._parts.units, will_end=False)
        unknown = [tensor for tensor in parameters if tensor not in self._parts.unit_of]
        if unknown:
            raise ValueError(f"a tensor of shape {tuple(unknown[0].shape)} is not swapped by this object")
        units = [self._parts.unit_of[tensor] for tensor in parameters]
        return _Gathered(self, list(dict.fromkeys(units)), will_end=False)

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
            while self._undo:
                self._undo[-1]()
                self._undo.pop()
            self._is_restored = True
            self.close()

    def close(self) -> None:
        """Removes the parameters from disk and from memory. Final: what uses the module then raises
        `ValueError`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cache.empty()
        self._close_files()
        del self._cache

    def __enter__(self) -> SwappedParameters:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(
                "these SwappedParameters are closed and the module's parameters are gone: "
                "to keep them, call restore() instead of close()"
            )

    # Use

    def _fetch(self, tensor: torch.Tensor) -> None:
        """A tensor is asked of its module: it is brought, and stays while the innermost module runs."""
        unit = self._parts.unit_of.get(tensor)
        if unit is None or self._is_restored:
            return
        self._check_open()
        run = self._runs.innermost()
        if run is not None:
            run.keep(unit)
        else:
            with _Gathered(self, [unit]):
                pass

    def _install(self) -> None:
        for module in self._parts.needs:
            self._undo.append(_replaced(module, "forward", self._around_forward(module)))
        for module in self.module.modules():
            for name in ("_parameters", "_buffers"):
                owned = getattr(module, name)
                setattr(module, name, _Asked(self, owned))
                self._undo.append(functools.partial(_give_back, module, name))
            self._undo.append(module.register_state_dict_post_hook(_function(self._fill_state_dict)).remove)
            self._undo.append(module.register_load_state_dict_pre_hook(_function(self._before_load)).remove)

    def _around_forward(self, module: nn.Module) -> Callable[..., Any]:
        """What stands for a module's forward while its parameters are swapped.

        Not hooks: torch calls those after an exception, but not after ctrl-C.
        """
        forward = module.forward
        units = self._parts.needs[module]

        @torch._disable_dynamo(recursive=False)
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_restored:  # somebody has kept this function
                return forward(*args, **kwargs)
            if module is not self.module:
                with _Run(self, units):
                    return forward(*args, **kwargs)
            saving = _Saving(self)
            with torch.autograd.graph.saved_tensors_hooks(saving.pack, take), _Run(self, units, is_whole=True):
                return forward(*args, **kwargs)

        return run

    # State dicts

    def _fill_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Puts maps of the swap file in the place of placeholders."""
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                unit = self._parts.unit_of.get(tensor) if tensor is not None else None
                if unit is None or unit.extent is None or prefix + name not in state:
                    continue
                self._check_open()
                self._cache.flush(unit)
                (entry,) = [each for each in unit.entries if each.tensor is tensor]
                state[prefix + name] = entry.view(unit.extent.map(0, torch.uint8, (unit.nbytes,)))

    def _before_load(
        self, module: nn.Module, state: Any, prefix: str, metadata: Any, *others: Any
    ) -> None:
        self._check_open()
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError("load_state_dict(assign=True) would replace swapped parameters: load without it")
        for owned in (module._parameters, module._buffers):
            for tensor in owned.values():
                if tensor is not None:
                    self._fetch(tensor)

    @torch.no_grad()
    def _step_units(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        left = [*self._parts.units, None]  # None: what is not swapped
        try:
            while left:
                unit = left[0]
                optimizer.param_groups = self._stepped(groups, unit)
                if optimizer.param_groups:
                    with contextlib.nullcontext() if unit is None else _Gathered(self, [unit]):
                        step_without_hooks(optimizer)
                left.pop(0)
        except BaseException as error:
            parts = [[param for group in self._stepped(groups, unit) for param in group["params"]] for unit in left]
            first = getattr(error, "not_updated", parts[0])
            vars(error).update(not_updated=[*first, *itertools.chain.from_iterable(parts[1:])])
            raise
        finally:
            optimizer.param_groups = groups

    def _stepped(self, groups: list[dict[str, Any]], unit: Optional[Unit]) -> list[dict[str, Any]]:
        """The groups with the unit's parameters only, without those that have no gradient or none left."""
        of_unit = [
            {**group, "params": [p for p in group["params"] if p.grad is not None and self._parts.unit_of.get(p) is unit]}
            for group in groups
        ]
        return [group for group in of_unit if group["params"]]


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


class _Gathered:
    """Units in memory for the length of a `with`."""

    def __init__(self, owner: SwappedParameters, units: list[Unit], will_end: bool = True) -> None:
        self._owner = owner
        self._units = list(units)
        self._will_end = will_end
        self._use: Optional[Use] = None

    def __enter__(self) -> None:
        self._owner._check_open()
        self._use = Use(self._will_end)
        try:
            for unit in self._units:
                self._owner._cache.use(unit, self._use)
        except BaseException:
            self._end()
            raise

    def __exit__(self, *exception: Any) -> None:
        self._end()

    @property
    def is_going_on(self) -> bool:
        return self._use is not None

    def _end(self) -> None:
        use, self._use = self._use, None
        if use is not None and not self._owner._is_closed:
            self._owner._cache.leave(self._units, use)


class _Run(_Gathered):
    """One call of a module, the whole or a part, which keeps what it asks for by name too."""

    def __init__(self, owner: SwappedParameters, units: list[Unit], is_whole: bool = False) -> None:
        super().__init__(owner, units)
        self._is_whole = is_whole

    @torch._disable_dynamo
    def __enter__(self) -> None:
        self._owner._check_open()
        self._owner._runs.begin(self)
        if self._is_whole:
            self._owner._cache.is_forward = True
        super().__enter__()

    @torch._disable_dynamo
    def __exit__(self, *exception: Any) -> None:
        if self._is_whole and not self._owner._is_closed:
            self._owner._cache.is_forward = False
        self._end()

    def keep(self, unit: Unit) -> None:
        """Has the unit in memory until the call ends."""
        if self._use is not None and self._use not in unit.uses:
            self._units.append(unit)
            self._owner._cache.use(unit, self._use)


class _Runs(threading.local):
    """The calls that are going on in this thread. Those that were interrupted fall out by themselves."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[_Run]] = []

    def begin(self, run: _Run) -> None:
        self.innermost()
        self._calls.append(weakref.ref(run))

    def innermost(self) -> Optional[_Run]:
        while self._calls:
            run = self._calls[-1]()
            if run is not None and run.is_going_on:
                return run
            self._calls.pop()
        return None


class _Saving:
    """What autograd saves of parameters in a forward of the whole is brought back for backward."""

    @torch._disable_dynamo
    def __init__(self, owner: SwappedParameters) -> None:
        self._owner = owner
        self._around = hooks_around()
        while owner._runs.innermost() is None and self._is_left_over(self._around):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._around = hooks_around()

    @torch._disable_dynamo
    def pack(self, tensor: torch.Tensor) -> Packed:
        unit = holding(self._owner._parts.units, tensor)
        if unit is not None:
            return _ParameterView(self._owner, unit, tensor)
        return Kept(tensor) if self._around is None else PassedOn(tensor, self._around)

    def _is_left_over(self, hooks: Optional[Hooks]) -> bool:
        """Are they of an earlier call that was interrupted just as it set or unset them?"""
        saving = getattr(hooks.pack, "__self__", None) if hooks is not None else None
        return isinstance(saving, _Saving) and saving._owner is self._owner


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
        with _Gathered(self._owner, [self._unit]):
            memory = self._unit.bytes()[self._offset :]
            memory = memory[: memory.numel() // self._dtype.itemsize * self._dtype.itemsize]
            return memory.view(self._dtype).as_strided(self._shape, self._stride)


def _replaced(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Sets an instance's attribute; what undoes it, unless somebody has set it since."""
    before = vars(owner).get(name)
    setattr(owner, name, new)

    def undo() -> None:
        if vars(owner).get(name) is not new:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def _give_back(module: nn.Module, name: str) -> None:
    """A module's parameters or buffers, in a plain dictionary again."""
    setattr(module, name, dict(getattr(module, name)))


def _function(method: Callable[..., None]) -> Callable[..., None]:
    """A plain function, on which torch sets attributes."""
    return lambda *arguments: method(*arguments)


def _check_module(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if isinstance(each._parameters, _Asked):
            raise ValueError(
                f"{name or type(each).__name__} has SwappedParameters already: restore() those first, or swap the "
                "whole module at once"
            )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        check_movable(name, tensor)


def _check_fits(unit: Unit, budget: int) -> None:
    if 2 * unit.nbytes > budget:
        raise ValueError(
            f"{unit.name} has {unit.nbytes:,} bytes that are used together: "
            f"max_locked_bytes must be at least {2 * unit.nbytes:,}, got {budget:,}"
        )
