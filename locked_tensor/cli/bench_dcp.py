"""The DCP rows of `locked-tensor bench checkpoint`: saving and loading by two processes, beside torch's own."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

from locked_tensor.cli.arguments import count
from locked_tensor.cli.bench import Figure, add_folder_options, add_json_option, add_rounds_option, show
from locked_tensor.cli.disk import check_space, forget_cached, may_wear, work_folder

RANKS = 2
TENSORS = 32  # of each rank
KINDS = ("torch's", "ours", "ours, locked")  # of saves, each with a folder of its own


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("dcp", help="torch.distributed.checkpoint, by two processes", description=__doc__)
    add_json_option(parser)
    add_folder_options(parser)
    parser.add_argument("--bytes", type=count, default=2 << 30, help="of the state of all ranks (default: 2 GiB)")
    add_rounds_option(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    check_space(chosen.folder, len(KINDS) * chosen.bytes)
    if not may_wear([chosen.folder], len(KINDS) * chosen.bytes * (chosen.rounds + 1), chosen.yes):
        return 1
    return show("bench dcp", figures(chosen.folder, chosen.bytes, chosen.rounds), chosen.json)


def figures(folder: Path, nbytes: int, rounds: int) -> list[Figure]:
    """Bandwidths and ratios of `dcp.save` (fsynced) and `dcp.load` (of files that are not cached)."""
    with work_folder(folder, "bench") as work:
        seconds = _run_ranks(work, nbytes, rounds)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    found = [Figure(f"DCP {name}", nbytes / value / 1e9, "GB/s") for name, value in medians.items()]
    for operation in ("save", "load"):
        stock = medians[f"{operation}, torch's"]
        for kind in ("ours", "ours, locked"):
            found.append(Figure(f"DCP {operation}: {kind} / torch's", stock / medians[f"{operation}, {kind}"], "x"))
    return found


def _run_ranks(folder: Path, nbytes: int, rounds: int) -> dict[str, list[float]]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(folder), str(nbytes // RANKS), str(rounds)]
    ranks = [
        subprocess.Popen(
            command,
            env=dict(os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode != 0 for rank in ranks):
        raise OSError(f"a rank ended with status {[rank.returncode for rank in ranks]}")
    return json.loads(said[0].splitlines()[-1])


# --- one rank ---


def _measure(folder: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each operation in each round, after one that is not counted; the slower rank counts."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import locked_tensor as lt
    from locked_tensor.integrations.dcp import DirectReader, DirectWriter

    def make_state() -> dict[str, Any]:
        rows = nbytes // TENSORS // 4 // 1024
        return {f"{dist.get_rank()}.{i}": torch.full((rows, 1024), float(i)) for i in range(TENSORS)}

    plain = make_state()
    with lt.locked_memory():
        locked = make_state()
    folders = {kind: f"{folder}/{i}" for i, kind in enumerate(KINDS)}
    works: dict[str, Callable[[], object]] = {
        "save, torch's": lambda: dcp.save(plain, storage_writer=dcp.FileSystemWriter(folders["torch's"])),
        "save, ours": lambda: dcp.save(plain, storage_writer=DirectWriter(folders["ours"])),
        "load, torch's": lambda: dcp.load(plain, storage_reader=dcp.FileSystemReader(folders["torch's"])),
        "load, ours": lambda: dcp.load(plain, storage_reader=DirectReader(folders["ours"])),
        "save, ours, locked": lambda: dcp.save(locked, storage_writer=DirectWriter(folders["ours, locked"])),
        "load, ours, locked": lambda: dcp.load(locked, storage_reader=DirectReader(folders["ours, locked"])),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            _forget_cached(folder, replaces=folders[name.partition(", ")[2]] if name.startswith("save") else None)
            dist.barrier()
            begin = time.perf_counter()
            work()
            dist.barrier()
            if number > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def _forget_cached(folder: str, replaces: str | None) -> None:
    """Every save makes new files; every load comes from the disk."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        if replaces is not None:
            shutil.rmtree(replaces, ignore_errors=True)
        for path in Path(folder).rglob("*.distcp"):
            forget_cached(path)
    dist.barrier()


def _main(folder: str, nbytes: str, rounds: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    seconds = _measure(folder, int(nbytes), int(rounds))
    if dist.get_rank() == 0:
        sys.stdout.write("\n" + json.dumps(seconds) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
