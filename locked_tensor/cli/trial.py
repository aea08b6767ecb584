"""One measurement of one handle's settings: a locked tensor written to files and read back."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Sequence

import torch

import locked_tensor as lt
from locked_tensor.cli.search import Space, Speeds
from locked_tensor.settings import AioSettings

KIB = 1 << 10
PLAIN_THREADS = 8
PLAIN_BLOCK = 1 << 20


def search_space() -> Space:
    """What this machine lets one choose from."""
    cores = len(os.sched_getaffinity(0))
    return Space(
        block_sizes=[size * KIB for size in (128, 256, 512, 1024, 2048, 4096, 8192)],
        queue_depths=[8, 16, 32, 64, 128, 256],
        parallelisms=[count for count in (1, 2, 4, 8) if count <= cores],
        engines=[info.name for info in lt.engines() if info.usable],
    )


class Trial:
    """Files of one size in each folder, and the locked tensor that is moved to and from them.

    Args:
        folders: a file in each; the tensor is spread evenly over them, at once.
        nbytes: of the tensor; rounded down to whole blocks for each folder.
    """

    def __init__(self, folders: Sequence[Path], nbytes: int) -> None:
        share = nbytes // len(folders) // PLAIN_BLOCK * PLAIN_BLOCK
        if share == 0:
            raise ValueError(f"--bytes must give each folder at least {PLAIN_BLOCK:,}, got {nbytes:,} in all")
        self.paths = [folder / "file" for folder in folders]
        self.nbytes = share * len(folders)
        with lt.locked_memory():
            self.pool = torch.empty(self.nbytes, dtype=torch.uint8).fill_(7)
        self.parts = list(self.pool.split(share))
        with lt.aio_handle() as handle:
            self._move(handle.async_pwrite, handle)

    def measure(self, settings: AioSettings) -> Speeds:
        """Bytes a second of writing and of reading, once each, over files that are there."""
        with lt.aio_handle(
            settings.block_size,
            settings.queue_depth,
            intra_op_parallelism=settings.intra_op_parallelism,
            engine=settings.engine,
        ) as handle:
            for part, path in zip(self.parts, self.paths):  # opens the files and registers the memory
                handle.sync_pread(part[:4096], path)
            return {
                "write": self._timed(lambda: self._move(handle.async_pwrite, handle)),
                "read": self._timed(lambda: self._move(handle.async_pread, handle)),
            }

    def measure_plainly(self, operation: str) -> float:
        """Bytes a second without a handle: threads with os.preadv or os.pwritev of blocks, O_DIRECT."""
        tasks = [
            (part[begin : begin + PLAIN_BLOCK], number, begin)
            for number, part in enumerate(self.parts)
            for begin in range(0, part.nbytes, PLAIN_BLOCK)
        ]
        descriptors = [os.open(path, os.O_RDWR | os.O_DIRECT) for path in self.paths]
        call: Callable[..., int] = os.pwritev if operation == "write" else os.preadv

        def work(task: tuple[torch.Tensor, int, int]) -> None:
            block, number, offset = task
            call(descriptors[number], [block.numpy()], offset)

        try:
            with ThreadPoolExecutor(PLAIN_THREADS) as workers:
                return self._timed(lambda: list(workers.map(work, tasks)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _move(self, start: Callable[..., int], handle: lt.AioHandle) -> None:
        for part, path in zip(self.parts, self.paths):
            start(part, path)
        handle.wait()

    def _timed(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return self.nbytes / (time.perf_counter() - began)
