"""How a coroutine waits for a ticket: by an eventfd in its loop, not by a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Callable, Protocol


class Awaited(Protocol):
    """What can be awaited here: a ticket."""

    def done(self) -> bool: ...

    def wait(self) -> int: ...


class CompletionEvents:
    """The futures that wait for one handle's tickets, in any number of loops.

    The handle signals `fd` whenever something has come back from the kernel; the loop that wakes lets
    the handle do its work and settles every future whose ticket has ended.
    """

    def __init__(self, poll: Callable[[], None]) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = poll
        self._lock = threading.Lock()
        self._waiting: list[tuple[Awaited, asyncio.Future[None]]] = []
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}

    async def wait_for(self, ticket: Awaited) -> int:
        if ticket.done():
            return ticket.wait()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting.append((ticket, future))
            self._loops[loop] = self._loops.get(loop, 0) + 1
        loop.add_reader(self.fd, self._wake)
        try:
            self._wake()  # it may have ended before the reader was there
            await future
        finally:
            self._leave(loop, future)
        return ticket.wait()

    def _wake(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # another loop was faster, or nothing has come
        self._poll()
        with self._lock:
            ended = [future for ticket, future in self._waiting if ticket.done()]
            self._waiting = [pair for pair in self._waiting if pair[1] not in ended]
        for future in ended:
            future.get_loop().call_soon_threadsafe(_settle, future)

    def _leave(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        with self._lock:
            self._waiting = [pair for pair in self._waiting if pair[1] is not future]
            self._loops[loop] -= 1
            is_last = self._loops[loop] == 0
            if is_last:
                del self._loops[loop]
        if is_last:
            loop.remove_reader(self.fd)

    def close(self) -> None:
        """Lets every waiter see that its ticket has ended, and closes the descriptor."""
        self._wake()
        os.close(self.fd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
