"""`locked-tensor bench`: the figures, each a ratio of things run in turn in one process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple, Optional

from rich.console import Console
from rich.table import Table


class Figure(NamedTuple):
    """One measured figure and what it is a ratio of, or its unit."""

    what: str
    value: float
    unit: str


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine, in ratios",
        description="Runs one group of measurements in interleaved rounds and shows medians. Cleans up "
        "its files.",
    )
    groups = parser.add_subparsers(metavar="GROUP", required=True)
    from locked_tensor.cli import bench_dcp, bench_deepspeed, bench_io, bench_memory

    for group in (bench_memory, bench_io, bench_dcp, bench_deepspeed):
        group.add_parser(groups)


def show(title: str, figures: list[Figure], json_file: Optional[Path]) -> int:
    """Prints the figures as a table and, if asked, writes them as JSON."""
    table = Table(title=title)
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("unit")
    for figure in figures:
        table.add_row(figure.what, f"{figure.value:.4g}", figure.unit)
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([figure._asdict() for figure in figures], indent=1))
    return 0


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as JSON")
