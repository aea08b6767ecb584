"""`locked-tensor bench tune`: what the search finds, beside the best of an exhaustive sweep of the same space."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import track

from locked_tensor.cli.arguments import count, duration
from locked_tensor.cli.bench import Figure, add_disk_options, add_output_options, show
from locked_tensor.cli.disk import check_space, may_wear
from locked_tensor.cli.search import OPERATIONS, Tried
from locked_tensor.cli.trial import Trial
from locked_tensor.cli.tune import DEFAULT_BYTES, GUESSED_SPEED, SEARCH_SHARE, find, trial_in, winners_of
from locked_tensor.settings import AioSettings

CANDIDATES = 5  # of the sweep's best, measured again beside the search's


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("tune", help="the search for settings against trying them all", description=__doc__)
    add_output_options(parser)
    add_disk_options(parser, DEFAULT_BYTES)
    parser.add_argument("--seconds", type=duration, default=60, help="as for tune (default: 60)")
    parser.add_argument("--sweeps", type=count, default=3, help="times that everything is tried (default: 3)")
    parser.add_argument("--rounds", type=count, default=15, help="rounds of the final comparison (default: 15)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    check_space(chosen.folder, chosen.bytes)
    if not may_wear([chosen.folder], int(chosen.seconds * GUESSED_SPEED * (1 + chosen.sweeps) / 2), chosen.yes):
        return 1
    found = figures(chosen.folder, chosen.bytes, chosen.seconds, chosen.sweeps, chosen.rounds)
    return show("bench tune", found, chosen.json, chosen.plot)


def figures(folder: Path, nbytes: int, seconds: float, sweeps: int, rounds: int) -> list[Figure]:
    with trial_in([folder], nbytes) as trial:
        search = find(trial, seconds * SEARCH_SHARE)
        winners = winners_of(search)
        space = search.space.everything()
        swept = Tried(search.space.engines, {name: {} for name in OPERATIONS})
        for settings in track(space * sweeps, "sweeping", console=Console(stderr=True), transient=True):
            swept.add(settings, trial.measure(settings))
        found = [
            Figure("settings in the space", len(space), ""),
            Figure("settings that the search tried", len(search.tried.speeds["read"]), ""),
        ]
        for name in OPERATIONS:
            candidates = swept.promising(name)[:CANDIDATES]
            found.append(_compared(trial, name, getattr(winners, name), candidates, rounds))
    return found


def _compared(
    trial: Trial, operation: str, ours: AioSettings, candidates: list[AioSettings], rounds: int
) -> Figure:
    """Measures all again in turn; the ratio of each round is to the candidate whose median is best."""
    speeds: dict[AioSettings, list[float]] = {settings: [] for settings in dict.fromkeys([ours, *candidates])}
    for _ in range(rounds):
        for settings, found in speeds.items():
            found.append(trial.measure(settings)[operation])
    best = max(candidates, key=lambda settings: statistics.median(speeds[settings]))
    ratio = statistics.median(speeds[ours]) / statistics.median(speeds[best])
    each = [mine / theirs for mine, theirs in zip(speeds[ours], speeds[best])]
    return Figure(f"{operation}: found by the search / best of all", ratio, "x", min(each), max(each))
