"""A private folder for swap files: gone on close, at exit, and at the next start after a crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Callable, Union

FolderPath = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]

_PREFIX = "locked_tensor-swap-"
_LOCK = "in-use"

# Note [Leftovers] A folder's lock file is held by flock(2) from before anyone else may look at it until
# its process has ended, however it ended. So whoever can take the lock has found a dead process's folder.
# Making a folder and looking for leftovers exclude each other by a lock on the parent folder itself.


class SwapFolder:
    """A folder of mode 0700 inside `parent`, for this process alone, whatever its rank.

    Folders that crashed processes left in `parent` are removed first.

    Raises:
        OSError: `parent` is missing, not a folder, or may not be written.
        TypeError: it is no path.
    """

    def __init__(self, parent: FolderPath) -> None:
        self.parent = Path(os.fsdecode(_checked(parent)))
        parent_fd = os.open(self.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(parent_fd, fcntl.LOCK_EX)
            _remove_leftovers(self.parent)
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=self.parent))
            lock_fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        finally:
            os.close(parent_fd)
        self._remove = weakref.finalize(self, _remove_own, self.path, lock_fd, os.getpid())

    def create(self, name: str) -> int:
        """A new file of mode 0600 in the folder, open for reading and writing; its descriptor."""
        path = self.path / name
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Removes the folder and what is in it. Idempotent."""
        self._remove()


def _checked(parent: object) -> FolderPath:
    if not isinstance(parent, (str, bytes, os.PathLike)):
        raise TypeError(f"folder must be a path or a list of paths, got {type(parent).__name__}")
    return parent


def _remove_own(path: Path, lock_fd: int, owner: int) -> None:
    os.close(lock_fd)
    if os.getpid() == owner:  # a forked child only forgets it
        _remove_tree(path)


def _remove_leftovers(parent: Path) -> None:
    for entry in os.scandir(parent):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            continue
        try:
            lock_fd = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # it died between making the folder and the lock
            _remove_tree(Path(entry.path))
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        finally:
            os.close(lock_fd)
        _remove_tree(Path(entry.path))


def _remove_tree(path: Path) -> None:
    def ignore_missing(_function: Callable[..., Any], _path: str, failure: Any) -> None:
        if not issubclass(failure[0], FileNotFoundError):
            raise failure[1]

    shutil.rmtree(path, onerror=ignore_missing)


def free_bytes(path: FolderPath) -> int:
    """Bytes that an unprivileged process may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
