"""`locked-tensor bench deepspeed`: a ZeRO-3 step with the optimizer on NVMe, on this engine and on DeepSpeed's."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from locked_tensor.cli.arguments import count
from locked_tensor.cli.bench import Figure, add_folder_options, add_json_option, show
from locked_tensor.cli.disk import check_space, may_wear, work_folder
from locked_tensor.cli.zero_training import MARK, Settings

LAYERS = 12
BYTES_OF_PARAMETER = 16  # on disk: fp32 weight, two moments, gradient
ENGINES = 2
KINDS = {"one at a time": (5, False), "pipelined": (30, True)}  # buffers, pipelining


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("deepspeed", help="DeepSpeed's ZeRO-3 step on both engines", description=__doc__)
    add_json_option(parser)
    add_folder_options(parser)
    parser.add_argument("--parameters", type=count, default=50_000_000, help="of the model (default: 50 million)")
    parser.add_argument("--rounds", type=count, default=5, help="steps that are counted (default: 5)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Refuses, warns, measures and shows; the exit status."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("DeepSpeed is not installed: pip install deepspeed")
    check_space(chosen.folder, 3 * BYTES_OF_PARAMETER * chosen.parameters)
    # Each training writes its state when it begins and with each step, of which one is not counted.
    written = ENGINES * len(KINDS) * BYTES_OF_PARAMETER * chosen.parameters * (chosen.rounds + 2)
    if not may_wear([chosen.folder], written, chosen.yes):
        return 1
    return show("bench deepspeed", figures(chosen.folder, chosen.parameters, chosen.rounds), chosen.json)


def figures(folder: Path, parameters: int, rounds: int) -> list[Figure]:
    """Seconds of a step, and ours as a share of DeepSpeed's, without and with pipelining."""
    found = []
    for name, (buffer_count, is_pipelined) in KINDS.items():
        ours, theirs = _step_seconds(folder, parameters, rounds, buffer_count, is_pipelined)
        found += [
            Figure(f"step, {name}: ours", ours, "s"),
            Figure(f"step, {name}: DeepSpeed's", theirs, "s"),
            Figure(f"step, {name}: ours / DeepSpeed's", ours / theirs, "x"),
        ]
    return found


def _step_seconds(
    folder: Path, parameters: int, rounds: int, buffer_count: int, is_pipelined: bool
) -> tuple[float, float]:
    """Medians of both engines, step by step in turn, after one step each that is not counted."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    trainings: dict[bool, Training] = {}
    with work_folder(folder, "bench") as work:
        try:
            for is_ours in (True, False):
                settings = Settings(
                    folder=f"{work}/{'ours' if is_ours else 'theirs'}",
                    is_ours=is_ours,
                    width=math.isqrt(parameters // LAYERS) // 64 * 64,
                    layers=LAYERS,
                    buffer_count=buffer_count,
                    is_pipelined=is_pipelined,
                    has_swapped_params=False,
                )
                trainings[is_ours] = Training(settings)
            for number in range(rounds + 1):
                for is_ours, training in trainings.items():
                    answer = training.step()
                    if number > 0:
                        seconds[is_ours].append(answer["seconds"])
        finally:
            for training in trainings.values():
                training.end()
    return statistics.median(seconds[True]), statistics.median(seconds[False])


class Training:
    """A `zero_training` process: `step` by step, then `end`."""

    def __init__(self, settings: Settings) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "locked_tensor.cli.zero_training", json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self) -> dict[str, Any]:
        """Trains one step: its "loss" and "seconds".

        Raises:
            OSError: the process has ended.
        """
        questions, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        questions.write("\n")
        questions.flush()
        for line in answers:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise OSError(f"the training ended with status {self._process.wait()}")

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            cast(IO[str], stream).close()
