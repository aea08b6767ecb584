"""cuFile (GPUDirect Storage) by its C functions: whether it is here, and transfers of GPU memory.

Names and contracts: the cuFile API reference of NVIDIA's GPUDirect Storage.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import functools
import os
from typing import Generator, Union

import torch

from locked_tensor.errors import ShortReadError

_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_OP_BASE = 5000  # CUFILEOP_BASE_ERR: what is above it is cuFile's own number, below it an errno
LIBRARIES = ("libcufile.so.0", "libcufile.so")
REMEDY = "install GPUDirect Storage (CUDA's gds packages, or pip's nvidia-cufile) on a machine with an NVIDIA GPU"


class _Error(ctypes.Structure):
    _fields_ = [("operation", ctypes.c_int), ("driver", ctypes.c_int)]


class _FileOrHandle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("handle", ctypes.c_void_p)]


class _Description(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("file", _FileOrHandle), ("file_system", ctypes.c_void_p)]


class CuFileUnusable(OSError):
    """cuFile is not here, or its driver does not open; the message names the reason and the remedy."""


class CuFile:
    """One opened cuFile library. Thread-safe, as cuFile is.

    Raises:
        CuFileUnusable: its driver does not open.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("cuFileDriverOpen", "cuFileHandleRegister", "cuFileBufRegister", "cuFileBufDeregister"):
            getattr(library, name).restype = _Error
        library.cuFileHandleDeregister.restype = None
        for name in ("cuFileRead", "cuFileWrite"):
            function = getattr(library, name)
            function.restype = ctypes.c_ssize_t
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64]
        refused = library.cuFileDriverOpen()
        if refused.operation != 0:
            raise CuFileUnusable(
                errno.ENODEV, f"cuFile's driver does not open (cuFile error {refused.operation}, CUDA {refused.driver}); {REMEDY}"
            )

    def register_buffer(self, address: int, nbytes: int) -> bool:
        """Makes GPU memory known to cuFile, so that transfers skip its own bounce buffers; False when refused."""
        return self._library.cuFileBufRegister(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0).operation == 0

    def deregister_buffer(self, address: int) -> bool:
        """Undoes `register_buffer`; False when there was nothing to undo."""
        return self._library.cuFileBufDeregister(ctypes.c_void_p(address)).operation == 0

    @contextlib.contextmanager
    def registered_file(self, fd: int) -> Generator[int, None, None]:
        """cuFile's handle of an open descriptor, for `transfer`.

        Raises:
            OSError: cuFile refuses the file (its file system, or how it was opened).
        """
        description = _Description(type=_OPAQUE_FD)
        description.file.fd = fd
        handle = ctypes.c_void_p()
        refused = self._library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(description))
        if refused.operation != 0:
            raise OSError(errno.EOPNOTSUPP, f"cuFile refuses the file (cuFile error {refused.operation})", fd)
        try:
            yield handle.value or 0
        finally:
            self._library.cuFileHandleDeregister(handle)

    def transfer(
        self, operation: str, handle: int, base: int, span: tuple[int, int], file_offset: int, filename: Union[str, int]
    ) -> None:
        """Reads or writes (`operation`) a span of the buffer at `base`. Short transfers go on.

        Args:
            handle: of `registered_file`.
            base: GPU address where the buffer begins, as it was registered if it was.
            span: where in the buffer, and how much: offset and length in bytes.
            file_offset: where in the file, in bytes.
            filename: for messages.

        Raises:
            OSError: what the kernel or cuFile said.
            ShortReadError: the file ended first.
        """
        function = self._library.cuFileRead if operation == "read" else self._library.cuFileWrite
        begin, nbytes = span
        moved = 0
        while moved < nbytes:
            ctypes.set_errno(0)
            result = function(handle, base, nbytes - moved, file_offset + moved, begin + moved)
            if result < 0:
                raise _failure(operation, result, ctypes.get_errno(), filename)
            if result == 0:
                raise ShortReadError(
                    f"{filename} ended {nbytes - moved:,} bytes before the buffer was full", nbytes, moved, str(filename)
                )
            moved += result


def _failure(operation: str, result: int, code: int, filename: Union[str, int]) -> OSError:
    if result == -1:
        return OSError(code, os.strerror(code), filename)
    if -result < _OP_BASE:
        return OSError(-result, os.strerror(-result), filename)
    return OSError(errno.EIO, f"cuFile {operation} failed (cuFile error {-result})", filename)


def _load() -> CuFile:
    if not torch.cuda.is_available():
        raise CuFileUnusable(errno.ENODEV, f"this torch sees no GPU; {REMEDY}")
    refusals = []
    for name in LIBRARIES:
        try:
            return CuFile(ctypes.CDLL(name, use_errno=True))
        except CuFileUnusable:
            raise
        except OSError as error:
            refusals.append(str(error))
    raise CuFileUnusable(errno.ENOENT, f"cuFile does not load ({refusals[0]}); {REMEDY}")


@functools.lru_cache(maxsize=1)
def cufile() -> CuFile:
    """The process's cuFile, opened at the first call and kept.

    Raises:
        CuFileUnusable: with the reason and the remedy.
    """
    return _load()


def why_unusable() -> str:
    """Empty where cuFile works; else the reason and, after "; ", the remedy."""
    try:
        cufile()
    except CuFileUnusable as error:
        return str(error.strerror)
    return ""
