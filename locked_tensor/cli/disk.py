"""What a measurement owes the disk that it writes to, and what it asks of it: room, wear, files that are not cached."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Iterator, Sequence

from rich.console import Console

WEARING_BYTES = 16 << 30  # from here on a warning: some ten-thousandth of what a small drive endures


def check_space(folder: Path, nbytes: int) -> None:
    """Raises ValueError where `nbytes` of new files would leave less than a twentieth of the disk free."""
    usage = shutil.disk_usage(folder)
    if usage.free - nbytes < usage.total // 20:
        raise ValueError(
            f"{folder} has too little free space: this writes files of {nbytes:,} bytes in all, "
            f"{usage.free:,} are free, and a twentieth of the disk ({usage.total // 20:,}) shall stay so"
        )


@contextlib.contextmanager
def work_folder(folder: Path, command: str) -> Iterator[Path]:
    """A new folder in `folder` for a command's files, removed with them.

    Its name is known before it is made: an interrupt at any moment leaves nothing behind.
    """
    path = folder / f"locked-tensor-{command}-{secrets.token_hex(4)}"
    try:
        path.mkdir(mode=0o700)
        yield path
    finally:
        if path.exists():
            shutil.rmtree(path)


def sync_file(path: Path) -> None:
    """The file is on the device when this returns (fsync(2))."""
    with _descriptor(path) as fd:
        os.fsync(fd)


def forget_cached(path: Path) -> None:
    """Drops what the page cache holds of the file, once that is on the device."""
    with _descriptor(path) as fd:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def may_wear(folders: Sequence[Path], nbytes: int, is_agreed: bool) -> bool:
    """Warns before much is written and, where somebody is there to answer, asks.

    Args:
        nbytes: about as much will be written in all, over and over the same files.
        is_agreed: `--yes`: neither warns nor asks.
    """
    if is_agreed or nbytes < WEARING_BYTES:
        return True
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    names = ", ".join(os.fspath(folder) for folder in folders)
    console.print(
        f"This writes up to about {nbytes / 1e9:,.0f} GB to {names}, which wears a flash drive by as much "
        "(--yes: no such warning).",
        markup=False,
    )
    if not (sys.stdin is not None and sys.stdin.isatty()):
        return True
    return console.input("Go on? [y/N] ", markup=False).strip().lower() in ("y", "yes")
