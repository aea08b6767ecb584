"""How a coroutine waits for a ticket: by an eventfd in its loop, not by a thread."""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import Protocol


class Awaited(Protocol):
    """What can be awaited here: a ticket."""

    def done(self) -> bool: ...

    def wait(self) -> int: ...


class Polled(Protocol):
    """What does its work when polled: a handle."""

    def _poll(self) -> None: ...


class CompletionEvents:
    """The futures that wait for one handle's tickets, in any number of loops.

    The handle signals `fd` whenever something has come back from the kernel; the loop that wakes lets
    the handle do its work and settles every future whose ticket has ended.

    The descriptor lives as long as this object: a handle that is dropped without close() takes it
    along, and a loop that still watches it keeps it open, so its number is never another file's. The
    handle is known weakly: each ticket that is waited for holds it.
    """

    def __init__(self, handle: Polled) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._handle = weakref.ref(handle)
        # Changed by single dict operations only, under no lock: a coroutine may be collected, and
        # leave, in the middle of any Python code.
        self._waiting: dict[asyncio.Future[None], Awaited] = {}

    async def wait_for(self, ticket: Awaited) -> int:
        if ticket.done():
            return ticket.wait()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[future] = ticket
        loop.add_reader(self.fd, self.wake)
        try:
            self.wake()  # it may have ended before the reader was there
            await future
        finally:
            self._leave(loop, future)
        return ticket.wait()

    def wake(self) -> None:
        """Lets the handle work, and every waiter see whether its ticket has ended."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # another loop was faster, or nothing has come
        handle = self._handle()
        if handle is not None:
            handle._poll()
        for future, ticket in self._waiting.copy().items():
            if ticket.done() and self._waiting.pop(future, None) is not None:
                _settle_in_its_loop(future)

    def _leave(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        self._waiting.pop(future, None)
        is_last = all(other.get_loop() is not loop for other in self._waiting.copy())
        if is_last and not loop.is_closed():  # a closed loop watches nothing
            loop.remove_reader(self.fd)


def _settle_in_its_loop(future: asyncio.Future[None]) -> None:
    loop = future.get_loop()
    try:
        loop.call_soon_threadsafe(_settle, future)
    except RuntimeError:
        if not loop.is_closed():  # in a closed loop nobody waits any more
            raise


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
