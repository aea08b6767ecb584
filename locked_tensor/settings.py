"""A handle's settings in a file: DeepSpeed's `"aio"` object, and beside it what DeepSpeed has no name for."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, Optional, Union

_OWN = "locked_tensor"  # the object beside "aio" that is ours
_BEST_FOR = ("read", "write")
_TYPES: dict[str, type] = {
    "block_size": int,
    "queue_depth": int,
    "single_submit": bool,
    "overlap_events": bool,
    "intra_op_parallelism": int,
    "engine": str,
    "direct": str,
    "staging_bytes": int,
    "vector_run_bytes": int,
    "max_pending": int,
}
_DEEPSPEED_NAMES = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")


@dataclass(frozen=True, order=True)
class AioSettings:
    """What a search for settings varies: the arguments of `aio_handle` that matter for speed."""

    block_size: int  #: bytes
    queue_depth: int  #: requests
    intra_op_parallelism: int  #: threads
    engine: str

    def as_deepspeed(self) -> dict[str, Any]:
        """The value of `"aio"` in a DeepSpeed configuration."""
        return {
            "block_size": self.block_size,
            "queue_depth": self.queue_depth,
            "intra_op_parallelism": self.intra_op_parallelism,
            "single_submit": False,
            "overlap_events": True,
        }

    def as_call(self) -> str:
        """The line of Python that makes such a handle."""
        return (
            f"aio_handle({self.block_size}, {self.queue_depth}, "
            f'intra_op_parallelism={self.intra_op_parallelism}, engine="{self.engine}")'
        )


def render_settings(both: AioSettings, read: AioSettings, write: AioSettings) -> str:
    """The text of a settings file: one choice for everything, and the best for either alone."""
    own: dict[str, Any] = {"engine": both.engine, "read": asdict(read), "write": asdict(write)}
    return json.dumps({"aio": both.as_deepspeed(), _OWN: own}, indent=2) + "\n"


def read_settings(path: Union[str, "os.PathLike[str]"], best_for: Optional[str] = None) -> dict[str, Any]:
    """The keyword arguments for `aio_handle` that a file holds.

    Args:
        path: a file of `locked-tensor tune --save`, or any JSON object with DeepSpeed's "aio" in it.
        best_for: "read" or "write" takes what was found best for that alone; None what serves both.

    Raises:
        ValueError: the file is not JSON, has no such settings, or has one that is unknown or of
            another type; the message names file and setting.
        OSError: the file cannot be read.
    """
    if best_for not in (None, *_BEST_FOR):
        raise ValueError(f'best_for must be "read", "write" or None, got {best_for!r}')
    with open(os.fspath(path), encoding="utf-8") as file:  # a number would be a descriptor, and closed
        try:
            whole = json.load(file)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise ValueError(f"{os.fspath(path)} is not JSON: {error}") from error
    reader = _Reader(os.fspath(path))
    top = reader.as_object(whole, "the file")
    own = reader.as_object(top.get(_OWN, {}), _OWN)
    if best_for is not None:
        if best_for not in own:
            raise ValueError(f"{reader.path} holds no settings for {best_for!r} alone; leave out best_for")
        name = f"{_OWN}.{best_for}"
        return reader.checked(reader.as_object(own[best_for], name), name, tuple(_TYPES))
    if "aio" not in top:
        raise ValueError(f'{reader.path} has no "aio" object: it holds no settings of a handle')
    aio = dict(reader.as_object(top["aio"], "aio"))
    if aio.pop("use_gds", False):
        raise ValueError(f"{reader.path}: use_gds is true, but device tensors pass through locked memory here")
    others = {name: value for name, value in own.items() if name not in _BEST_FOR}
    names = tuple(name for name in _TYPES if name not in _DEEPSPEED_NAMES)
    return {**reader.checked(aio, "aio", _DEEPSPEED_NAMES), **reader.checked(others, _OWN, names)}


class _Reader:
    """Checks what one file says; its errors name the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def as_object(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: {name} must be a JSON object, got {value!r}")
        return value

    def checked(self, found: dict[str, Any], where: str, allowed: tuple[str, ...]) -> dict[str, Any]:
        for name, value in found.items():
            if name not in allowed:
                raise ValueError(f"{self.path}: {where} has no setting {name!r}; it knows {', '.join(allowed)}")
            if type(value) is not _TYPES[name]:  # a bool is an int to isinstance
                raise ValueError(f"{self.path}: {where}.{name} must be {_TYPES[name].__name__}, got {value!r}")
        return found
