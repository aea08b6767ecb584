"""Trains a small model with ZeRO stage 3 on the CPU and prints what came of it as JSON. A process by itself."""

import contextlib
import gc
import json
import os
import socket
import sys


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


os.environ.update(
    DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
)

import deepspeed  # noqa: E402
import torch  # noqa: E402

import locked_tensor as lt  # noqa: E402
from locked_tensor.integrations.deepspeed import install  # noqa: E402


def configuration(folder: str, width: int, buffer_count: int, is_pipelined: bool, has_swapped_params: bool) -> dict:
    zero = {
        "stage": 3,
        "sub_group_size": 2 * width * width,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": folder,
            "buffer_count": buffer_count,
            "pipeline_read": is_pipelined,
            "pipeline_write": is_pipelined,
        },
    }
    if has_swapped_params:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": folder,
            "buffer_size": 2 * width * width,
            "buffer_count": 6,
            "max_in_cpu": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True},
    }


def make_model(width: int, layers: int, config: dict) -> torch.nn.Module:
    is_partitioned = "offload_param" in config["zero_optimization"]
    context = deepspeed.zero.Init(config_dict_or_path=config) if is_partitioned else contextlib.nullcontext()
    torch.manual_seed(0)
    with context:
        return torch.nn.Sequential(
            *[
                module
                for _ in range(layers)
                for module in (torch.nn.Linear(width, width, bias=False), torch.nn.GELU())
            ]
        )


def train(folder: str, width: int, layers: int, steps: int, config: dict) -> list[float]:
    model = make_model(width, layers, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, width, generator=generator).bfloat16()
    targets = torch.randn(4, width, generator=generator).bfloat16()
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(engine(inputs).float(), targets.float())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    chosen = json.loads(sys.argv[1])
    deepspeed.init_distributed("gloo", verbose=False)
    with install() if chosen["is_ours"] else contextlib.nullcontext():
        config = configuration(
            chosen["folder"], chosen["width"], chosen["buffer_count"], chosen["is_pipelined"], chosen["has_swapped_params"]
        )
        losses = train(chosen["folder"], chosen["width"], chosen["layers"], chosen["steps"], config)
        stats = [each.stats()._asdict() for each in gc.get_objects() if isinstance(each, lt.AioHandle)]
    files = sorted(name for _, _, names in os.walk(chosen["folder"]) for name in names)
    result = {"losses": losses, "stats": stats, "files": len(files), "allocated": lt.memory_allocated()}
    sys.__stdout__.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
