"""Timing: what takes how long and how much CPU, in interleaved rounds, medians."""

from __future__ import annotations

import resource
import statistics
import time
from typing import Callable, Mapping, NamedTuple, Optional


class Cost(NamedTuple):
    """Medians over the rounds, in seconds: wall clock and CPU of this process."""

    wall: float
    cpu: float


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def interleaved(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before_each: Optional[Callable[[str], object]] = None,
) -> dict[str, Cost]:
    """Runs every work once in each round, in turn, after one round that is not counted.

    `before_each` is called with each work's name before it, and is not timed.
    """
    walls: dict[str, list[float]] = {name: [] for name in works}
    cpus: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            if before_each is not None:
                before_each(name)
            cpu, wall = cpu_seconds(), time.perf_counter()
            work()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            if number > 0:
                walls[name].append(wall)
                cpus[name].append(cpu)
    return {name: Cost(statistics.median(walls[name]), statistics.median(cpus[name])) for name in works}
