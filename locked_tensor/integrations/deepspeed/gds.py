"""What `GDSBuilder().load()` returns: a handle that moves GPU memory by cuFile, CPU memory as ever."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generator, Optional, Union

import torch

from locked_tensor.integrations.cufile import cufile, why_unusable
from locked_tensor.integrations.deepspeed.async_io import ALIGNMENT_BYTES, DeepSpeedAioHandle

__all__ = ["gds_handle", "why_unusable"]

FileName = Union[str, bytes, "os.PathLike[str]", int]


class gds_handle(DeepSpeedAioHandle):
    """DeepSpeed's `gds_handle`: GPU tensors by cuFile, CPU tensors by the `AioHandle` that this is.

    GPU tensors are contiguous; `intra_op_parallelism` threads share each transfer. A transfer starts
    after what the tensor's current stream has been given.

    Raises:
        CuFileUnusable: cuFile is not usable here; the message names the reason and the remedy.
        ValueError, TypeError: as `locked_tensor.aio_handle`.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._cufile = cufile()
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._threads = ThreadPoolExecutor(intra_op_parallelism, thread_name_prefix="gds")
        self._pending: list[list[Future[None]]] = []
        self._pending_lock = threading.Lock()

    # --- GPU memory that cuFile knows ---

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A one-dimensional tensor on the example's GPU, with its dtype, known to cuFile."""
        tensor = torch.empty(num_elem, dtype=example_tenosr.dtype, device=example_tenosr.device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undoes `new_pinned_device_tensor`; the memory goes with the tensor."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Makes a GPU tensor's memory known to cuFile; False when cuFile refuses, and it moves all the same."""
        return self._cufile.register_buffer(_contiguous(tensor).data_ptr(), tensor.nbytes)

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undoes `pin_device_tensor`; False when there was nothing to undo."""
        return self._cufile.deregister_buffer(tensor.data_ptr())

    # --- transfers ---

    def read(self, buffer: torch.Tensor, filename: FileName, validate: bool, file_offset: int = 0) -> int:
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(
        self, buffer: torch.Tensor, filename: FileName, validate: bool, file_offset: int = 0, *, durable: bool = False
    ) -> int:
        self.pwrite(buffer, filename, validate, False, file_offset, durable=durable)
        return 0

    def pread(self, buffer: torch.Tensor, filename: FileName, validate: bool, *arguments: Any, **named: Any) -> int:
        if not buffer.is_cuda:
            return super().pread(buffer, filename, validate, *arguments, **named)
        return self._run("read", buffer, filename, *_async_and_offset(*arguments, **named))

    def pwrite(self, buffer: torch.Tensor, filename: FileName, validate: bool, *arguments: Any, **named: Any) -> int:
        if not buffer.is_cuda:
            return super().pwrite(buffer, filename, validate, *arguments, **named)
        if named.pop("durable", False):
            raise ValueError("cuFile writes are not durable by themselves: call fsync(file) after them")
        return self._run("write", buffer, filename, *_async_and_offset(*arguments, **named))

    def sync_pread(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(
        self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0, *, durable: bool = False
    ) -> int:
        return self.pwrite(buffer, filename, False, False, file_offset, durable=durable)

    def async_pread(
        self,
        buffer: torch.Tensor,
        filename: Optional[FileName] = None,
        file_offset: int = 0,
        *,
        fd: Optional[int] = None,
    ) -> int:
        return self.pread(buffer, _one_file(filename, fd), False, True, file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: Optional[FileName] = None,
        file_offset: int = 0,
        *,
        fd: Optional[int] = None,
        durable: bool = False,
    ) -> int:
        return self.pwrite(buffer, _one_file(filename, fd), False, True, file_offset, durable=durable)

    def wait(self) -> int:
        """Operations completed since the last wait, of GPU and CPU tensors. Raises the first failure, all being done."""
        with self._pending_lock:
            pending, self._pending = self._pending, []
        failures = [failure for parts in pending if (failure := _first_failure(parts)) is not None]
        count = super().wait()
        if failures:
            raise failures[0]
        return count + len(pending)

    def close(self) -> None:
        """Finishes what is in flight and releases everything. Idempotent. Raises what `wait` would have raised."""
        try:
            if not self.closed:
                self.wait()
        finally:
            self._threads.shutdown()
            super().close()

    def _run(self, operation: str, buffer: torch.Tensor, filename: FileName, is_async: bool, file_offset: int) -> int:
        if file_offset < 0:
            raise ValueError(f"file_offset must not be negative, got {file_offset}")
        if self.closed:
            raise ValueError("the handle is closed")
        parts = self._start(operation, _contiguous(buffer), filename, file_offset)
        if is_async:
            with self._pending_lock:
                self._pending.append(parts)
            return 0
        failure = _first_failure(parts)
        if failure is not None:
            raise failure
        return 1

    def _start(self, operation: str, buffer: torch.Tensor, filename: FileName, file_offset: int) -> list[Future[None]]:
        torch.cuda.current_stream(buffer.device).synchronize()
        share = -(-buffer.nbytes // self.get_intra_op_parallelism())
        share = max(-(-share // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, ALIGNMENT_BYTES)
        with _opened(filename, operation) as fd:
            return [
                self._threads.submit(
                    self._move, operation, buffer, (begin, min(share, buffer.nbytes - begin)), os.dup(fd), file_offset, filename
                )
                for begin in range(0, buffer.nbytes, share)
            ]

    def _move(
        self, operation: str, buffer: torch.Tensor, span: tuple[int, int], fd: int, file_offset: int, filename: FileName
    ) -> None:
        name = filename if isinstance(filename, int) else os.fsdecode(filename)
        try:
            with self._cufile.registered_file(fd) as handle:
                self._cufile.transfer(operation, handle, buffer.data_ptr(), span, file_offset + span[0], name)
        finally:
            os.close(fd)


@contextmanager
def _opened(filename: FileName, operation: str) -> Generator[int, None, None]:
    if isinstance(filename, int):
        yield filename
        return
    flags = os.O_RDONLY if operation == "read" else os.O_RDWR | os.O_CREAT
    fd = os.open(filename, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _first_failure(parts: list[Future[None]]) -> Optional[BaseException]:
    failures = [part.exception() for part in parts]
    return next((failure for failure in failures if failure is not None), None)


def _async_and_offset(*arguments: Any, **named: Any) -> tuple[bool, int]:
    """The arguments `async` and `file_offset`, however they were passed."""
    given = dict(zip(("async", "file_offset"), arguments), **named)
    return bool(given["async"]), int(given.get("file_offset", 0))


def _one_file(filename: Optional[FileName], fd: Optional[int]) -> FileName:
    if (filename is None) == (fd is None):
        raise ValueError("give either filename or fd")
    return filename if filename is not None else fd  # type: ignore[return-value]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError(f"a contiguous GPU tensor is needed, got device {tensor.device}, strides {tensor.stride()}")
    return tensor
