"""Room on disk for swapped bytes: extents of one file a folder, claimed before they are written."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import resource
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Sequence, Union

import torch

from locked_tensor.errors import InternalError
from locked_tensor.swap.folder import FolderPath, SwapFolder, free_bytes
from locked_tensor.swap.free_space import FreeSpace

PAGE_BYTES = mmap.PAGESIZE


def page_aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, which every file system's direct I/O takes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(eq=False)
class _SwapFile:
    path: Path
    fd: int
    size: int = 0
    free: FreeSpace = field(default_factory=lambda: FreeSpace(0))

    @property
    def used_bytes(self) -> int:
        return self.size - self.free.total

    def take(self, nbytes: int) -> int:
        """The offset of so many bytes, the file made longer if no free piece has them."""
        if self.free.fit(nbytes) is None:
            self._grow(nbytes - self.free.free_at_end(self.size))
        offset = self.free.take(nbytes)
        if offset is None:
            raise InternalError(f"{nbytes} bytes do not fit a file that was made longer for them")
        return offset

    def _grow(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, self.size, nbytes)
        except OSError:
            os.ftruncate(self.fd, self.size)  # what it did get
            raise
        begin = self.size
        self.size += nbytes  # first: what an interrupt leaves here is lost, and not given out twice
        self.free.give_back(begin, nbytes)


@dataclass(frozen=True, eq=False)
class Extent:
    """Bytes of a swap file that are one owner's. Offset and length are whole pages."""

    file: _SwapFile
    offset: int
    nbytes: int

    @property
    def fd(self) -> int:
        return self.file.fd

    @property
    def path(self) -> Path:
        return self.file.path

    def map(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """An ordinary tensor of this dtype and shape over a private map of the file, `offset` bytes
        into the extent (whole pages). Read from disk as it is touched; later writes may show in it."""
        count = torch.Size(shape).numel()
        pages = mmap.mmap(
            self.fd,
            page_aligned(count * dtype.itemsize),
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=self.offset + offset,
        )
        return torch.frombuffer(pages, dtype=dtype, count=count).view(tuple(shape))


class SwapStore:
    """Hands out extents of files in private folders, one in each of `folders` (several devices).

    An extent's blocks are claimed when it is handed out, so a full disk is met here and not when the
    bytes are written. Thread-safe; `free` may be called by finalizers.

    Raises:
        OSError: a folder is missing or may not be written.
        TypeError, ValueError: no path, or an empty list.
    """

    def __init__(self, folders: Union[FolderPath, Iterable[FolderPath]]) -> None:
        parents = _listed(folders)
        if not parents:
            raise ValueError("folder must be a path or a list of paths, got an empty list")
        self._folders = [SwapFolder(parent) for parent in parents]
        self._lock = threading.Lock()
        self._freed: queue.SimpleQueue[Extent] = queue.SimpleQueue()
        self._files = [_create_file(folder) for folder in self._folders]
        self._is_closed = False

    @property
    def folders(self) -> list[Path]:
        """The private folders."""
        return [folder.path for folder in self._folders]

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents that are handed out."""
        with self._lock:
            self._collect()
            return sum(file.used_bytes for file in self._files)

    def allocate(self, nbytes: int) -> Extent:
        """An extent of at least `nbytes`, in the folder with the least in use that has room.

        Raises:
            OSError: no folder has room (ENOSPC, with the bytes wanted and free), the file would exceed
                the largest that may be (EFBIG, with the limit), or another reason why it cannot grow. Nothing has changed then.
        """
        nbytes = page_aligned(max(nbytes, 1))
        with self._lock:
            if self._is_closed:
                raise ValueError("this swap store is closed")
            self._collect()
            failure: OSError = OSError()
            for file in sorted(self._files, key=lambda each: each.used_bytes):
                try:
                    return Extent(file, file.take(nbytes), nbytes)
                except OSError as error:
                    failure = _refusal(error, file, nbytes)
                    if error.errno != errno.ENOSPC:
                        break
            raise failure

    def free(self, extent: Extent) -> None:
        """Takes an extent back. Nothing may be in flight on it."""
        self._freed.put(extent)  # never a lock: this may run in a finalizer, inside any other call

    def forget(self) -> None:
        """Of a forked child: closes its copies of the descriptors. Files and folders are its parent's."""
        if not self._is_closed:  # no lock: a thread that the child does not have may hold it
            self._close_files()

    def close(self) -> None:
        """Removes files and folders. Maps made of them stay readable. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._close_files()

    def _close_files(self) -> None:
        self._is_closed = True
        for file in self._files:
            os.close(file.fd)
        for folder in self._folders:
            folder.close()  # in a child it only forgets it

    def _collect(self) -> None:
        while not self._freed.empty():
            extent = self._freed.get()
            extent.file.free.give_back(extent.offset, extent.nbytes)


def _listed(folders: Any) -> list[Any]:
    is_list = isinstance(folders, Iterable) and not isinstance(folders, (str, bytes, os.PathLike))
    return list(folders) if is_list else [folders]


def _create_file(folder: SwapFolder) -> _SwapFile:
    fd = folder.create("data")
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without direct I/O
            raise
    return _SwapFile(folder.path / "data", fd)


def _refusal(error: OSError, file: _SwapFile, nbytes: int) -> OSError:
    text = f"{error.strerror}: {nbytes:,} more bytes of swap space are needed"
    if error.errno == errno.ENOSPC:
        text += f", {free_bytes(file.path.parent):,} are free"
    elif error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = "of its file system" if limit == resource.RLIM_INFINITY else f'of this process ("ulimit -f"), {limit:,} bytes'
        text += f" in a file of {file.size:,}, which would exceed the largest file {most}"
    return OSError(error.errno, text, str(file.path))
