"""The new files that savers write before these take their names: whose saver was killed goes with the next save."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from functools import lru_cache
from typing import Callable

# Note [Dead savers] A saver holds a flock(2) on its file until that has its name, and the kernel gives the
# lock up when the process ends, however it ends. So whoever can take the lock has found a dead saver's
# file. A lock may be unknown on other machines that share the folder: the file's name has the boot id of
# the kernel that made it, and nobody touches a file of another one. Between making and locking its file
# a saver may be taken for dead: it looks then whether the file still has a name, and makes another.

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@lru_cache(maxsize=1)
def _prefix() -> str:
    """Of the files that this kernel's savers make."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return f".locked-tensor-{file.read().strip().replace('-', '')}-"


def create(folder: str, open_new: Callable[[str], int]) -> tuple[int, str]:
    """A new file in the folder, and removes those of dead savers there; its descriptor and path.

    Args:
        open_new: opens a path that must not exist yet. The descriptor holds the lock, so it stays open
            until the file has its name.

    Raises:
        OSError: `open_new` refused.
    """
    while True:
        path = os.path.join(folder, f"{_prefix()}{secrets.token_hex(8)}.tmp")
        fd = open_new(path)
        # Without locks (ENOLCK, ENOTSUP) nobody finds anybody dead, and files stay.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink > 0:
            break
        os.close(fd)
    remove_leftovers(folder)
    return fd, path


def remove_leftovers(folder: str) -> None:
    """Removes what savers of this user left in the folder that were killed since this machine started.

    What cannot be looked at or removed stays: no save fails for want of that.
    """
    pattern = re.compile(re.escape(_prefix()) + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if pattern.fullmatch(name):
                with contextlib.suppress(OSError):  # BlockingIOError: its saver lives
                    _remove_if_dead(os.path.join(folder, name))


def _remove_if_dead(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(fd)
