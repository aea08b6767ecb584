"""`locked-tensor tune`: which settings are fastest on the disk at hand."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from locked_tensor.cli.arguments import count, duration, new_file
from locked_tensor.cli.disk import check_space, may_wear, work_folder
from locked_tensor.cli.peers import fio_figures
from locked_tensor.cli.plot import plot_heat_maps, plot_path
from locked_tensor.cli.search import OPERATIONS, Search
from locked_tensor.cli.trial import Trial, search_space
from locked_tensor.settings import AioSettings, render_settings

DEFAULT_BYTES = 256 << 20
SEARCH_SHARE = 0.85  # of the time; the rest compares with the device
REFERENCE_ROUNDS = 5  # at most
SHARE = "share"  # the column's name
MOST_POINTS = 3  # at which fio is asked: USUAL, and that of each operation's winner
USUAL = (1 << 20, 32)  # block size and depth at which fio is asked, beside those that were found
GUESSED_SPEED = 1.5e9  # bytes a second written, for the warning of wear


class Winners(NamedTuple):
    """What was found best for reading, for writing, and for a handle that does both."""

    read: AioSettings
    write: AioSettings
    both: AioSettings


class Reference(NamedTuple):
    """Medians of rounds in which the winner and the device's own speed were measured in turn."""

    source: str  #: whose bandwidth `device` is
    ours: dict[str, float]  #: bytes a second, by operation
    device: dict[str, float]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the fastest settings for a folder's disk",
        description="Searches block size, depth, parallelism and engine, coarse to fine, for the fastest reads "
        "and writes, and shows the settings as a line of Python and as DeepSpeed's JSON. Leaves no file behind "
        "but those it is asked for.",
        epilog="example: locked-tensor tune --folder . --seconds 60 --save aio.json",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        nargs="+",
        default=[Path.cwd()],
        metavar="DIR",
        help="on the disk, or one on each of the disks to use at once (default: here)",
    )
    parser.add_argument(
        "--seconds",
        type=duration,
        default=60,
        help="for everything: the search, measuring the best again, and the disk itself beside them (default: 60); "
        "a few more where the least of each takes longer",
    )
    parser.add_argument("--bytes", type=count, default=DEFAULT_BYTES, help="of the tensor moved (default: 256 MiB)")
    parser.add_argument("--save", type=new_file, metavar="FILE", help="write what AioHandle.from_file(FILE) reads")
    parser.add_argument("--plot", type=plot_path, metavar="FILE.png", help="heat maps of all that was tried (needs matplotlib)")
    parser.add_argument("--yes", action="store_true", help="no warning that writing wears a drive")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    for folder in chosen.folder:
        check_space(folder, chosen.bytes)
    if not may_wear(chosen.folder, int(chosen.seconds * GUESSED_SPEED / 2), chosen.yes):
        return 1
    console = Console(highlight=False, soft_wrap=True)
    deadline = time.monotonic() + chosen.seconds
    with trial_in(chosen.folder, chosen.bytes) as trial:
        is_fio, round_seconds = try_reference(trial)
        left = deadline - time.monotonic()
        search = find(trial, max(left / 3, min(left * SEARCH_SHARE, left - round_seconds), 1e-9))
        winners = winners_of(search)
        reference = compare(trial, winners, deadline, is_fio)
    show(console, winners, reference, len(search.tried.speeds["read"]))
    if chosen.plot is not None:
        plot(chosen.plot, search, winners)
        console.print(f"heat maps: {chosen.plot}", markup=False)
    if chosen.save is not None:
        chosen.save.write_text(render_settings(winners.both, winners.read, winners.write))
        console.print(f'written for AioHandle.from_file("{chosen.save}"): {chosen.save}', markup=False)
    return 0


@contextlib.contextmanager
def trial_in(folders: Sequence[Path], nbytes: int) -> Iterator[Trial]:
    """A trial with its files in folders of their own, which are removed."""
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(work_folder(folder, "tune"))
            for folder in folders
        ]
        yield Trial(made, nbytes)


def find(trial: Trial, seconds: float) -> Search:
    """Searches under a progress bar."""
    space = search_space()
    start = AioSettings(1 << 20, 128, 1, space.engines[0])  # aio_handle's own defaults
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("searching", total=1.0)
        search = Search(
            space, trial.measure, start, seconds, advance=lambda share: progress.update(task, completed=share)
        )
        search.run()
    return search


def winners_of(search: Search) -> Winners:
    tried, finalists = search.tried, search.finalists
    return Winners(
        read=tried.best("read", finalists),
        write=tried.best("write", finalists),
        both=tried.best_of_both(finalists),
    )


def try_reference(trial: Trial) -> tuple[bool, float]:
    """Does fio work here, and about how many seconds does one round of `compare` take?"""
    began = time.monotonic()
    is_fio = fio_figures(trial.paths, trial.nbytes, "read", *USUAL) is not None
    if not is_fio:
        trial.measure_plainly("read")
    return is_fio, (time.monotonic() - began) * len(OPERATIONS) * (1 + MOST_POINTS if is_fio else 2)


def compare(trial: Trial, winners: Winners, deadline: float, is_fio: bool) -> Reference:
    """Measures the winners and the device's own speed in turn: fio's, or threads of plain calls without it.

    At least once each, and again while another round is likely to end by the deadline.
    """
    points = {USUAL} | {(each.block_size, each.queue_depth) for each in (winners.read, winners.write)}

    def fio(operation: str) -> list[float]:
        found = [fio_figures(trial.paths, trial.nbytes, operation, *point) for point in sorted(points)]
        return [figures[0] for figures in found if figures is not None]

    ours: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    device: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    for _ in range(REFERENCE_ROUNDS):
        began = time.monotonic()
        for name in OPERATIONS:
            ours[name].append(trial.measure(getattr(winners, name))[name])
            device[name].append(max(fio(name)) if is_fio else trial.measure_plainly(name))
        if 2 * time.monotonic() - began > deadline:
            break
    return Reference(
        "fio (one job, the best of its block sizes and depths)" if is_fio else "threads of plain calls",
        {name: statistics.median(speeds) for name, speeds in ours.items()},
        {name: statistics.median(speeds) for name, speeds in device.items()},
    )


def show(console: Console, winners: Winners, reference: Reference, tried: int) -> None:
    table = Table(
        title=f"{tried} settings tried",
        caption=f"{SHARE}: of the bytes a second of {reference.source}, measured in turn with ours",
    )
    for name in ("best for", "engine", "block size", "depth", "parallelism", "GB/s", SHARE):
        table.add_column(name, justify="left" if name in ("best for", "engine") else "right")
    for name, settings in winners._asdict().items():
        speeds = ("", "")
        if name in OPERATIONS:
            share = reference.ours[name] / reference.device[name]
            speeds = (f"{reference.ours[name] / 1e9:.2f}", f"{share:.0%}")
        table.add_row(
            name,
            settings.engine,
            f"{settings.block_size >> 10:,} KiB",
            str(settings.queue_depth),
            str(settings.intra_op_parallelism),
            *speeds,
        )
    console.print(table)
    for name, settings in winners._asdict().items():
        console.print(f"{name:<5}  lt.{settings.as_call()}", markup=False)
    console.print(f'DeepSpeed  "aio": {json.dumps(winners.both.as_deepspeed())}', markup=False)


def plot(path: Path, search: Search, winners: Winners) -> None:
    """The best speed at each block size and depth, with the winner's engine."""
    maps: dict[str, dict[tuple[int, int], float]] = {}
    for name in OPERATIONS:
        engine = getattr(winners, name).engine
        cells = maps.setdefault(f"{name}, {engine}", {})
        for settings in search.tried.speeds[name]:
            if settings.engine == engine:
                where = (settings.block_size, settings.queue_depth)
                cells[where] = max(cells.get(where, 0.0), search.tried.speed(name, settings))
    plot_heat_maps(path, maps, search.space.block_sizes, search.space.queue_depths)
