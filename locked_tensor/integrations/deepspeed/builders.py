"""Puts this package's modules in the place of DeepSpeed's compiled ones, and takes them out again."""

from __future__ import annotations

import importlib
import threading
import warnings
from types import ModuleType
from typing import Any, NamedTuple, Optional

from locked_tensor.integrations.deepspeed import async_io, gds, pin_memory

TRIED_VERSIONS = ("0.19.8",)


class _Operator(NamedTuple):
    """One compiled module of DeepSpeed's that has a counterpart here."""

    builder: str  # the name of its builder class
    home: str  # the submodule of deepspeed.ops.op_builder that defines it
    counterpart: Any  # the module that is loaded instead


_OPERATORS = (
    _Operator("AsyncIOBuilder", "async_io", async_io),
    _Operator("PinMemoryBuilder", "pin_memory", pin_memory),
    _Operator("GDSBuilder", "gds", gds),
)


class _Change(NamedTuple):
    """An attribute that was set, and what undoes it."""

    owner: Any
    name: str
    had_its_own: bool  # False: it was inherited, or absent
    original: Any


_changes: list[_Change] = []
_current: Optional[Installation] = None
_lock = threading.RLock()


class Installation:
    """What `install` returns. As a context manager it undoes itself at the end.

    Only the installation that changed DeepSpeed undoes it: one that found it changed leaves it so.
    """

    def __init__(self, operators: tuple[str, ...]) -> None:
        self.operators = operators  #: DeepSpeed's names of what is replaced, of "async_io", "pin_memory" and "gds"

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: Any) -> None:
        with _lock:
            if _current is self:
                uninstall()


def install() -> Installation:
    """Has DeepSpeed's builders load this package's modules, for every import of them, past and future.

    Call it before DeepSpeed makes swappers, writers or pins memory: what it made before stays with the
    engine that made it. May be called again. `is_compatible()` of the builders answers for this
    engine on this machine from now on.

    Warns:
        RuntimeWarning: this DeepSpeed version has not been tried, or lacks what could be replaced.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """
    global _current
    with _lock:
        if _current is not None:
            return Installation(_current.operators)
        _warn_of_untried_version()
        replaced = []
        try:
            for operator in _OPERATORS:
                if _replace(operator):
                    replaced.append(operator.home)
            _set_aside_native_memory()
        except BaseException:
            _undo_changes()
            raise
        if "async_io" not in replaced:
            warnings.warn(
                "this DeepSpeed has no AsyncIOBuilder to replace: its I/O stays on its own engine",
                RuntimeWarning,
                stacklevel=2,
            )
        _current = Installation(tuple(replaced))
        return _current


def uninstall() -> None:
    """Gives DeepSpeed its own modules back. What runs on this engine goes on so. Idempotent."""
    global _current
    with _lock:
        _undo_changes()
        _current = None


def _warn_of_untried_version() -> None:
    try:
        version = importlib.import_module("deepspeed").__version__
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ModuleNotFoundError(
            'locked_tensor.integrations.deepspeed needs DeepSpeed; run "pip install deepspeed"', name="deepspeed"
        ) from error
    if str(version).partition("+")[0] not in TRIED_VERSIONS:
        warnings.warn(
            f"locked_tensor has been tried with DeepSpeed {', '.join(TRIED_VERSIONS)}, this is {version}: "
            "compare a few steps with its own engine",
            RuntimeWarning,
            stacklevel=3,
        )


def _replace(operator: _Operator) -> bool:
    """Changes the operator's builder classes. Was the one that DeepSpeed hands out here among them?"""
    from deepspeed.accelerator import get_accelerator

    handed_out = get_accelerator().get_op_builder(operator.builder)
    home = _optional_module(f"deepspeed.ops.op_builder.{operator.home}")
    # Changing the class and not the name reaches every module that has imported it. An accelerator
    # without the operator has a stand-in class under another name, which stays as it is.
    candidates = {handed_out, getattr(home, operator.builder, None)}
    classes = {each for each in candidates if isinstance(each, type) and each.__name__ == operator.builder}
    for each in classes:
        _set(each, "load", lambda self, verbose=False: operator.counterpart)
        _set(each, "is_compatible", _compatibility(operator.counterpart))
    return handed_out in classes


def _compatibility(counterpart: Any) -> Any:
    def is_compatible(self: Any, verbose: bool = False) -> bool:
        reason = counterpart.why_unusable()
        if reason and verbose:
            self.warning(f"{self.name}: {reason}")
        return not reason

    return is_compatible


def _set_aside_native_memory() -> None:
    """DS_PIN_MEMORY_BACKEND=native keeps one manager for the process: a new one is to use our handle.

    The old one comes back with `uninstall`; what it allocated is freed by itself meanwhile.
    """
    home = _optional_module("deepspeed.utils.pin_memory")
    if hasattr(home, "_shared_native_pins"):
        _set(home, "_shared_native_pins", None)


def _optional_module(name: str) -> Optional[ModuleType]:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _set(owner: Any, name: str, value: Any) -> None:
    _changes.append(_Change(owner, name, name in vars(owner), vars(owner).get(name)))
    setattr(owner, name, value)


def _undo_changes() -> None:
    while _changes:
        change = _changes.pop()
        if change.had_its_own:
            setattr(change.owner, change.name, change.original)
        else:
            delattr(change.owner, change.name)
