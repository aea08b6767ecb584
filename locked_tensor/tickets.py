"""Many operations of one job: waited for together, their failures told in the job's words."""

from __future__ import annotations

import contextlib
import os
from typing import ContextManager, Generator, Optional, Sequence

from locked_tensor.errors import ShortReadError
from locked_tensor.handle import AioHandle, IoTicket
from locked_tensor.handle import aio_handle as make_handle

# Files of gigabytes that grow gain from longer requests than the handle's usual ones.
_BLOCK_BYTES = 4 << 20
_QUEUE_DEPTH = 32


class Tickets:
    """The operations of one job on one file. Whatever fails, each is waited for before the job ends."""

    def __init__(self, path: str, doing: str) -> None:
        self._path = path
        self._doing = doing
        self._pending: list[tuple[IoTicket, Sequence[str]]] = []
        self._failure: Optional[BaseException] = None

    def add(self, ticket: IoTicket, names: Sequence[str]) -> None:
        """An operation on the tensors of these names, to be waited for by `finish`."""
        self._pending.append((ticket, names))

    def settle(self, ticket: IoTicket, names: Sequence[str]) -> bool:
        """Waits for one operation now. Did it end well? If not, `finish` raises it."""
        error = ticket.exception()
        if error is not None and self._failure is None:
            self._failure = self._told(error, names)
        return error is None

    def finish(self) -> None:
        """Waits for all.

        Raises:
            OSError, ShortReadError: the first failure, with the path and the tensors' names.
        """
        for ticket, names in self._pending:
            self.settle(ticket, names)
        self._pending.clear()
        if self._failure is not None:
            raise self._failure

    def _told(self, error: BaseException, names: Sequence[str]) -> BaseException:
        what = f"{self._doing} {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")
        told = error
        if isinstance(error, OSError) and error.errno is not None:
            told = OSError(error.errno, f"{os.strerror(error.errno)}, {what}", self._path)
        elif isinstance(error, ShortReadError):
            told = _short_read(error, f"{what}: ", self._path)
        if told is not error:
            told.__cause__ = error
        return told


def _short_read(error: ShortReadError, what: str, path: str) -> ShortReadError:
    message = f"{what}{path} ended early: wanted {error.wanted:,} bytes, found {error.found:,}"
    return ShortReadError(message, error.wanted, error.found, path)


@contextlib.contextmanager
def named_errors(path: str) -> Generator[None, None, None]:
    """Errors about a descriptor, or about no file, become errors about the path."""
    try:
        yield
    except ShortReadError as error:
        if error.filename == path:
            raise
        raise _short_read(error, "", path) from error
    except OSError as error:
        is_named = error.filename is not None and not str(error.filename).startswith("<file descriptor")
        if error.errno is None or is_named:
            raise
        raise OSError(error.errno, os.strerror(error.errno), path) from error


def handle_or_own(aio_handle: Optional[AioHandle]) -> ContextManager[AioHandle]:
    """The caller's handle, left open, or one that is closed at the end of the block."""
    if aio_handle is not None:
        return contextlib.nullcontext(aio_handle)
    return make_handle(_BLOCK_BYTES, _QUEUE_DEPTH)
