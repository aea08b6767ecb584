"""`locked-tensor bench`: the figures, each a ratio of things run in turn in one process."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import NamedTuple, Optional

from rich.console import Console
from rich.table import Table

from locked_tensor.cli.arguments import count, new_file
from locked_tensor.cli.plot import plot_figures, plot_path

# The groups of measurements, in the order of the help. Each module has add_parser(groups).
GROUPS = (
    "locked_tensor.cli.bench_memory",
    "locked_tensor.cli.bench_dispatch",
    "locked_tensor.cli.bench_io",
    "locked_tensor.cli.bench_tune",
    "locked_tensor.cli.bench_swap",
    "locked_tensor.cli.bench_checkpoint",
    "locked_tensor.cli.bench_dcp",
    "locked_tensor.cli.bench_deepspeed",
    "locked_tensor.cli.bench_soak",
)


class Figure(NamedTuple):
    """One measured figure and what it is a ratio of, or its unit."""

    what: str
    value: float
    unit: str
    low: Optional[float] = None  #: the least of the rounds, where rounds were kept
    high: Optional[float] = None  #: the most


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine, in ratios",
        description="Runs one group of measurements in interleaved rounds and shows medians. Cleans up "
        "its files.",
    )
    groups = parser.add_subparsers(metavar="GROUP", required=True)
    for name in GROUPS:
        importlib.import_module(name).add_parser(groups)


def show(
    title: str, figures: list[Figure], json_file: Optional[Path], plot_file: Optional[Path] = None
) -> int:
    """Prints the figures as a table and, if asked, writes them as JSON and as a picture."""
    table = Table(title=title)
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("unit")
    has_spread = any(figure.low is not None for figure in figures)
    if has_spread:
        table.add_column("of all rounds")
    for figure in figures:
        value = f"{figure.value:,}" if isinstance(figure.value, int) else f"{figure.value:.4g}"
        cells = [figure.what, value, figure.unit]
        if has_spread:
            cells.append("" if figure.low is None else f"{figure.low:.4g} to {figure.high:.4g}")
        table.add_row(*cells)
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([figure._asdict() for figure in figures], indent=1))
    if plot_file is not None:
        plot_figures(plot_file, title, figures)
    return 0


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures to FILE as JSON")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--plot`, for `show`."""
    add_json_option(parser)
    parser.add_argument(
        "--plot",
        type=plot_path,
        metavar="FILE.png",
        help="draw the figures, bars with the range of all rounds (needs matplotlib)",
    )


def add_disk_options(parser: argparse.ArgumentParser, nbytes: int) -> None:
    """What a measurement of files asks for."""
    add_folder_options(parser)
    parser.add_argument(
        "--bytes", type=count, default=nbytes, help=f"of the large tensor (default: {nbytes >> 20} MiB)"
    )


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """`--folder` and `--yes`, for what may write so much that it wears a drive."""
    add_folder_option(parser)
    parser.add_argument("--yes", action="store_true", help="no warning that writing wears a drive")


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    """What every measurement of a disk asks for."""
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), metavar="DIR", help="on the disk to measure (default: here)"
    )


def add_rounds_option(parser: argparse.ArgumentParser, rounds: int = 5) -> None:
    """How often each thing is done, in turn with the others."""
    parser.add_argument(
        "--rounds", type=count, default=rounds, help=f"rounds of each measurement (default: {rounds})"
    )
