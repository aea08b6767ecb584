"""The random operations of `bench soak`, each compared with what an ordinary read or a model says."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import resource
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

import torch

import locked_tensor as lt

FILES = 6
MOST_FILE_BYTES = 8 << 20
Move = Callable[[torch.Tensor, Path, int], object]


@dataclass
class Tally:
    """What was done and what came of it."""

    operations: int = 0
    bytes_moved: int = 0
    faults: int = 0  #: injected
    expected_errors: int = 0  #: seen where one had to be
    wrong_bytes: int = 0
    surprises: list[str] = field(default_factory=list)  #: lost or unexpected errors


class Model:
    """A file and what it must hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = torch.zeros(MOST_FILE_BYTES, dtype=torch.uint8)
        self.size = 0
        path.write_bytes(b"")

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.content[offset : offset + nbytes]

    def write(self, offset: int, data: torch.Tensor) -> None:
        self.part(offset, data.numel()).copy_(data)
        self.size = max(self.size, offset + data.numel())

    def wrong_bytes(self, offset: int, nbytes: int) -> int:
        """Bytes of the range that an ordinary read finds otherwise."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            return differing(self.part(offset, nbytes), tensor_of(file.read(nbytes)))

    def all_wrong_bytes(self) -> int:
        return abs(self.path.stat().st_size - self.size) + self.wrong_bytes(0, self.size)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def differing(wanted: torch.Tensor, found: torch.Tensor) -> int:
    common = min(wanted.numel(), found.numel())
    return int((wanted[:common] != found[:common]).sum()) + abs(wanted.numel() - found.numel())


class Program:
    """Random operations on one handle, on files of its own in `folder`."""

    def __init__(self, handle: lt.AioHandle, folder: Path, seed: int, tally: Tally) -> None:
        self.handle = handle
        self.folder = folder
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.tally = tally
        self.models = [Model(folder / f"file{number}") for number in range(FILES)]
        self.kinds = [self.write] * 6 + [self.read] * 6 + [self.queue] * 3
        self.kinds += [self.fail, self.replace, self.fork, self.few_descriptors]

    def step(self) -> None:
        kind = self.random.choice(self.kinds)
        try:
            kind()
        except Exception as error:  # whatever it is, nothing here may raise: it is told at the end
            self.tally.surprises.append(f"{self.handle.engine}: {kind.__name__}: {error!r}")

    def finish(self) -> None:
        """Compares every file with its model."""
        self.tally.wrong_bytes += sum(model.all_wrong_bytes() for model in self.models)

    # --- what is moved ---

    def offset(self) -> int:
        unit = self.random.choice([1, 512, 4096])
        return self.random.randrange(MOST_FILE_BYTES // 2) // unit * unit

    def nbytes(self) -> int:
        return self.random.choice(
            [self.random.randint(1, 5000), 4096 * self.random.randint(1, 64), self.random.randint(1, 3 << 20)]
        )

    def bytes_of(self, nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=self.generator)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory for so many bytes, in one of the shapes and places that a caller may have."""
        shift = self.random.choice([0, 0, 512, 64, 1])
        kind = self.random.choice(["locked", "ordinary", "strided", "handle's", "in place"])
        if kind == "locked":
            with lt.locked_memory():
                return torch.empty(shift + nbytes, dtype=torch.uint8)[shift:]
        if kind == "handle's":
            return self.handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        if kind == "strided":
            return torch.empty(2 * nbytes, dtype=torch.uint8)[::2]
        tensor = torch.empty(shift + nbytes, dtype=torch.uint8)
        return lt.lock_(tensor)[shift:] if kind == "in place" else tensor[shift:]

    # --- ways to move it ---

    def ways(self, operation: str) -> list[Move]:
        handle = self.handle
        sync, start, submit, list_, simple = (
            getattr(handle, name.format(operation))
            for name in ("sync_p{}", "async_p{}", "submit_p{}", "p{}v", "{}")
        )

        def waited(tensor: torch.Tensor, path: Path, offset: int) -> None:
            start(tensor, path, offset)
            handle.wait()

        def by_descriptor(tensor: torch.Tensor, path: Path, offset: int) -> None:
            descriptor = os.open(path, os.O_RDWR | self.random.choice([0, os.O_DIRECT]))
            try:
                start(tensor, fd=descriptor, file_offset=offset)
            finally:
                os.close(descriptor)  # while it is pending
            handle.wait()

        def in_parts(tensor: torch.Tensor, path: Path, offset: int) -> None:
            cut = self.random.randint(0, tensor.numel())
            list_([tensor[:cut], tensor[cut:]], path, offset)

        def in_a_batch(tensor: torch.Tensor, path: Path, offset: int) -> None:
            cut = self.random.randint(0, tensor.numel())
            first = lt.IoRequest(operation, tensor[:cut], path, offset)
            for ticket in handle.submit_batch([first, (operation, tensor[cut:], path, offset + cut)]):  # type: ignore[list-item]
                ticket.wait()

        def awaited(tensor: torch.Tensor, path: Path, offset: int) -> None:
            async def main() -> None:
                await submit(tensor, path, offset)

            asyncio.run(main())

        ways: list[Move] = [sync, waited, by_descriptor, in_parts, in_a_batch, awaited]
        ways.append(lambda *moved: submit(*moved).wait())
        ways.append(lambda tensor, path, offset: simple(tensor, path, True, offset))
        if operation == "write":
            ways.append(lambda *moved: sync(*moved, durable=True))
        return ways

    def moved(self, nbytes: int) -> None:
        self.tally.operations += 1
        self.tally.bytes_moved += nbytes

    def write(self) -> None:
        model, offset, data = self.random.choice(self.models), self.offset(), self.bytes_of(self.nbytes())
        buffer = self.buffer(data.numel()).copy_(data)
        self.random.choice(self.ways("write"))(buffer, model.path, offset)
        model.write(offset, data)
        self.moved(data.numel())
        self.tally.wrong_bytes += model.wrong_bytes(offset, data.numel())
        self.tally.wrong_bytes += abs(model.path.stat().st_size - model.size)

    def read(self) -> None:
        model = self.random.choice(self.models)
        if model.size == 0:
            return self.write()
        offset = min(self.offset(), model.size - 1)
        nbytes = min(self.nbytes(), model.size - offset)
        buffer = self.buffer(nbytes)
        self.random.choice(self.ways("read"))(buffer, model.path, offset)
        self.moved(nbytes)
        self.tally.wrong_bytes += differing(model.part(offset, nbytes), lt.as_plain(buffer))

    def queue(self) -> None:
        """Many operations at once, some of which fail; buffers of writes go while they are pending."""
        expected: list[str] = []
        for model in self.random.sample(self.models, 4):
            offset = self.offset()
            for _ in range(self.random.randint(1, 8)):
                data = self.bytes_of(self.random.randint(1, 100_000))
                self.handle.async_pwrite(self.buffer(data.numel()).copy_(data), model.path, offset)
                model.write(offset, data)
                self.moved(data.numel())
                offset += data.numel() + self.random.choice([0, 0, 4096])
                if self.random.random() < 0.1:
                    missing = self.folder / f"missing{len(expected)}"
                    self.handle.async_pread(self.buffer(100), missing)
                    expected.append(str(missing))
        self.tally.faults += len(expected)
        try:
            self.handle.wait()
            found = []
        except FileNotFoundError as error:
            found = [error.filename] + [other.filename for other in error.others]  # type: ignore[attr-defined]
        if found == expected:
            self.tally.expected_errors += len(expected)
        else:
            self.tally.surprises.append(f"{self.handle.engine}: wait() raised {found} for {expected}")
        self.tally.wrong_bytes += sum(model.all_wrong_bytes() for model in self.models)

    # --- faults ---

    def expect(self, kind: type[BaseException], number: Optional[int], call: Callable[[], object]) -> None:
        self.tally.faults += 1
        try:
            call()
        except kind as error:
            if number is not None and getattr(error, "errno", None) != number:
                raise
            self.tally.expected_errors += 1
        else:
            self.tally.surprises.append(f"{self.handle.engine}: {kind.__name__} was lost")

    def fail(self) -> None:
        handle, model, buffer = self.handle, self.random.choice(self.models), self.buffer(8192)
        fifo = self.folder / "fifo"
        if not fifo.exists():
            os.mkfifo(fifo)
        choices: list[tuple[type[BaseException], Optional[int], Callable[[], object]]] = [
            (OSError, errno.ENOENT, lambda: handle.sync_pread(buffer, self.folder / "missing")),
            (OSError, errno.EISDIR, lambda: handle.sync_pwrite(buffer, self.folder)),
            (OSError, errno.ESPIPE, lambda: handle.submit_pread(buffer, fifo).wait()),
            (OSError, errno.EFBIG, lambda: self.beyond_size_limit(model, buffer)),
            (lt.ShortReadError, None, lambda: handle.sync_pread(buffer, model.path, model.size)),
            (ValueError, None, lambda: handle.sync_pread(buffer, model.path, -1)),
            (TypeError, None, lambda: handle.sync_pread(buffer.to_sparse(), model.path)),
        ]
        self.expect(*self.random.choice(choices))
        self.tally.wrong_bytes += model.all_wrong_bytes()

    def beyond_size_limit(self, model: Model, buffer: torch.Tensor) -> None:
        """A write past RLIMIT_FSIZE, which also sends SIGXFSZ."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, hard))
        try:
            self.handle.sync_pwrite(buffer, model.path, MOST_FILE_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, action)

    def replace(self) -> None:
        """Another file takes the name: the next read finds that one."""
        model, data = self.random.choice(self.models), self.bytes_of(self.nbytes())
        following = self.folder / "following"
        following.write_bytes(ctypes.string_at(data.data_ptr(), data.numel()))
        os.replace(following, model.path)
        self.tally.faults += 1
        model.content.zero_()
        model.size = 0
        model.write(0, data)
        buffer = self.buffer(data.numel())
        self.handle.sync_pread(buffer, model.path)
        self.moved(data.numel())
        self.tally.wrong_bytes += differing(data, lt.as_plain(buffer))

    def fork(self) -> None:
        """A child comes and goes while an operation is in flight; to it nothing is locked."""
        model, offset, data = self.random.choice(self.models), self.offset(), self.bytes_of(1 << 20)
        with lt.locked_memory():
            buffer = torch.empty(data.numel(), dtype=torch.uint8).copy_(data)
        self.handle.async_pwrite(buffer, model.path, offset)
        self.tally.faults += 1
        child = os.fork()
        if child == 0:
            os._exit(1 if lt.is_locked(buffer) else 0)
        status = os.waitpid(child, 0)[1]
        self.handle.wait()
        model.write(offset, data)
        self.moved(data.numel())
        self.tally.wrong_bytes += model.wrong_bytes(offset, data.numel())
        if status != 0:
            self.tally.surprises.append(f"{self.handle.engine}: a forked child ended with status {status}")

    def few_descriptors(self) -> None:
        """More files than the process may open, of which none is missed."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.tally.faults += 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, limits[1]))
        paths = [self.folder / f"small{number}" for number in range(20)]
        try:
            for number, path in enumerate(paths):
                self.handle.async_pwrite(torch.full((100,), number, dtype=torch.uint8), path)
            self.handle.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number, path in enumerate(paths):
            wanted = torch.full((100,), number, dtype=torch.uint8)
            self.tally.wrong_bytes += differing(wanted, tensor_of(path.read_bytes()))
            self.moved(100)
            path.unlink()


def with_signals(work: Callable[[], Any]) -> int:
    """Runs `work` under a signal every millisecond, where this is the main thread; returns how many came."""
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return seen
