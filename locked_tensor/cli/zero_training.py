"""A process that trains a small model with DeepSpeed's ZeRO stage 3 on the CPU, a step for each line it is given.

    python -m locked_tensor.cli.zero_training SETTINGS    (JSON of `Settings`)

It answers each line with "@" and JSON: the step's loss and seconds; at the end of its input with what the
handles moved. Everything else on its output is DeepSpeed's. `bench deepspeed` and the tests run it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable

import torch

import locked_tensor as lt

MARK = "@"
BATCH = 4


@dataclass(frozen=True)
class Settings:
    """What is trained and on which engine."""

    folder: str  #: takes the swap files
    is_ours: bool  #: this package's engine, else DeepSpeed's
    width: int  #: of each square layer, elements
    layers: int
    buffer_count: int  #: of the optimizer's swapper
    is_pipelined: bool
    has_swapped_params: bool  #: parameters on NVMe too


def main(arguments: list[str]) -> None:
    settings = Settings(**json.loads(arguments[0]))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    with _engine(settings):
        step = make_step(settings)
        for _ in sys.stdin:
            begin = time.perf_counter()
            loss = step()
            _answer({"loss": loss, "seconds": time.perf_counter() - begin})
        handles = [each for each in gc.get_objects() if isinstance(each, lt.AioHandle)]
        _answer({"stats": [handle.stats()._asdict() for handle in handles]})


def _engine(settings: Settings) -> contextlib.AbstractContextManager[Any]:
    if not settings.is_ours:
        return contextlib.nullcontext()
    from locked_tensor.integrations.deepspeed import install

    return install()


def _answer(values: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(values)}\n")
    sys.stdout.flush()


def make_step(settings: Settings) -> Callable[[], float]:
    """A function that trains one step and returns its loss."""
    import deepspeed

    config = _configuration(settings)
    is_partitioned = settings.has_swapped_params
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if is_partitioned else contextlib.nullcontext():
        layers = [torch.nn.Linear(settings.width, settings.width, bias=False) for _ in range(settings.layers)]
        model = torch.nn.Sequential(*[module for layer in layers for module in (layer, torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, settings.width, generator=generator).bfloat16()
    targets = torch.randn(BATCH, settings.width, generator=generator)

    def step() -> float:
        loss = torch.nn.functional.mse_loss(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _configuration(settings: Settings) -> dict[str, Any]:
    layer = settings.width * settings.width
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": 2 * layer,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": settings.folder,
            "buffer_count": settings.buffer_count,
            "pipeline_read": settings.is_pipelined,
            "pipeline_write": settings.is_pipelined,
        },
    }
    if settings.has_swapped_params:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": settings.folder,
            "buffer_size": 2 * layer,
            "buffer_count": 6,
            "max_in_cpu": 0,
        }
        # DeepSpeed 0.19.8's prefetch from NVMe fails on its own in a model this small, on either engine:
        # "param already assigned swap buffer".
        zero["stage3_prefetch_bucket_size"] = 0
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
