"""Which ways this machine has to move bytes, and why not the others."""

from __future__ import annotations

from typing import NamedTuple

from locked_tensor import _C


class EngineInfo(NamedTuple):
    """One engine as `engines` found it."""

    name: str  #: "io_uring", "libaio" or "threads"
    usable: bool
    reason: str  #: when not usable: what the kernel said, and the remedy


def engines() -> list[EngineInfo]:
    """The engines that a handle can use, best first. Asks the kernel at each call; milliseconds."""
    return [EngineInfo(*row) for row in _C.engines()]
