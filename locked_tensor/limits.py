"""How much memory this process may lock: the kernel's limit, in words, and the log of what is reached."""

from __future__ import annotations

import logging
import operator
from typing import NamedTuple, Optional

from locked_tensor import _C


class MemlockLimit(NamedTuple):
    """How much memory this process may lock and has locked, in bytes; None is unlimited."""

    soft: Optional[int]
    hard: Optional[int]
    locked: int


def memlock_limit() -> MemlockLimit:
    """RLIMIT_MEMLOCK and what this process has locked now. Read from the kernel at each call."""
    return MemlockLimit(*_C.memlock_limit())


def describe_limit() -> str:
    """The limit, what is locked, and how to raise it, for messages."""
    limit = memlock_limit()
    return (
        f"RLIMIT_MEMLOCK is {show_bytes(limit.soft)}, {show_bytes(limit.locked)} locked; "
        'raise it with "ulimit -l" (systemd LimitMEMLOCK=, docker --ulimit memlock=-1)'
    )


def show_bytes(nbytes: Optional[int]) -> str:
    return "unlimited" if nbytes is None else f"{nbytes:,} bytes"


def byte_count(function: str, nbytes: int, *, at_least: int) -> int:
    """`nbytes` as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `at_least`.
    """
    try:
        count = whole_number("nbytes", nbytes)
    except TypeError:
        raise TypeError(
            f"{function}() takes a whole number of bytes, got {type(nbytes).__name__} {nbytes!r}"
        ) from None
    if count < at_least:
        raise ValueError(f"{function}() takes {at_least} bytes or more, got {count}")
    return count


def whole_number(name: str, value: int) -> int:
    """`value` as an int.

    Raises:
        TypeError: it is no whole number, or a bool.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__} {value!r}") from None


_logger = logging.getLogger("locked_tensor")
_next_milestone = 32 << 30


def set_log_milestone(nbytes: int) -> None:
    """From how many locked bytes on each doubling is logged (INFO, logger "locked_tensor"); 32 GiB at first.

    Raises:
        TypeError: `nbytes` is no whole number.
        ValueError: `nbytes` is not positive.
    """
    global _next_milestone
    _next_milestone = byte_count("set_log_milestone", nbytes, at_least=1)


def log_milestones() -> None:
    """Logs once that a milestone is reached. Called where locked memory has grown."""
    global _next_milestone
    reserved = _C.memory_reserved()
    if reserved >= _next_milestone:
        _logger.info("%.1f GiB are locked now (%s)", reserved / 2**30, describe_limit())
        while _next_milestone <= reserved:
            _next_milestone *= 2
