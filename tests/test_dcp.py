"""torch.distributed.checkpoint on this engine: what goes both ways with torch's own, and how much memory it takes."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import locked_tensor as lt
from locked_tensor.integrations.dcp import DirectReader, DirectWriter

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def make_state():
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(1000, 1030, generator=generator)
    return {
        "aligned": lt.lock(torch.arange(1 << 18)),
        "odd": random[:333, :777].contiguous(),
        "strided": random[10:700:3, ::2],
        "transposed": random.t(),
        "bfloat16": random[:500].bfloat16(),
        "complex": torch.view_as_complex(random.view(1000, 515, 2)).conj(),
        "small": torch.arange(10),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nothing": {"step": 3, "name": "word"},
        "parameter": torch.nn.Parameter(random[:200].clone()),
    }


def blank(state):
    return {
        name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else dict.fromkeys(value)
        for name, value in state.items()
    }


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value.detach().resolve_conj()), name
        else:
            assert found[name] == value, name


def loaded(reader, state):
    target = blank(state)
    dcp.load(target, storage_reader=reader)
    return target


def test_files_go_both_ways(folder):
    state = make_state()
    dcp.save(state, storage_writer=DirectWriter(folder / "ours"))
    plain = {**state, "complex": state["complex"].resolve_conj()}
    dcp.save(plain, storage_writer=dcp.FileSystemWriter(folder / "stock"))
    assert sorted(os.listdir(folder / "ours")) == sorted(os.listdir(folder / "stock"))
    assert_equal(loaded(DirectReader(folder / "ours"), state), state)
    assert_equal(loaded(dcp.FileSystemReader(folder / "ours"), state), state)
    assert_equal(loaded(DirectReader(folder / "stock"), state), state)


def test_a_locked_tensor_moves_without_a_bounce_both_ways(disk_folder):
    with lt.locked_memory():
        state = {"weight": torch.randn(1024, 1024)}
        target = {"weight": torch.zeros(1024, 1024)}
    with lt.aio_handle() as handle:
        dcp.save(state, storage_writer=DirectWriter(disk_folder, aio_handle=handle))
        assert handle.stats().bytes_direct >= state["weight"].nbytes
        before = handle.stats()
        dcp.load(target, storage_reader=DirectReader(disk_folder, aio_handle=handle))
        assert handle.stats().bytes_direct - before.bytes_direct == target["weight"].nbytes
        assert handle.stats().bytes_bounced == before.bytes_bounced
    assert torch.equal(target["weight"], state["weight"])


def test_locked_staging_is_bounded(disk_folder):
    state = {f"{i}": torch.randn(1 << 20) for i in range(16)}  # 64 MiB
    lt.empty_cache()
    lt.reset_peak_memory_stats()
    before = lt.memory_allocated()
    dcp.save(state, storage_writer=DirectWriter(disk_folder, staging_bytes=4 << 20))
    target = {name: torch.zeros(1 << 20, dtype=torch.float64) for name in state}  # by rows, converted
    dcp.load(target, storage_reader=DirectReader(disk_folder, staging_bytes=4 << 20))
    assert lt.max_memory_allocated() - before <= 12 << 20
    assert all(torch.equal(target[name], value.double()) for name, value in state.items())


def test_saving_again_replaces_and_refuses_when_it_may_not(disk_folder):
    large, small = {"x": torch.ones(1 << 20)}, {"x": torch.zeros(1 << 16)}
    dcp.save(large, storage_writer=DirectWriter(disk_folder))
    with pytest.warns(UserWarning, match="overwriting"):
        dcp.save(small, storage_writer=DirectWriter(disk_folder))
    assert (disk_folder / "__0_0.distcp").stat().st_size < 1 << 19
    assert_equal(loaded(DirectReader(disk_folder), small), small)
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        dcp.save(large, storage_writer=DirectWriter(disk_folder, overwrite=False))
    assert_equal(loaded(DirectReader(disk_folder), small), small)


def test_an_async_save_writes_what_was_there_from_locked_memory(disk_folder):
    state = {"x": torch.ones(1 << 20), "steps": 7}
    writer = DirectWriter(disk_folder)
    staged = writer.stage(state)
    assert lt.is_locked(staged["x"]) and not lt.is_locked(state["x"])
    assert staged["steps"] == 7
    saving = dcp.async_save(state, storage_writer=writer, process_group=gloo())
    state["x"].zero_()
    saving.result()
    target = {"x": torch.zeros(1 << 20), "steps": 0}
    dcp.load(target, storage_reader=DirectReader(disk_folder))
    assert bool((target["x"] == 1).all()) and target["steps"] == 7


@pytest.fixture(autouse=True)
def _no_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def gloo():
    """async_save insists on a process group, of one here."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    return torch.distributed.group.WORLD


def test_settings_of_torch_save_are_put_back(disk_folder):
    from torch.utils.serialization import config

    dcp.save({"x": torch.ones(1 << 16)}, storage_writer=DirectWriter(disk_folder))
    assert config.save.storage_alignment == 64 and config.save.compute_crc32 is True


def test_refusals_come_with_their_cause_and_leave_the_handle_usable(disk_folder):
    state = {"x": torch.ones(1 << 20)}
    with pytest.raises(ValueError, match="staging_bytes"):
        DirectWriter(disk_folder, staging_bytes=100)
    with pytest.raises(ValueError, match="staging_bytes"):
        DirectReader(disk_folder, staging_bytes=-1)
    with lt.aio_handle() as handle:
        (disk_folder / "checkpoint").mkdir()
        (disk_folder / "checkpoint" / "__0_0.distcp").mkdir()
        with pytest.raises(dcp.CheckpointException) as refused:
            dcp.save(state, storage_writer=DirectWriter(disk_folder / "checkpoint", aio_handle=handle))
        (cause, _) = refused.value.failures[0]
        assert isinstance(cause, OSError) and cause.errno == errno.EISDIR
        dcp.save(state, storage_writer=DirectWriter(disk_folder / "good", aio_handle=handle))
        path = disk_folder / "good" / "__0_0.distcp"
        whole = path.read_bytes()
        path.write_bytes(whole[:4096] + bytes(4096))
        with pytest.raises(dcp.CheckpointException):
            dcp.load(dict(state), storage_reader=DirectReader(disk_folder / "good", aio_handle=handle))
        path.write_bytes(whole)
        assert_equal(loaded(DirectReader(disk_folder / "good", aio_handle=handle), state), state)
        handle.wait()  # nothing failed that nobody took


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_two_ranks_of_fsdp_save_load_and_reshard(disk_folder):
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", ROOT / "tests/dcp_ranks.py", str(disk_folder)],
            env=dict(os.environ, PYTHONPATH=str(ROOT), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)[-4000:]
