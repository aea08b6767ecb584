"""Other ways to do the same, for comparison where they are installed: DeepSpeed, NIXL, safetensors, fio."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Sequence, Union

import torch


def deepspeed_aio() -> Optional[Any]:
    """DeepSpeed's compiled async_io module, built if need be; None where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False)
    except Exception:  # whatever keeps a peer from loading, it is not there to compare with
        return None


def nixl_api() -> Optional[Any]:
    """NIXL's Python interface; None where it is not installed (`pip install nixl-cu13` brings it to CPU hosts too)."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in ("nixl_cu13._api", "nixl_cu12._api", "nixl._api"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def safetensors_torch() -> Optional[Any]:
    """The module safetensors.torch; None where it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        return None
    return safetensors.torch


class NixlFile:
    """A tensor and a file known to a NIXL agent with its POSIX backend, moved in blocks.

    Args:
        path: an existing file of at least the tensor's size, opened with O_DIRECT.
    """

    def __init__(self, api: Any, tensor: torch.Tensor, path: Path, block_size: int) -> None:
        self._agent = api.nixl_agent("bench", api.nixl_agent_config(backends=["POSIX"]))
        self._descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        begin, nbytes, blocks = tensor.data_ptr(), tensor.nbytes, range(0, tensor.nbytes, block_size)
        self._registered = [
            self._agent.register_memory([(begin, nbytes, 0, "")], "DRAM"),
            self._agent.register_memory([(0, nbytes, self._descriptor, "")], "FILE"),
        ]
        sizes = {offset: min(block_size, nbytes - offset) for offset in blocks}
        self._memory = self._agent.get_xfer_descs([(begin + each, sizes[each], 0) for each in blocks], "DRAM")
        self._file = self._agent.get_xfer_descs([(each, sizes[each], self._descriptor) for each in blocks], "FILE")

    def __enter__(self) -> NixlFile:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        os.close(self._descriptor)

    def write(self) -> None:
        self._move("WRITE")

    def read(self) -> None:
        self._move("READ")

    def _move(self, operation: str) -> None:
        transfer = self._agent.initialize_xfer(operation, self._memory, self._file, "bench")
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC":
                state = self._agent.check_xfer_state(transfer)
            if state != "DONE":
                raise OSError(f"NIXL's {operation} ended as {state}")
        finally:
            self._agent.release_xfer_handle(transfer)


def fio_figures(
    path: Union[Path, Sequence[Path]], nbytes: int, operation: str, block_size: int, depth: int
) -> Optional[tuple[float, float, float]]:
    """Bytes a second, CPU seconds a gigabyte and operations a second of fio on existing files.

    Of several files each gets its share of `nbytes`. io_uring with fixed buffers and ordinary pages; `operation` is fio's "read", "write" or "randread".
    """
    if shutil.which("fio") is None:
        return None
    paths = [path] if isinstance(path, Path) else path
    names = ":".join(os.fspath(each).replace(":", "\\:") for each in paths)
    done = subprocess.run(
        [
            *("fio", "--name=peer", f"--filename={names}", f"--rw={operation}", f"--bs={block_size}"),
            *(f"--size={nbytes}", f"--iodepth={depth}", "--ioengine=io_uring", "--fixedbufs", "--direct=1"),
            *("--output-format=json", "--overwrite=1"),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        return None
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["write" if operation == "write" else "read"]
    if side["runtime"] == 0:  # in milliseconds: too little was moved to tell
        return None
    seconds = side["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return side["io_bytes"] / seconds, cpu / (side["io_bytes"] / 1e9), side["iops"]
