"""The command line: `locked-tensor demo` and its sisters, the same as `python -m locked_tensor`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from types import FrameType
from typing import Iterator, Optional, Sequence


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs one command; returns the exit status: 0 well, 1 found a problem, 2 could not run."""
    from rich.console import Console

    from locked_tensor.cli import bench, demo, doctor, tune

    parser = argparse.ArgumentParser(
        prog="locked-tensor",
        description="Page-locked CPU tensors that move to and from NVMe at the speed of the device.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (doctor, demo, bench, tune):
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with _terminated_like_interrupted():
            return chosen.run(chosen)
    except (OSError, ValueError, MemoryError, EOFError) as error:
        errors.print(f"locked-tensor: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        errors.print("locked-tensor: interrupted; nothing is left behind")
        return 130


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM (of `timeout`, a batch system) unwinds as ctrl-C does, so that files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it is interrupted
        return

    def interrupt(number: int, frame: Optional[FrameType]) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
