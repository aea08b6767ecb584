"""Opening files for direct I/O, and replacing one in a single step."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Generator, Union

from locked_tensor import temporary

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


def open_direct(path: str, flags: int) -> int:
    """A descriptor with O_DIRECT where the file system takes it, else without; new files get 0666 less umask.

    Raises:
        OSError: open(2) refused, or the path is not a regular file (EISDIR, or ESPIPE for what has no
            offsets).
    """
    with contextlib.suppress(FileNotFoundError):
        _refuse_special(path, os.stat(path).st_mode)  # before open(2), which waits on a FIFO
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct I/O
            raise
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _refuse_special(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.ESPIPE, "not a regular file", path)


@contextlib.contextmanager
def replacing(path: str) -> Generator[int, None, None]:
    """A descriptor of a new file, for direct I/O, that takes the path's place when the block ends well.

    A reader of the path sees the old file or the new one and never a part, also after a loss of power:
    the new file is written in the same folder, synchronised, renamed over the path, and the folder is
    synchronised. A symbolic link stays and its target is replaced; an existing file's permissions are
    kept. When the block raises, the path is as it was and nothing is left in the folder. What a killed
    process leaves there, `.locked-tensor-*.tmp`, goes with the next call for that folder on this machine,
    if it was not started anew meanwhile.

    Raises:
        OSError: the kernel refused, or the path is empty, a directory or a special file.
    """
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        _refuse_special(path, mode)
    if mode is None and path.endswith(os.sep):  # as open(2)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        fd, new = temporary.create(folder, lambda name: open_direct(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, making a new file in its folder", path) from error
    try:
        try:
            yield fd
            if mode is not None:
                os.fchmod(fd, stat.S_IMODE(mode))
            os.fsync(fd)
            os.replace(new, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            raise
    finally:
        os.close(fd)
    sync_folder(folder)


def sync_folder(folder: Union[str, "os.PathLike[str]"]) -> None:
    """What the folder names is on the device when this returns (fsync(2)).

    Raises:
        OSError: the kernel refused.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
