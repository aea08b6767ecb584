"""One rank of two that save, load and reshard an FSDP2 model; asserts by itself. A process by itself."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import locked_tensor as lt
from locked_tensor.integrations.dcp import DirectReader, DirectWriter

SIZES = (515, 1030)  # 515 rows on two ranks are uneven shards


def make_model(seed: int, is_sharded: bool = True) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(*SIZES), torch.nn.ReLU(), torch.nn.Linear(*reversed(SIZES)))
    if is_sharded:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, SIZES[0])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def local_values(state: dict) -> dict[str, torch.Tensor]:
    values = dict(state["model"])
    for name, each in state["optimizer"]["state"].items():
        values.update({f"{name}.{key}": value for key, value in each.items()})
    return {
        name: getattr(value, "_local_tensor", value).detach().clone() for name, value in values.items()
    }


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def load_into_fresh(reader: dcp.StorageReader, wanted: dict[str, torch.Tensor]) -> None:
    model, optimizer = trained(seed=99)
    state = state_of(model, optimizer)
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_equal(local_values(state_of(model, optimizer)), wanted)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = trained(seed=1)
    state = state_of(model, optimizer)
    wanted = local_values(state)

    dcp.save(state, storage_writer=DirectWriter(f"{folder}/ours"))
    load_into_fresh(DirectReader(f"{folder}/ours"), wanted)
    load_into_fresh(dcp.FileSystemReader(f"{folder}/ours"), wanted)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/stock"))
    load_into_fresh(DirectReader(f"{folder}/stock"), wanted)

    # In the background, from a locked copy: training goes on meanwhile.
    writer = DirectWriter(f"{folder}/async")
    staged = []
    stage = writer.stage
    writer.stage = lambda state_dict: staged.append(stage(state_dict)) or staged[-1]
    saving = dcp.async_save(state, storage_writer=writer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()
    local = staged[0]["model"]["0.weight"]._local_tensor
    assert lt.is_locked(local)
    load_into_fresh(DirectReader(f"{folder}/async"), wanted)

    # Onto one rank's whole tensors, and onto columns where rows were.
    whole = {name: torch.zeros_like(value) for name, value in make_model(0, is_sharded=False).state_dict().items()}
    dcp.load({"model": whole}, storage_reader=DirectReader(f"{folder}/ours"))
    stock = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load({"model": stock}, storage_reader=dcp.FileSystemReader(f"{folder}/stock"))
    assert_equal(whole, stock)
    mesh = init_device_mesh("cpu", (2,))
    columns = {
        "0.weight": torch.distributed.tensor.distribute_tensor(
            torch.zeros(SIZES[1], SIZES[0]), mesh, [torch.distributed.tensor.Shard(1)]
        )
    }
    dcp.load({"model": columns}, storage_reader=DirectReader(f"{folder}/ours", staging_bytes=64 << 10))
    mine = whole["0.weight"].chunk(2, dim=1)[dist.get_rank()]
    assert torch.equal(columns["0.weight"]._local_tensor, mine)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("run by torchrun")
    main(sys.argv[1])
