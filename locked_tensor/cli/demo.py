"""`locked-tensor demo`: the main job on a real file, with every byte compared."""

from __future__ import annotations

import argparse
import hashlib
import os
import stat
import time
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import torch
from rich.console import Console
from rich.table import Table

import locked_tensor as lt
from locked_tensor.cli.disk import work_folder

MADE_BYTES = 64 << 20
ODD_BYTES = 13  # more, so that the end does not align
COLUMNS = 1 << 16  # of the strided view's rows, in bytes


class Row(NamedTuple):
    """One kind of view, written and read."""

    name: str
    bytes_direct: int
    bytes_bounced: int
    bytes_buffered: int
    nbytes: int
    seconds: float


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="move a real file through locked memory and compare every byte",
        description="Reads FILE straight into a locked pool, writes views of it through one handle, reads "
        "them back through another, compares every byte, and shows which road the bytes took. Leaves "
        "no file behind.",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="any regular file; made if not given")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the views are written (default: here)"
    )
    parser.set_defaults(run=lambda chosen: run(chosen.input, chosen.folder or Path.cwd()))


def run(source: Optional[Path], folder: Path, console: Optional[Console] = None) -> int:
    console = console or Console()
    with work_folder(folder, "demo") as work:
        return _run_in(work, source or _made_file(work, _lockable_bytes(console)), console)


def _lockable_bytes(console: Console) -> int:
    """MADE_BYTES, or half of what a lower lock limit leaves: the rest is for the handles' staging."""
    try:
        with lt.locked_memory():
            torch.empty(MADE_BYTES + ODD_BYTES, dtype=torch.uint8)
        return MADE_BYTES
    except lt.LockLimitError:
        limit = lt.memlock_limit()
        left = 0 if limit.soft is None else (limit.soft - limit.locked) // 2
        if left < 2 * COLUMNS:
            raise
        console.print(
            f"RLIMIT_MEMLOCK is {limit.soft:,} bytes, so the file is small; "
            'for more see "locked-tensor doctor"'
        )
        return left


def _made_file(work: Path, nbytes: int) -> Path:
    path = work / "noise"
    made = torch.randint(0, 256, (nbytes + ODD_BYTES,), dtype=torch.uint8)
    path.write_bytes(made.numpy().tobytes())
    return path


def _run_in(work: Path, source: Path, console: Console) -> int:
    status = os.stat(source)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{source} is not a regular file: the demo needs one, for its size")
    nbytes = status.st_size
    if nbytes == 0:
        raise ValueError(f"{source} is empty: there is nothing to move")
    with lt.locked_memory():
        pool = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    with lt.aio_handle() as handle:
        handle.sync_pread(pool, source)
    digest = hashlib.sha256(pool.numpy().data).hexdigest()

    half = nbytes // 2 // 4096 * 4096
    rows = nbytes // (2 * COLUMNS)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "whole pool": lambda t: t,
        "narrow": lambda t: t.narrow(0, half, nbytes - half),
    }
    if rows:
        views["reshaped"] = lambda t: t[: rows * 2 * COLUMNS].view(rows, 2 * COLUMNS)
        views["columns"] = lambda t: views["reshaped"](t)[:, :COLUMNS]
        views["transposed"] = lambda t: views["reshaped"](t)[:, :4096].t()

    table = Table(title=f"{nbytes:,} bytes of {source.name}, sha256 {digest[:16]}...")
    for name in ("memory", "view", "direct", "bounced", "buffered", "GB/s"):
        table.add_column(name, justify="left" if name in ("memory", "view") else "right")
    ordinary = lt.as_plain(pool).clone()
    is_right = True
    with lt.aio_handle() as writer, lt.aio_handle() as reader:
        engine = writer.engine
        for memory, tensor in (("locked", pool), ("ordinary", ordinary)):
            for name, view_of in views.items():
                if memory == "ordinary" and name != "whole pool":
                    continue
                for row in _round_trip(work / "view", name, view_of(tensor), writer, reader):
                    table.add_row(
                        memory,
                        row.name,
                        f"{row.bytes_direct:,}",
                        f"{row.bytes_bounced:,}",
                        f"{row.bytes_buffered:,}",
                        f"{row.nbytes / row.seconds / 1e9:.2f}",
                    )
            is_right = is_right and hashlib.sha256(tensor.numpy().data).hexdigest() == digest
    console.print(table)
    if not is_right:
        console.print("[red]the bytes that came back are not the bytes that were written[/red]")
        return 1
    console.print(f"every byte came back; engine {engine}, folder {work.parent}")
    return 0


def _round_trip(
    path: Path, name: str, view: torch.Tensor, writer: lt.AioHandle, reader: lt.AioHandle
) -> list[Row]:
    """Writes the view through one handle and reads it back through the other, over zeros."""
    expected = lt.as_plain(view).clone()
    written = _timed(f"{name}: write", view, writer, lambda: writer.async_pwrite(view, path))
    view.zero_()
    read = _timed(f"{name}: read", view, reader, lambda: reader.async_pread(view, path))
    path.unlink()
    if not torch.equal(lt.as_plain(view), expected):
        raise OSError(f"{name}: the bytes read back differ from those written")
    return [written, read]


def _timed(name: str, view: torch.Tensor, handle: lt.AioHandle, start: Callable[[], int]) -> Row:
    """Starts one operation, waits for it, and tells what the handle counted meanwhile."""
    before = handle.stats()
    started = time.perf_counter()
    start()
    handle.wait()
    seconds = time.perf_counter() - started
    after = handle.stats()
    return Row(
        name,
        after.bytes_direct - before.bytes_direct,
        after.bytes_bounced - before.bytes_bounced,
        after.bytes_buffered - before.bytes_buffered,
        view.nbytes,
        seconds,
    )
