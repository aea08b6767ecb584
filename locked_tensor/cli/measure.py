"""Timing: what takes how long and how much CPU, in interleaved rounds, medians."""

from __future__ import annotations

import resource
import statistics
import time
from typing import Callable, Mapping, NamedTuple, Optional

from rich.console import Console
from rich.progress import Progress


class Cost(NamedTuple):
    """Medians over the rounds, in seconds: wall clock and CPU of this process; and the ends of the former."""

    wall: float
    cpu: float
    wall_least: float
    wall_most: float


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def interleaved(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    prepare: Optional[Callable[[str], object]] = None,
) -> dict[str, Cost]:
    """Runs every work once in each round, in turn, after one round that is not counted.

    Args:
        prepare: called with the work's name before each, and not timed.
    """
    walls: dict[str, list[float]] = {name: [] for name in works}
    cpus: dict[str, list[float]] = {name: [] for name in works}
    # Refreshed by hand, between the works: a thread that draws would be counted with them.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=(rounds + 1) * len(works))
        for number in range(rounds + 1):
            for name, work in works.items():
                if prepare is not None:
                    prepare(name)
                cpu, wall = cpu_seconds(), time.perf_counter()
                work()
                wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
                if number > 0:
                    walls[name].append(wall)
                    cpus[name].append(cpu)
                progress.update(task, advance=1, description=name, refresh=True)
    return {
        name: Cost(statistics.median(each), statistics.median(cpus[name]), min(each), max(each))
        for name, each in walls.items()
    }
