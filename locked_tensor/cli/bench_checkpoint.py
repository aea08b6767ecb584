"""`locked-tensor bench checkpoint`: saving and loading a state dict, beside torch and safetensors."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import IO, Callable, Optional, cast

import torch

import locked_tensor as lt
from locked_tensor.cli.arguments import count
from locked_tensor.cli.bench import Figure, add_folder_options, add_json_option, add_rounds_option, show
from locked_tensor.cli.disk import check_space, forget_cached, may_wear, sync_file, work_folder
from locked_tensor.cli.measure import Cost, interleaved
from locked_tensor.cli.peers import safetensors_torch

StateDict = dict[str, torch.Tensor]
LAYERS = 64  # each a matrix and a vector
WIDTH = 4096
FILES = 4  # of --bytes, room for: what is replaced stays until the new one is whole
WRITES_EACH_ROUND = 5  # of --bytes, with safetensors there
WRITES_ONCE = 2  # of --bytes: what is loaded


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("checkpoint", help="saving and loading a state dict", description=__doc__)
    add_json_option(parser)
    add_folder_options(parser)
    parser.add_argument("--bytes", type=count, default=2 << 30, help="of the state dict, about (default: 2 GiB)")
    add_rounds_option(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    check_space(chosen.folder, FILES * chosen.bytes)
    written = chosen.bytes * (WRITES_EACH_ROUND * (chosen.rounds + 1) + WRITES_ONCE)
    if not may_wear([chosen.folder], written, chosen.yes):
        return 1
    return show("bench checkpoint", figures(chosen.folder, chosen.bytes, chosen.rounds), chosen.json)


def figures(folder: Path, nbytes: int, rounds: int) -> list[Figure]:
    with work_folder(folder, "bench") as work:
        return _Bench(work, nbytes, rounds).run()


def model_of(nbytes: int) -> StateDict:
    """A state dict of about so many bytes in ordinary memory: bfloat16, half of the tensors small."""
    rows = max(1, nbytes // LAYERS // (2 * WIDTH))
    model: StateDict = {}
    for layer in range(LAYERS):
        model[f"layers.{layer}.weight"] = torch.full((rows, WIDTH), layer, dtype=torch.bfloat16)
        model[f"layers.{layer}.norm"] = torch.ones(WIDTH - layer, dtype=torch.bfloat16)
    return model


class _Bench:
    def __init__(self, work: Path, nbytes: int, rounds: int) -> None:
        self.work = work
        self.rounds = rounds
        self.model = model_of(nbytes)
        self.nbytes = sum(tensor.nbytes for tensor in self.model.values())
        self.peer = safetensors_torch()
        self.loaded: Optional[StateDict] = None
        self.found: list[Figure] = []

    def run(self) -> list[Figure]:
        self.saving()
        self.loading()
        return self.found

    def add_costs(self, costs: dict[str, Cost]) -> None:
        for what, cost in costs.items():
            self.found.append(Figure(what, self.nbytes / cost.wall / 1e9, "GB/s"))
            self.found.append(Figure(f"{what}: CPU", cost.cpu / (self.nbytes / 1e9), "s/GB"))

    def add_ratio(self, what: str, ours: Cost, theirs: list[Cost]) -> None:
        self.found.append(Figure(what, min(cost.wall for cost in theirs) / ours.wall, "x"))

    def saving(self) -> None:
        with lt.locked_memory():
            locked = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in self.model.items()}
        path = self.work / "saved"
        handle = lt.aio_handle()

        def through_writer() -> None:
            with lt.open_writer(handle, path) as writer:
                torch.save(self.model, cast(IO[bytes], writer))
                writer.fsync()

        works: dict[str, Callable[[], object]] = {
            "lt.save, locked tensors": lambda: lt.save(locked, path),
            "lt.save, ordinary tensors": lambda: lt.save(self.model, path),
            "torch.save through open_writer, fsynced": through_writer,
            "torch.save, fsynced": lambda: _synced(lambda: torch.save(self.model, path), path),
        }
        peers = ["torch.save, fsynced"]
        if (peer := self.peer) is not None:
            peers.append("safetensors, fsynced")
            works[peers[-1]] = lambda: _synced(lambda: peer.save_file(self.model, path), path)
        costs = interleaved(works, self.rounds, prepare=lambda _: path.unlink(missing_ok=True))
        handle.close()
        path.unlink()
        self.add_costs(costs)
        theirs = [costs[name] for name in peers]
        for kind in ("locked", "ordinary"):
            ours = costs[f"lt.save, {kind} tensors"]
            self.add_ratio(f"lt.save, {kind} tensors / the faster of {_named(peers)}", ours, theirs)
        self.add_ratio(
            "torch.save through open_writer / to a path, both fsynced",
            costs["torch.save through open_writer, fsynced"],
            theirs[:1],
        )

    def loading(self) -> None:
        torch_path, path = self.work / "model.pt", self.work / "model.safetensors"
        torch.save(self.model, torch_path)
        lt.save(self.model, path)
        self.model.clear()

        def keep(load: Callable[[], StateDict], is_mapped: bool = False) -> Callable[[], object]:
            def work() -> None:
                self.loaded = load()
                if is_mapped:
                    _touch(self.loaded)

            return work

        def make_cold(name: str) -> None:
            self.loaded = None
            if name in fresh:
                lt.empty_cache()
            for each in (torch_path, path):
                forget_cached(each)

        fresh = ["lt.load, memory fresh, small pages", "lt.load, memory fresh"]
        reused = "lt.load, memory reused"
        works = {
            fresh[0]: keep(lambda: lt.load(path, huge_pages="off")),
            fresh[1]: keep(lambda: lt.load(path)),
            reused: keep(lambda: lt.load(path)),
            "torch.load": keep(lambda: torch.load(torch_path)),
            "torch.load(mmap=True), touched": keep(lambda: torch.load(torch_path, mmap=True), is_mapped=True),
        }
        if (peer := self.peer) is not None:
            works["safetensors, touched"] = keep(lambda: peer.load_file(path), is_mapped=True)
        limit = lt.memory_stats()["cached_bytes.limit"]
        lt.set_cache_limit(2 * self.nbytes)
        costs = interleaved(works, self.rounds, prepare=make_cold)
        self.loaded = None
        lt.set_cache_limit(limit)
        self.add_costs({f"cold file: {name}": cost for name, cost in costs.items()})
        theirs = [cost for name, cost in costs.items() if not name.startswith("lt.")]
        for name in (reused, *fresh):
            self.add_ratio(f"cold file: {name} / the fastest of the others", costs[name], theirs)


def _named(peers: list[str]) -> str:
    return " and ".join(name.split(",")[0] for name in peers)


def _synced(save: Callable[[], object], path: Path) -> None:
    save()
    sync_file(path)


def _touch(loaded: StateDict) -> None:
    """Reads a byte of each page, for a file that was only mapped."""
    for tensor in loaded.values():
        tensor.view(torch.uint8).view(-1)[:: os.sysconf("SC_PAGE_SIZE")].max()
