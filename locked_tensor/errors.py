"""The errors that are this package's own. Everything else is `ValueError`, `TypeError` or `OSError`."""

from __future__ import annotations

from typing import Optional


class LockLimitError(MemoryError):
    """Memory could not be locked. The message names the remedy."""

    def __init__(
        self,
        message: str,
        bytes_asked: int,
        bytes_locked: int,
        soft_limit: Optional[int],
        hard_limit: Optional[int],
        errno: int,
    ) -> None:
        super().__init__(message)
        self.bytes_asked = bytes_asked  #: bytes that were to be locked
        self.bytes_locked = bytes_locked  #: bytes this process had locked already
        self.soft_limit = soft_limit  #: RLIMIT_MEMLOCK in bytes; None: unlimited
        self.hard_limit = hard_limit  #: its hard limit in bytes; None: unlimited
        self.errno = errno  #: what the kernel said


class ShortReadError(EOFError):
    """The file ended before the buffer was full.

    An `EOFError`, as of Python's own readers, and no `OSError`: `except OSError` does not catch it. What
    the buffer holds then is unspecified, in locked and in ordinary memory; to have the bytes there are,
    read again with a buffer of `found` bytes.
    """

    def __init__(self, message: str, wanted: int, found: int, filename: str) -> None:
        super().__init__(message)
        self.wanted = wanted  #: bytes asked for
        self.found = found  #: bytes that the file had from the offset on
        self.filename = filename


class InternalError(RuntimeError):
    """A check of this package's own failed: a defect here, not the caller's. Please report it."""
