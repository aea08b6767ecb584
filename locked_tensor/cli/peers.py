"""Other ways to do the same, for comparison where they are installed: DeepSpeed, safetensors, fio."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Optional


def deepspeed_aio() -> Optional[Any]:
    """DeepSpeed's compiled async_io module, built if need be; None where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False)
    except Exception:  # whatever keeps a peer from loading, it is not there to compare with
        return None


def safetensors_torch() -> Optional[Any]:
    """The module safetensors.torch; None where it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        return None
    return safetensors.torch


def fio_figures(
    path: Path, nbytes: int, operation: str, block_size: int, depth: int
) -> Optional[tuple[float, float, float]]:
    """Bytes a second, CPU seconds a gigabyte and operations a second of fio on an existing file.

    io_uring with fixed buffers and ordinary pages; `operation` is fio's "read", "write" or "randread".
    """
    if shutil.which("fio") is None:
        return None
    done = subprocess.run(
        ["fio", "--name=peer", f"--filename={path}", f"--rw={operation}", f"--bs={block_size}",
         f"--size={nbytes}", f"--iodepth={depth}", "--ioengine=io_uring", "--fixedbufs", "--direct=1",
         "--output-format=json", "--overwrite=1"],
        capture_output=True, text=True,
    )
    if done.returncode != 0:
        return None
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["write" if operation == "write" else "read"]
    seconds = side["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return side["io_bytes"] / seconds, cpu / (side["io_bytes"] / 1e9), side["iops"]
