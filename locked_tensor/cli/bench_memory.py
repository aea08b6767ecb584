"""`locked-tensor bench memory`: allocating, reusing, looking up."""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from typing import Any, Callable, Optional

import numpy
import torch

import locked_tensor as lt
from locked_tensor.cli.bench import Figure, add_output_options, add_rounds_option, show
from locked_tensor.cli.measure import interleaved
from locked_tensor.cli.peers import deepspeed_aio

SIZES = (4 << 10, 1 << 20, 64 << 20, 1 << 30)
PAIRS = 200  # of one measurement


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser(
        "memory", help="allocation, reuse and lookup of locked memory", description=__doc__
    )
    add_output_options(parser)
    add_rounds_option(parser)
    parser.set_defaults(run=lambda chosen: show("bench memory", figures(chosen.rounds), chosen.json, chosen.plot))


def figures(rounds: int) -> list[Figure]:
    found: list[Figure] = []
    found += _reuse(rounds)
    found += _fresh_gibibyte(rounds)
    found += _exactness()
    found += _fragmentation()
    found += _small_tensors()
    found += _lookup(rounds)
    found += _outside(rounds)
    found += _huge_share()
    return found


def _pairs(handle: Any, nbytes: int, count: int) -> Callable[[], None]:
    example = torch.empty(0, dtype=torch.uint8)

    def work() -> None:
        for _ in range(count):
            handle.free_cpu_locked_tensor(handle.new_cpu_locked_tensor(nbytes, example))

    return work


def _deepspeed_handle() -> Any:
    module = deepspeed_aio()
    return module and module.aio_handle(1 << 20, 32, False, True, 1)


def _reuse(rounds: int) -> list[Figure]:
    found = []
    lt.set_cache_limit(2 << 30)
    with lt.aio_handle() as handle:
        for nbytes in SIZES:
            cost = interleaved({"pair": _pairs(handle, nbytes, PAIRS)}, rounds)["pair"]
            found.append(
                Figure(f"reuse of a cached block, {nbytes >> 10:,} KiB: new + free", cost.wall / PAIRS * 1e6, "us the pair")
            )
        peer = _deepspeed_handle()
        if peer is not None:
            costs = interleaved(
                {"ours": _pairs(handle, 64 << 20, PAIRS), "theirs": _pairs(peer, 64 << 20, 3)}, rounds
            )
            ratio = (costs["theirs"].wall / 3) / (costs["ours"].wall / PAIRS)
            found.append(Figure("the pair at 64 MiB, DeepSpeed's time / ours", ratio, "x"))
    lt.empty_cache()
    return found


def _fresh_gibibyte(rounds: int) -> list[Figure]:
    example = torch.empty(0, dtype=torch.uint8)
    live: list[torch.Tensor] = []

    def allocate() -> None:
        with lt.locked_memory():
            live.append(torch.empty(1 << 30, dtype=torch.uint8))

    def give_back() -> None:
        live.clear()
        lt.empty_cache()

    works: dict[str, Callable[[], object]] = {"ours": allocate, "given back": give_back}
    peer = _deepspeed_handle()
    if peer is not None:
        works["theirs"] = lambda: live.append(peer.new_cpu_locked_tensor(1 << 30, example))
        works["theirs given back"] = lambda: peer.free_cpu_locked_tensor(live.pop())
    costs = interleaved(works, rounds)
    found = [
        Figure("1 GiB locked, nothing cached", costs["ours"].wall * 1e3, "ms"),
        Figure("1 GiB given back to the system", costs["given back"].wall * 1e3, "ms"),
    ]
    if peer is not None:
        ratio = costs["theirs"].wall / costs["ours"].wall
        found.append(Figure("1 GiB locked, DeepSpeed's time / ours", ratio, "x"))
    return found


def _exactness() -> list[Figure]:
    worst = 0
    for nbytes in (1 << 20, (1 << 20) + 1, 3 << 20, (64 << 20) + 4097):
        before = lt.memlock_limit().locked
        with lt.locked_memory():
            tensor = torch.empty(nbytes, dtype=torch.uint8)
        worst = max(worst, lt.memlock_limit().locked - before - nbytes)
        del tensor
        lt.empty_cache()
    return [Figure("locked beyond what was asked, tensors of 1 MiB and more, worst", worst, "bytes")]


def _drawn_tensor(choose: random.Random) -> torch.Tensor:
    return lt._C.new_claimed_tensor(int(2 ** choose.uniform(9, 23)), torch.uint8)


def _fragmentation() -> list[Figure]:
    found = []
    for name, limit in (("0", 0), ("default", None)):
        lt.empty_cache()
        limit_before = lt.memory_stats()["cached_bytes.limit"]
        if limit is not None:
            lt.set_cache_limit(limit)
        choose = random.Random(8212)
        live: list[Optional[torch.Tensor]] = [_drawn_tensor(choose) for _ in range(2000)]
        worst = 0.0
        for _ in range(10):
            for index in choose.sample(range(2000), 1000):
                live[index] = None
            worst = max(worst, lt.memory_reserved() / lt.memory_allocated() if limit == 0 else 0.0)
            for index in range(2000):
                if live[index] is None:
                    live[index] = _drawn_tensor(choose)
            worst = max(worst, lt.memory_reserved() / lt.memory_allocated())
        found.append(Figure(f"2,000 tensors of 512 B to 8 MiB, refilled: locked / live, cache limit {name}", worst, "x"))
        del live
        lt.set_cache_limit(limit_before)
    lt.empty_cache()
    return found


def _count_maps() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def _small_tensors() -> list[Figure]:
    before = _count_maps()
    live = [lt._C.new_claimed_tensor(4096, torch.uint8) for _ in range(100_000)]
    found = Figure("100,000 tensors of 4 KiB: new lines in /proc/self/maps", _count_maps() - before, "lines")
    del live
    lt.empty_cache()
    return [found]


def _lookup(rounds: int) -> list[Figure]:
    with lt.locked_memory():
        pool = torch.empty(1 << 20, dtype=torch.uint8)
    view = pool[4096:8192]
    count = 20_000

    def ask() -> None:
        for _ in range(count):
            lt.is_locked(view)

    one = interleaved({"one": ask}, rounds)["one"].wall / count
    # A range of its own for each page of an array that torch did not allocate.
    base = numpy.zeros((100_001, 4096), dtype=numpy.uint8)
    whole = torch.from_numpy(base).view(-1)[-base.ctypes.data % 4096 :]
    pages = [torch.from_numpy(page) for page in whole[: 100_000 * 4096].view(100_000, 4096).numpy()]
    for page in pages:
        lt.lock_(page)
    ranges = lt.memory_stats()["ranges.current"]
    many = interleaved({"many": ask}, rounds)["many"].wall / count
    del pages
    return [
        Figure("is_locked(view), one range", one * 1e6, "us"),
        Figure(f"is_locked(view), {ranges:,} ranges", many * 1e6, "us"),
        Figure("the second / the first", many / one, "x"),
    ]


# Installing cannot be undone, so before and after are measured in fresh processes, several.
_BEFORE_AND_AFTER = """
import statistics, timeit, torch, locked_tensor as lt
def measure():
    return min(timeit.repeat(lambda: torch.empty(1024), number=20000, repeat=9))
measure()
before = measure()
with lt.locked_memory():
    pass
open("/dev/stdout", "w").write(str(measure() / before))
"""


def _outside(rounds: int) -> list[Figure]:
    program = [sys.executable, "-c", _BEFORE_AND_AFTER]
    ratios = [
        float(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
        for _ in range(max(5, rounds))
    ]
    what = "torch.empty(1024) outside the context, after / before the first"
    return [Figure(what, statistics.median(ratios), "x")]


def _huge_share() -> list[Figure]:
    with lt.locked_memory():
        tensor = torch.empty(1 << 30, dtype=torch.uint8)
    huge, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            fields = line.split()
            if "-" in fields[0] and not fields[0].endswith(":"):
                begin, end = (int(part, 16) for part in fields[0].split("-"))
                inside = begin < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end
            elif inside and fields[0] == "AnonHugePages:":
                huge += int(fields[1]) * 1024
    return [Figure("share of a 1 GiB tensor in huge pages", huge / tensor.nbytes, "")]
