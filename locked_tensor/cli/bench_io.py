"""`locked-tensor bench io`: bandwidth, CPU and rate of files on the disk at hand, beside its peers."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any, Callable

import torch

import locked_tensor as lt
from locked_tensor.cli.bench import Figure, add_disk_options, add_output_options, add_rounds_option, show
from locked_tensor.cli.bench_files import compare_files
from locked_tensor.cli.disk import check_space, may_wear, work_folder
from locked_tensor.cli.measure import Cost, interleaved
from locked_tensor.cli.peers import deepspeed_aio, fio_figures

Works = dict[str, Callable[[], object]]
DEPTH = 32
BLOCK = 1 << 20
SMALL_BLOCKS = 4096  # of 4 KiB, in the large tensor
FILES = 4  # of --bytes, there at once at most
WRITES_EACH_ROUND = 17  # of --bytes, about, with every peer there


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("io", help="reading and writing files", description=__doc__)
    add_output_options(parser)
    add_disk_options(parser, 1 << 30)
    add_rounds_option(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="beside fio and DeepSpeed also NIXL, torch.save, safetensors and numpy, where installed",
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.bytes < SMALL_BLOCKS * 4096:
        raise ValueError(f"--bytes must be at least {SMALL_BLOCKS * 4096:,}, got {chosen.bytes:,}")
    check_space(chosen.folder, FILES * chosen.bytes)
    written = WRITES_EACH_ROUND * chosen.bytes * (chosen.rounds + 1)
    if not may_wear([chosen.folder], written, chosen.yes):
        return 1
    found = figures(chosen.folder, chosen.bytes, chosen.rounds, chosen.compare)
    return show("bench io", found, chosen.json, chosen.plot)


def figures(folder: Path, nbytes: int, rounds: int, is_compared: bool = False) -> list[Figure]:
    with work_folder(folder, "bench") as work:
        bench = _Bench(work, nbytes, rounds)
        found = bench.run()
        return found + compare_files(work, bench.pool, rounds) if is_compared else found


class _Bench:
    def __init__(self, work: Path, nbytes: int, rounds: int) -> None:
        self.path = work / "file"
        self.peer_path = work / "peer"
        self.fresh_path = work / "fresh"
        self.nbytes = nbytes
        self.rounds = rounds
        with lt.locked_memory():
            self.pool = torch.empty(nbytes, dtype=torch.uint8).fill_(7)
        self.found: list[Figure] = []

    def run(self) -> list[Figure]:
        with lt.aio_handle(BLOCK, DEPTH) as handle:
            handle.sync_pwrite(self.pool, self.path)
            handle.sync_pwrite(self.pool, self.peer_path)
            self.large(handle)
            self.views(handle)
            self.ordinary(handle)
            self.unaligned(handle)
            self.fresh(handle)
        self.small()
        return self.found

    def add(self, what: str, value: float, unit: str) -> None:
        self.found.append(Figure(what, value, unit))

    def add_cost(self, what: str, cost: Cost, nbytes: int) -> None:
        low, high = nbytes / cost.wall_most / 1e9, nbytes / cost.wall_least / 1e9
        self.found.append(Figure(what, nbytes / cost.wall / 1e9, "GB/s", low, high))
        self.add(f"{what}: CPU", cost.cpu / (nbytes / 1e9), "s/GB")

    # --- 1 GiB of locked memory beside fio and DeepSpeed ---

    def large(self, handle: lt.AioHandle) -> None:
        default = lt.aio_handle()
        works: Works = {
            "write": lambda: handle.sync_pwrite(self.pool, self.path),
            "read": lambda: handle.sync_pread(self.pool, self.path),
            "write, default settings": lambda: default.sync_pwrite(self.pool, self.path),
            "read, default settings": lambda: default.sync_pread(self.pool, self.path),
        }
        works.update(self.deepspeed_works())
        fio: dict[str, list[tuple[float, float, float]]] = {"read": [], "write": []}

        def run_fio(operation: str) -> None:
            figures = fio_figures(self.peer_path, self.nbytes, operation, BLOCK, DEPTH)
            if figures is not None:
                fio[operation].append(figures)

        works["fio write"] = lambda: run_fio("write")
        works["fio read"] = lambda: run_fio("read")
        costs = interleaved(works, self.rounds)
        for name in ("write", "read", "write, default settings", "read, default settings"):
            self.add_cost(f"locked, {name}", costs[name], self.nbytes)
        for operation in ("write", "read"):
            speed = self.nbytes / costs[operation].wall
            default_speed = self.nbytes / costs[f"{operation}, default settings"].wall
            used = costs[operation].cpu / (self.nbytes / 1e9)
            if fio[operation]:
                middle = sorted(fio[operation])[len(fio[operation]) // 2]
                self.add(f"{operation}: our bandwidth / fio's", speed / middle[0], "x")
                self.add(f"{operation}: default settings / fio's", default_speed / middle[0], "x")
                if middle[1] > 0:  # fio counts milliseconds, which little data does not take
                    self.add(f"{operation}: our CPU / fio's", used / middle[1], "x")
            theirs = [cost for name, cost in costs.items() if name.startswith(f"DeepSpeed {operation}")]
            if theirs:
                best = min(theirs, key=lambda cost: cost.wall)
                self.add(f"{operation}: our bandwidth / DeepSpeed's best", best.wall / costs[operation].wall, "x")
                self.add(f"{operation}: our CPU / DeepSpeed's", costs[operation].cpu / best.cpu, "x")
        default.close()

    def deepspeed_works(self) -> Works:
        module = deepspeed_aio()
        if module is None:
            return {}
        works: Works = {}
        path = str(self.peer_path)
        for depth in (32, 128):
            for threads in (1, 2):
                peer = module.aio_handle(BLOCK, depth, False, True, threads)
                buffer = peer.new_cpu_locked_tensor(self.nbytes, torch.empty(0, dtype=torch.uint8))
                works[f"DeepSpeed write {depth} {threads}"] = partial(peer.sync_pwrite, buffer, path)
                works[f"DeepSpeed read {depth} {threads}"] = partial(peer.sync_pread, buffer, path)
        return works

    # --- views ---

    def views(self, handle: lt.AioHandle) -> None:
        half = self.nbytes // 2
        views = {
            "narrow": self.pool.narrow(0, half, half),
            "whole": self.pool[:half],
            "4 KiB runs": self.pool.view(-1, 8192)[:, :4096],
            "64 KiB runs": self.pool.view(-1, 131072)[:, :65536],
        }
        works: Works = {}
        for name, view in views.items():
            works[f"write {name}"] = partial(handle.sync_pwrite, view, self.path)
            works[f"read {name}"] = partial(handle.sync_pread, view, self.path)
        costs = interleaved(works, self.rounds)
        for operation in ("write", "read"):
            for name in ("narrow", "4 KiB runs", "64 KiB runs"):
                ratio = costs[f"{operation} whole"].wall / costs[f"{operation} {name}"].wall
                self.add(f"{operation}: {name} / contiguous", ratio, "x")

    def ordinary(self, handle: lt.AioHandle) -> None:
        size = self.nbytes // 2
        plain = torch.empty(size, dtype=torch.uint8).fill_(7)
        locked_before = lt.memlock_limit().locked
        works: Works = {
            "write": lambda: handle.sync_pwrite(plain, self.path),
            "read": lambda: handle.sync_pread(plain, self.path),
            "locked write": lambda: handle.sync_pwrite(self.pool[:size], self.path),
            "locked read": lambda: handle.sync_pread(self.pool[:size], self.path),
        }
        module = deepspeed_aio()
        if module is not None:
            peer = module.aio_handle(BLOCK, DEPTH, False, True, 1)
            works["DeepSpeed write"] = lambda: peer.sync_pwrite(plain, str(self.peer_path) + "2")
            works["DeepSpeed read"] = lambda: peer.sync_pread(plain, str(self.peer_path) + "2")
        costs = interleaved(works, self.rounds)
        extra = lt.memlock_limit().locked - locked_before
        for operation in ("write", "read"):
            self.add_cost(f"ordinary, {operation}", costs[operation], size)
            self.add(
                f"{operation}: ordinary / locked", costs[f"locked {operation}"].wall / costs[operation].wall, "x"
            )
            if module is not None:
                ratio = costs[f"DeepSpeed {operation}"].wall / costs[operation].wall
                self.add(f"{operation}: ordinary, ours / DeepSpeed's", ratio, "x")
        self.add("ordinary: extra locked memory", extra / 2**20, "MiB")

    def unaligned(self, handle: lt.AioHandle) -> None:
        odd = self.nbytes - 8192 + 13
        view = self.pool[7 : 7 + odd]  # the file's phase
        other = self.pool[9 : 9 + odd]
        works: Works = {
            "write aligned": lambda: handle.sync_pwrite(self.pool, self.path),
            "write like phase": lambda: handle.sync_pwrite(view, self.path, 7),
            "write other phase": lambda: handle.sync_pwrite(other, self.path, 7),
            "read aligned": lambda: handle.sync_pread(self.pool, self.path),
            "read like phase": lambda: handle.sync_pread(view, self.path, 7),
            "read other phase": lambda: handle.sync_pread(other, self.path, 7),
        }
        costs = interleaved(works, self.rounds)
        for operation in ("write", "read"):
            for phase in ("like phase", "other phase"):
                ratio = costs[f"{operation} aligned"].wall / costs[f"{operation} {phase}"].wall
                self.add(f"{operation}: odd size at offset 7, {phase} / aligned", ratio, "x")

    def fresh(self, handle: lt.AioHandle) -> None:
        def write(prepare: Callable[[int], object]) -> None:
            fd = os.open(self.fresh_path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            prepare(fd)
            handle.async_pwrite(self.pool, fd)
            handle.wait()
            os.close(fd)
            self.fresh_path.unlink()

        def by_path() -> None:
            handle.sync_pwrite(self.pool, self.fresh_path)
            self.fresh_path.unlink()

        costs = interleaved(
            {
                "by path": by_path,
                "ftruncate": lambda: write(lambda fd: os.ftruncate(fd, self.nbytes)),
                "fallocate": lambda: write(lambda fd: os.posix_fallocate(fd, 0, self.nbytes)),
            },
            self.rounds,
        )
        self.add_cost("fresh file", costs["by path"], self.nbytes)
        best = min(costs["ftruncate"].wall, costs["fallocate"].wall)
        self.add("fresh file / the best of sizing it by hand", best / costs["by path"].wall, "x")

    # --- 4 KiB at a time ---

    def small(self) -> None:
        count = SMALL_BLOCKS
        blocks = [self.pool[4096 * i : 4096 * (i + 1)] for i in range(count)]
        path = str(self.path)
        handle = lt.aio_handle(BLOCK, 128)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)

        def calls(target: Any, method: str, tensors: list[torch.Tensor]) -> None:
            call = getattr(target, method)
            for i, block in enumerate(tensors):
                call(block, path, 4096 * i)
            target.wait()

        def batch() -> None:
            handle.submit_batch([lt.IoRequest("read", block, path, 4096 * i) for i, block in enumerate(blocks)])
            handle.wait()

        def one(read: Callable[[int], object]) -> None:
            for i in range(500):
                read(4096 * (i * 7 % count))

        block_view = self.pool[:4096].numpy().data
        works: Works = {
            "async_pwrite": lambda: calls(handle, "async_pwrite", blocks),
            "async_pread": lambda: calls(handle, "async_pread", blocks),
            "submit_batch": batch,
            "preadv": lambda: handle.preadv(blocks, path),
            "sync_pread": lambda: one(lambda offset: handle.sync_pread(blocks[0], path, offset)),
            "os.preadv": lambda: one(lambda offset: os.preadv(fd, [block_view], offset)),
        }
        module = deepspeed_aio()
        if module is not None:
            peer = module.aio_handle(4096, 128, False, True, 1)
            theirs = [
                peer.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.uint8)) for _ in range(count // 16)
            ]
            works["DeepSpeed write"] = lambda: calls(peer, "async_pwrite", theirs)
            works["DeepSpeed read"] = lambda: calls(peer, "async_pread", theirs)
        costs = interleaved(works, self.rounds)
        fio = fio_figures(self.path, 64 << 20, "randread", 4096, 128)
        for name in ("async_pwrite", "async_pread", "submit_batch", "preadv"):
            self.add(f"4 KiB views, {name}", count / costs[name].wall, "per second")
        if module is not None:
            for operation in ("write", "read"):
                theirs_rate = count // 16 / costs[f"DeepSpeed {operation}"].wall
                rate = count / costs[f"async_p{operation}"].wall
                self.add(f"4 KiB views, async_p{operation} / DeepSpeed's", rate / theirs_rate, "x")
        if fio is not None:
            self.add("4 KiB views, submit_batch / fio's IOPS at depth 128", count / costs["submit_batch"].wall / fio[2], "x")
            self.add("4 KiB views, preadv / fio's IOPS at depth 128", count / costs["preadv"].wall / fio[2], "x")
        self.add("one 4 KiB sync_pread / os.preadv, latency", costs["sync_pread"].wall / costs["os.preadv"].wall, "x")
        os.close(fd)
        handle.close()
