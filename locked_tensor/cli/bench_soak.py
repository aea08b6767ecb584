"""`locked-tensor bench soak`: random operations of every kind on every engine, each of them verified."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

import locked_tensor as lt
from locked_tensor.cli.arguments import duration
from locked_tensor.cli.bench import Figure, add_json_option, show
from locked_tensor.cli.disk import check_space, work_folder
from locked_tensor.cli.soak_program import Program, Tally, with_signals

SLICE_SECONDS = 5.0
ROOM_BYTES = 256 << 20
# What Python's and the C library's allocators may keep of memory that was freed.
ALLOCATOR_SLACK_BYTES = 16 << 20


class Usage(NamedTuple):
    """What this process holds of the kernel's things, once everything that can be freed is."""

    rss_bytes: int
    locked_bytes: int
    descriptors: int
    threads: int

    @staticmethod
    def now() -> Usage:
        gc.collect()
        lt.empty_cache()
        ctypes.CDLL(None).malloc_trim(0)
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        rss, locked = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmLck"))
        return Usage(rss, locked, len(os.listdir("/proc/self/fd")), int(fields["Threads"]))


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("soak", help="random verified operations for a while", description=__doc__)
    add_json_option(parser)
    parser.add_argument("--minutes", type=duration, default=20, help="how long (default: 20)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), metavar="DIR", help="on the disk to use (default: here)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of the operations (default: another each time; it is shown)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Soaks, shows the figures, and returns 1 if a byte was wrong, an error lost or something grew."""
    check_space(chosen.folder, ROOM_BYTES)
    with work_folder(chosen.folder, "soak") as work:
        soak = Soak(work, chosen.seed)
        soak.run(60 * chosen.minutes)
    show(f"bench soak --seed {chosen.seed}", soak.figures(), chosen.json)
    console = Console(highlight=False)
    for surprise in soak.tally.surprises[:20]:
        console.print(surprise, markup=False)
    return 0 if soak.is_well() else 1


class Soak:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.engines = [info.name for info in lt.engines() if info.usable]
        self.tally = Tally()
        self.signals = 0
        self.slices = 0
        self.before = self.after = Usage.now()

    def run(self, seconds: float) -> None:
        """Goes round the engines; the first round, in which threads and caches come to be, is not compared."""
        deadline = time.monotonic() + seconds
        slice_seconds = min(SLICE_SECONDS, seconds / (2 * len(self.engines)))
        self.round(slice_seconds)
        self.before = Usage.now()
        while time.monotonic() < deadline:
            self.round(slice_seconds)
        self.after = Usage.now()

    def round(self, slice_seconds: float) -> None:
        for engine in self.engines:
            self.slice(engine, slice_seconds)

    def slice(self, engine: str, seconds: float) -> None:
        folder = self.folder / str(self.slices)
        self.slices += 1
        folder.mkdir()
        handle = lt.aio_handle(
            self.random.choice([4096, 65536, 1 << 20]),
            self.random.choice([1, 3, 32, 128]),
            self.random.random() < 0.3,
            self.random.random() < 0.5,
            self.random.choice([1, 1, 2]),
            engine=engine,
            direct=self.random.choice(["auto", "auto", "auto", "never"]),
        )
        program = Program(handle, folder, self.random.randrange(1 << 62), self.tally)

        def work() -> None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                program.step()

        with handle:
            if self.random.random() < 0.3:
                self.signals += with_signals(work)
            else:
                work()
            program.finish()
        shutil.rmtree(folder)

    def figures(self) -> list[Figure]:
        tally, growth = self.tally, self.growth()
        return [
            Figure("engines", len(self.engines), ", ".join(self.engines)),
            Figure("operations", tally.operations, "verified"),
            Figure("bytes moved", tally.bytes_moved / 2**30, "GiB"),
            Figure("signals during operations", self.signals, ""),
            Figure("faults injected", tally.faults, ""),
            Figure("errors seen as expected", tally.expected_errors, ""),
            Figure("errors lost or unexpected", len(tally.surprises), "must be 0"),
            Figure("bytes wrong", tally.wrong_bytes, "must be 0"),
            Figure("growth of RSS", growth.rss_bytes / 2**20, "MiB"),
            Figure("growth of VmLck", growth.locked_bytes, "bytes, must be 0"),
            Figure("growth of descriptors", growth.descriptors, "must be 0"),
            Figure("growth of threads", growth.threads, "must be 0"),
        ]

    def growth(self) -> Usage:
        return Usage(*(after - before for before, after in zip(self.before, self.after)))

    def is_well(self) -> bool:
        growth = self.growth()
        return (
            self.tally.wrong_bytes == 0
            and not self.tally.surprises
            and growth.rss_bytes <= ALLOCATOR_SLACK_BYTES
            and growth.locked_bytes <= 0
            and growth.descriptors <= 0
            and growth.threads <= 0
        )
