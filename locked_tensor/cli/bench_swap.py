"""`locked-tensor bench swap`: optimizer state, parameters and activations on disk beside memory."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Callable

import torch

import locked_tensor as lt
from locked_tensor.cli.arguments import count
from locked_tensor.cli.bench import Figure, add_folder_options, add_output_options, add_rounds_option, show
from locked_tensor.cli.disk import check_space, may_wear, work_folder
from locked_tensor.cli.measure import Cost, interleaved

BUDGET = 512 << 20
PARAMETER_ELEMENTS = 10_000_000
BYTES_AT_ONCE = 24  # for each parameter: three times Adam's state
BYTES_EACH_ROUND = 52  # for each parameter: both optimizers, three states each, and the raw writes


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("swap", help="training and running models from disk", description=__doc__)
    add_output_options(parser)
    add_folder_options(parser)
    parser.add_argument(
        "--parameters", type=count, default=200_000_000, help="of the model, fp32 (default: 200 million)"
    )
    add_rounds_option(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    check_space(chosen.folder, BYTES_AT_ONCE * chosen.parameters)
    written = BYTES_EACH_ROUND * chosen.parameters * (chosen.rounds + 1)
    if not may_wear([chosen.folder], written, chosen.yes):
        return 1
    found = figures(chosen.folder, chosen.parameters, chosen.rounds)
    return show("bench swap", found, chosen.json, chosen.plot)


def figures(folder: Path, parameters: int, rounds: int) -> list[Figure]:
    with work_folder(folder, "bench") as work:
        return [
            *_optimizer(work, parameters, rounds, fused=False),
            *_optimizer(work, parameters, rounds, fused=True),
            *_forward(work, parameters, rounds, batch=1),
            *_forward(work, parameters, rounds, batch=512),
            *_activations(work, parameters, rounds),
        ]


class _Disk:
    """Reads and writes as much as a step does, on files that exist, with the default settings."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._handle = lt.aio_handle()
        self._path = folder / "raw"
        self._parts = -(-nbytes // (32 << 20))
        with lt.locked_memory():
            self._pool = torch.ones(4, 32 << 20, dtype=torch.uint8)
        self.write()

    def write(self) -> None:
        self._move(self._handle.async_pwrite)

    def read(self) -> None:
        self._move(self._handle.async_pread)

    def _move(self, start: Callable[..., int]) -> None:
        for part in range(self._parts):
            if part % 4 == 0:
                self._handle.wait()
            start(self._pool[part % 4], self._path, part * self._pool.shape[1])
        self._handle.wait()

    def close(self) -> None:
        self._handle.close()
        self._path.unlink()


def _optimizer(folder: Path, count: int, rounds: int, fused: bool) -> list[Figure]:
    from locked_tensor.swap import SwappedOptimizer

    each = min(PARAMETER_ELEMENTS, count)
    params = [torch.nn.Parameter(torch.randn(each)) for _ in range(-(-count // each))]
    for param in params:
        param.grad = torch.randn(each)
    worst = [0]

    def sample(done: int, total: int) -> None:
        worst[0] = max(worst[0], lt.memlock_limit().locked)

    def swapped(pipeline: bool) -> SwappedOptimizer:
        return SwappedOptimizer(
            params,
            torch.optim.AdamW,
            folder=folder,
            max_locked_bytes=BUDGET,
            pipeline=pipeline,
            on_progress=sample,
            fused=fused,
        )

    name = "AdamW, fused" if fused else "AdamW"
    disk = _Disk(folder, 8 * each * len(params))
    lt.empty_cache()
    base = lt.memlock_limit().locked
    with swapped(True) as piped, swapped(False) as plain:
        memory = torch.optim.AdamW(params, fused=fused)
        works: dict[str, Callable[[], Any]] = {
            "memory": memory.step,
            "read": disk.read,
            "write": disk.write,
            "pipelined": piped.step,
            "in turn": plain.step,
        }
        costs = interleaved(works, rounds)
        locked = worst[0] - base
    disk.close()
    walls = {work: cost.wall for work, cost in costs.items()}
    bound = max(walls["memory"], walls["read"] + walls["write"])
    shown = f"{each * len(params) // 1_000_000:,} M parameters, {name}"
    return [
        Figure(f"{shown}: step in memory", walls["memory"], "s"),
        Figure(f"{shown}: reading / writing its state", walls["read"] / walls["write"], "x"),
        Figure(f"{shown}: reading and writing its state", walls["read"] + walls["write"], "s"),
        Figure(f"{shown}: step, state on disk", walls["pipelined"], "s"),
        Figure(f"{shown}: step / the longer of memory and disk", walls["pipelined"] / bound, "x"),
        Figure(f"{shown}: step without pipeline", walls["in turn"], "s"),
        Figure(f"{shown}: pipelined / without", walls["pipelined"] / walls["in turn"], "x"),
        Figure(f"{shown}: locked memory of both at most", locked / 2**20, "MiB"),
    ]


def _forward(folder: Path, count: int, rounds: int, batch: int) -> list[Figure]:
    from locked_tensor.swap import SwappedParameters

    width = min(2048, max(128, math.isqrt(count // 8)))
    layers = max(8, count // width**2)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))

    plain, other = model(), model()
    nbytes = sum(param.nbytes for param in plain.parameters())
    x = torch.randn(batch, width)
    budget = min(BUDGET, nbytes // 4)
    disk = _Disk(folder, nbytes)
    with SwappedParameters(other, folder=folder, max_locked_bytes=budget) as swapped, torch.no_grad():
        costs: dict[str, Cost] = interleaved(
            {"memory": lambda: plain(x), "read": disk.read, "swapped": lambda: other(x)}, rounds
        )
        before = swapped.stats().bytes_read
        other(x)
        share = (swapped.stats().bytes_read - before) / nbytes
    disk.close()
    swapped_wall, memory = costs["swapped"].wall, costs["memory"].wall
    read = costs["read"].wall * share
    shown = f"{nbytes >> 20:,} MiB of parameters, batch {batch}, budget {budget >> 20} MiB"
    return [
        Figure(f"{shown}: forward in memory", memory, "s"),
        Figure(f"{shown}: forward, parameters on disk", swapped_wall, "s"),
        Figure(f"{shown}: share read again each time", share, ""),
        Figure(f"{shown}: forward / reading that share", swapped_wall / read, "x"),
        Figure(f"{shown}: forward / in memory", swapped_wall / memory, "x"),
    ]


def _activations(folder: Path, count: int, rounds: int) -> list[Figure]:
    from locked_tensor.swap import save_on_disk

    width = min(1024, max(128, math.isqrt(count // 8)))
    model = torch.nn.Sequential(
        *(layer for _ in range(12) for layer in (torch.nn.Linear(width, width), torch.nn.GELU()))
    )
    x = torch.randn(2 * width, width)

    def train(context: Any) -> None:
        model.zero_grad()
        with context:
            loss = model(x).square().mean()
        loss.backward()

    works: dict[str, Callable[[], object]] = {
        "memory": lambda: model(x).square().mean().backward(),
        "cpu": lambda: train(torch.autograd.graph.save_on_cpu()),
        "disk": lambda: train(save_on_disk(folder)),
    }
    costs = interleaved(works, rounds)
    return [
        Figure("forward and backward, save_on_disk / save_on_cpu", costs["disk"].wall / costs["cpu"].wall, "x"),
        Figure("forward and backward, save_on_disk / saved in memory", costs["disk"].wall / costs["memory"].wall, "x"),
    ]
