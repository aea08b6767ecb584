"""A tensor to a file and back: a handle beside NIXL, torch.save, safetensors and numpy, where installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Callable

import torch

import locked_tensor as lt
from locked_tensor.cli.bench import Figure
from locked_tensor.cli.disk import forget_cached, sync_file
from locked_tensor.cli.measure import Cost, interleaved
from locked_tensor.cli.peers import NixlFile, nixl_api, safetensors_torch

BLOCK = 1 << 20
DEPTH = 32
Works = dict[str, Callable[[], object]]


def compare_files(work: Path, tensor: torch.Tensor, rounds: int) -> list[Figure]:
    """The figures, each of ours over a peer's in the same rounds.

    Args:
        work: a folder for the files.
        tensor: locked, contiguous bytes; its values do not matter and may change.
    """
    return _nixl(work, tensor, rounds) + _savers(work, tensor, rounds)


def _nixl(work: Path, tensor: torch.Tensor, rounds: int) -> list[Figure]:
    """The same blocks over files that are there, both by O_DIRECT from the same locked tensor."""
    api = nixl_api()
    if api is None:
        return []
    paths = [work / "ours", work / "nixl"]
    with lt.aio_handle(BLOCK, DEPTH) as handle:
        for path in paths:
            handle.sync_pwrite(tensor, path)
        with NixlFile(api, tensor, paths[1], BLOCK) as nixl:
            works: Works = {
                "write": lambda: handle.sync_pwrite(tensor, paths[0]),
                "NIXL write": nixl.write,
                "read": lambda: handle.sync_pread(tensor, paths[0]),
                "NIXL read": nixl.read,
            }
            costs = interleaved(works, rounds)
    for path in paths:
        path.unlink()
    found = []
    for operation in ("write", "read"):
        ours, theirs = costs[operation], costs[f"NIXL {operation}"]
        found.append(_bandwidth(f"ours, {operation} over a file", ours, tensor.nbytes))
        found.append(_bandwidth(f"NIXL, {operation} over a file", theirs, tensor.nbytes))
        found.append(Figure(f"{operation}: our bandwidth / NIXL's", theirs.wall / ours.wall, "x"))
        found.append(Figure(f"{operation}: our CPU / NIXL's", ours.cpu / theirs.cpu, "x"))
    return found


def _savers(work: Path, tensor: torch.Tensor, rounds: int) -> list[Figure]:
    """A new file with the tensor in it, on the device when the time is up; read with nothing of it in memory."""
    plain = lt.as_plain(tensor)
    paths = {name: work / name.replace(" ", "_") for name in ("ours", "torch", "safetensors", "numpy")}
    with lt.aio_handle(BLOCK, DEPTH) as handle:
        saves: Works = {
            "ours": lambda: handle.sync_pwrite(tensor, paths["ours"]),
            "torch": lambda: torch.save(plain, paths["torch"]),
        }
        loads: Works = {
            "ours": lambda: handle.sync_pread(tensor, paths["ours"]),
            "torch": lambda: torch.load(paths["torch"], weights_only=True),
        }
        if (peer := safetensors_torch()) is not None:
            saves["safetensors"] = lambda: peer.save_file({"tensor": plain}, paths["safetensors"])
            # A clone, because what load_file gives is a map of the file, of which nothing is read yet.
            loads["safetensors"] = lambda: peer.load_file(paths["safetensors"])["tensor"].clone()
        if importlib.util.find_spec("numpy") is not None:
            import numpy

            paths["numpy"] = paths["numpy"].with_suffix(".npy")
            saves["numpy"] = lambda: numpy.save(paths["numpy"], plain.numpy())
            loads["numpy"] = lambda: numpy.load(paths["numpy"])

        def saved(name: str) -> Callable[[], None]:
            def work() -> None:
                saves[name]()
                sync_file(paths[name])

            return work

        saving = interleaved(
            {name: saved(name) for name in saves}, rounds, prepare=lambda name: paths[name].unlink(missing_ok=True)
        )
        loading = interleaved(loads, rounds, prepare=lambda name: forget_cached(paths[name]))
    for path in paths.values():
        path.unlink(missing_ok=True)
    found = []
    for what, costs in (("save and fsync", saving), ("load, not cached", loading)):
        for name, cost in costs.items():
            found.append(_bandwidth(f"{what}: {name}", cost, tensor.nbytes))
        for name, cost in costs.items():
            if name != "ours":
                found.append(Figure(f"{what}: our bandwidth / {name}'s", cost.wall / costs["ours"].wall, "x"))
    return found


def _bandwidth(what: str, cost: Cost, nbytes: int) -> Figure:
    return Figure(
        what, nbytes / cost.wall / 1e9, "GB/s", nbytes / cost.wall_most / 1e9, nbytes / cost.wall_least / 1e9
    )
