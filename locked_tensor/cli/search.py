"""The search for settings, coarse to fine, within a time: which to try next, and which was best.

It knows nothing of files: a function measures settings and returns a speed for each operation.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

from locked_tensor.settings import AioSettings

OPERATIONS = ("read", "write")
Speeds = dict[str, float]  #: bytes a second, by operation
Measure = Callable[[AioSettings], Speeds]

FINALISTS = 5  # of each operation, where there is time for them
COARSE_SHARE = 0.3  # of the time, at most, for the coarse grid
FINAL_SHARE = 0.3  # of the time, to measure the finalists again, in turn
AS_FAST = 0.98  # within this share of the best, speeds differ by noise
LEAST_ROUNDS = 3  # of the finalists, if only just


class Space(NamedTuple):
    """The values that each setting may take, in rising order."""

    block_sizes: Sequence[int]
    queue_depths: Sequence[int]
    parallelisms: Sequence[int]
    engines: Sequence[str]

    def everything(self) -> list[AioSettings]:
        return [AioSettings(*values) for values in itertools.product(*self)]

    def coarse(self) -> list[AioSettings]:
        """Every other block size and depth, and both ends of parallelism."""
        ends = self.parallelisms if len(self.parallelisms) < 2 else (self.parallelisms[0], self.parallelisms[-1])
        thin = Space(self.block_sizes[1::2] or self.block_sizes, self.queue_depths[::2], ends, self.engines)
        # A round over the engines first, so that a short time has not spent itself on one.
        return sorted(thin.everything(), key=lambda settings: (settings.intra_op_parallelism, settings.block_size))

    def neighbours(self, settings: AioSettings) -> Iterator[AioSettings]:
        """One step in each direction of each axis."""
        axes: dict[str, Sequence[Any]] = {
            "block_size": self.block_sizes,
            "queue_depth": self.queue_depths,
            "intra_op_parallelism": self.parallelisms,
        }
        for name, values in axes.items():
            here = values.index(getattr(settings, name))
            for value in (*values[max(0, here - 1) : here], *values[here + 1 : here + 2]):
                yield replace(settings, **{name: value})
        for engine in self.engines:
            if engine != settings.engine:
                yield replace(settings, engine=engine)


class Tried(NamedTuple):
    """What was measured: every speed of every settings, by operation."""

    engines: Sequence[str]  #: those that take least first
    speeds: dict[str, dict[AioSettings, list[float]]]

    def add(self, settings: AioSettings, speeds: Speeds) -> None:
        for operation, speed in speeds.items():
            self.speeds[operation].setdefault(settings, []).append(speed)

    def speed(self, operation: str, settings: AioSettings) -> float:
        """The median."""
        return statistics.median(self.speeds[operation][settings])

    def promising(self, operation: str) -> list[AioSettings]:
        """The FINALISTS settings whose best measurement was fastest.

        Other users of a disk, and its own limits, only ever slow a measurement down, for seconds on end:
        between settings that were not measured in turn, the best tells more than the median.
        """
        speeds = self.speeds[operation]
        return sorted(speeds, key=lambda settings: max(speeds[settings]), reverse=True)[:FINALISTS]

    def best(self, operation: str, among: Iterable[AioSettings]) -> AioSettings:
        """The fastest; of those that are as fast but for noise, the one that takes least."""
        chosen = list(among)
        enough = AS_FAST * max(self.speed(operation, settings) for settings in chosen)
        return min(
            (settings for settings in chosen if self.speed(operation, settings) >= enough), key=self._cost
        )

    def _cost(self, settings: AioSettings) -> tuple[int, int, int, int]:
        return (
            self.engines.index(settings.engine),
            settings.intra_op_parallelism,
            settings.queue_depth,
            settings.block_size,
        )

    def best_of_both(self, among: Iterable[AioSettings]) -> AioSettings:
        """The settings whose slower side, as a share of the best of that side, is best."""
        chosen = list(among)
        best = {name: max(self.speed(name, settings) for settings in chosen) for name in OPERATIONS}
        share = {
            settings: min(self.speed(name, settings) / best[name] for name in OPERATIONS) for settings in chosen
        }
        enough = AS_FAST * max(share.values())
        return min((settings for settings in chosen if share[settings] >= enough), key=self._cost)


class Search:
    """One search. `run` does it; `tried` and `finalists` tell what came of it.

    Args:
        measure: measures one settings; its exceptions end the search.
        start: is tried first, so that what is found is not worse than it.
        seconds: how long `run` takes at most, if the least it does takes no longer.
        advance: told the share of the time that has passed, 0 to 1, after each measurement.
        clock: seconds, rising.
    """

    def __init__(
        self,
        space: Space,
        measure: Measure,
        start: AioSettings,
        seconds: float,
        *,
        advance: Callable[[float], object] = lambda share: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space = space
        self.tried = Tried(space.engines, {name: {} for name in OPERATIONS})
        self.finalists: list[AioSettings] = []
        self._measure = measure
        self._start = start
        self._seconds = seconds
        self._advance = advance
        self._clock = clock
        self._began = clock()

    def run(self) -> None:
        self._try(self._start)
        self._coarse()
        self._fine()
        self._final()

    def _passed(self) -> float:
        return (self._clock() - self._began) / self._seconds

    def _try(self, settings: AioSettings) -> None:
        self.tried.add(settings, self._measure(settings))
        self._advance(min(1.0, self._passed()))

    def _is_tried(self, settings: AioSettings) -> bool:
        return settings in self.tried.speeds[OPERATIONS[0]]

    def _coarse(self) -> None:
        """Once and, if there is time, a second time in the other order, some seconds apart."""
        grid = self.space.coarse()
        for settings in grid + grid[::-1]:
            if self._passed() >= COARSE_SHARE:
                return
            self._try(settings)

    def _fine(self) -> None:
        """Climbs from the best, of reading and of writing in turn, until nothing next to them is untried."""
        is_climbing = True
        while is_climbing:
            is_climbing = False
            for operation in OPERATIONS:
                for settings in self._next_to_the_best(operation):
                    if self._passed() >= 1 - FINAL_SHARE:
                        return
                    self._try(settings)
                    is_climbing = True

    def _next_to_the_best(self, operation: str) -> list[AioSettings]:
        """What is untried next to the best that has such neighbours."""
        for best in self.tried.promising(operation):
            fresh = [near for near in self.space.neighbours(best) if not self._is_tried(near)]
            if fresh:
                return fresh
        return []

    def _final(self) -> None:
        """Measures the best again, in turn, so that what was luck shows; medians decide."""
        each = self._affordable()
        chosen = [settings for name in OPERATIONS for settings in self.tried.promising(name)[:each]]
        self.finalists = list(dict.fromkeys(chosen + [self._start]))
        for name in OPERATIONS:
            for settings in self.finalists:
                self.tried.speeds[name][settings].clear()
        began, rounds = self._passed(), 0
        while rounds < LEAST_ROUNDS or self._passed() + (self._passed() - began) / rounds < 1:
            for settings in self.finalists:
                self._try(settings)
            rounds += 1

    def _affordable(self) -> int:
        """How many finalists of each operation the time that is left is enough for, beside the start."""
        count = sum(len(speeds) for speeds in self.tried.speeds[OPERATIONS[0]].values())
        measurements = (1 - self._passed()) * count / self._passed() if self._passed() > 0 else math.inf
        finalists = min(measurements / LEAST_ROUNDS, 1 + len(OPERATIONS) * FINALISTS)
        return max(1, int((finalists - 1) / len(OPERATIONS)))
