"""DeepSpeed, as it is installed, on this engine. It keeps global state: each test runs it in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from locked_tensor.cli.zero_training import MARK, Settings

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed==0.19.8"
)

PREFACE = """
import gc, os, sys, types, warnings
import torch, locked_tensor as lt
from locked_tensor.integrations.deepspeed import install, uninstall
from locked_tensor.integrations.deepspeed import async_io, gds, pin_memory
"""


def run(arguments, input=None, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", *map(str, arguments)],
        env=dict(os.environ, PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu", **environment),
        input=input,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_code(code, *arguments, **environment):
    return run(["-c", PREFACE + code, *arguments], **environment)


def test_install_replaces_what_builders_load_and_uninstall_undoes_it():
    run_code("""
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
from deepspeed.ops.aio import AsyncIOBuilder as imported_before
from deepspeed.ops.op_builder.gds import GDSBuilder
before = {each: dict(vars(each)) for each in (AsyncIOBuilder, PinMemoryBuilder, GDSBuilder)}
with warnings.catch_warnings():
    warnings.simplefilter("error", RuntimeWarning)
    with install() as installation:
        assert installation.operators == ("async_io", "pin_memory")  # no GPU: DeepSpeed hands out no GDS
        assert AsyncIOBuilder().load() is imported_before().load(verbose=True) is async_io
        assert PinMemoryBuilder().load() is pin_memory
        assert GDSBuilder().load() is gds
        assert AsyncIOBuilder().is_compatible() is True
        assert PinMemoryBuilder().is_compatible(verbose=True) is True
        with install() as again:
            assert again.operators == installation.operators
        assert AsyncIOBuilder().load() is async_io  # the inner one found it so and leaves it so
    assert all(dict(vars(each)) == own for each, own in before.items())
    install()
    assert AsyncIOBuilder().load() is async_io
    uninstall()
    uninstall()
    assert all(dict(vars(each)) == own for each, own in before.items())
""")


def test_compatibility_is_what_this_machine_grants(run_with_memlock):
    code = PREFACE + """
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
install()
sys.exit(20 + 2 * AsyncIOBuilder().is_compatible(True) + PinMemoryBuilder().is_compatible(True))
"""
    os.environ["DS_ACCELERATOR"] = "cpu"
    done = run_with_memlock(0, "-c", code)
    assert done.returncode == 22, done.stdout + done.stderr  # I/O goes on, locking does not
    assert "RLIMIT_MEMLOCK" in done.stdout


@pytest.mark.parametrize("version", ["0.18.0", "1.0.0+local"])
def test_an_untried_version_is_a_warning_and_works(version):
    run_code("""
import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder
deepspeed.__version__ = sys.argv[1]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    install()
messages = [str(each.message) for each in caught if each.category is RuntimeWarning]
assert len(messages) == 1 and sys.argv[1] in messages[0] and "0.19.8" in messages[0], messages
assert AsyncIOBuilder().load() is async_io
""", version)


def test_a_version_without_native_memory_keeps_the_rest():
    run_code("""
import deepspeed.accelerator, deepspeed.ops.op_builder.pin_memory as home
import deepspeed.utils.pin_memory as native
del home.PinMemoryBuilder, native._shared_native_pins
accelerator = deepspeed.accelerator.get_accelerator()
original = accelerator.get_op_builder
accelerator.get_op_builder = lambda name: None if name == "PinMemoryBuilder" else original(name)
assert install().operators == ("async_io",)
uninstall()
""")


def test_without_deepspeed_the_message_says_what_to_install():
    run_code("""
sys.modules["deepspeed"] = None
try:
    install()
except ModuleNotFoundError as error:
    assert "pip install deepspeed" in str(error)
else:
    raise RuntimeError("installed into nothing")
""")


def test_the_async_io_module_has_deepspeeds_names_and_values(disk_folder):
    run_code("""
folder = sys.argv[1]
handle = async_io.aio_handle(block_size=1 << 20, queue_depth=8, single_submit=False, overlap_events=True,
                             intra_op_parallelism=2)
assert isinstance(handle, lt.AioHandle) and handle.get_alignment() == 1024
data = handle.new_cpu_locked_tensor(5001, torch.empty(0, dtype=torch.float32)).copy_(torch.arange(5001.0))
assert async_io.aio_write(data, folder + "/file", 1 << 20, 8, False, True, True) == 0
fresh = torch.zeros(5001)
assert async_io.aio_read(fresh, folder + "/file", 1 << 20, 8, True, False, False) == 0
assert torch.equal(fresh, torch.arange(5001.0))
fd = os.open(folder + "/by_fd", os.O_WRONLY | os.O_CREAT)
assert handle.async_pwrite(torch.narrow(data, 0, 0, 1024), fd, 512) == 0
assert handle.wait() == 1
os.close(fd)
assert open(folder + "/by_fd", "rb").read()[512:] == data[:1024].numpy().tobytes()
target = torch.zeros(10, 10)
assert async_io.deepspeed_memcpy(target, data) == 0
assert torch.equal(target.view(-1), torch.arange(100.0))
for wrong in (torch.zeros(3), torch.zeros(200, dtype=torch.int32)):
    try:
        async_io.deepspeed_memcpy(target, wrong)
    except ValueError:
        continue
    raise RuntimeError("copied what does not fit")
assert torch.equal(target.view(-1), torch.arange(100.0))
""", disk_folder)


def test_native_memory_outlives_its_views_however_it_is_given_up():
    run_code("""
from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()
install()
source = torch.arange(100_000.0).view(100, 1000)
nbytes = source.nbytes

# The finalizer of the base gives up; a view keeps the base.
locked = accelerator.pin_memory(source)
assert type(locked) is lt.LockedTensor and accelerator.is_pinned(locked) and lt.is_locked(locked)
view = locked[10:20]
del locked
gc.collect()
assert lt.memory_allocated() == nbytes and accelerator.is_pinned(view)
assert torch.equal(view, source[10:20])
del view
gc.collect()
assert lt.memory_allocated() == 0

# Given up by address while tensors still point there; then redirected.
locked = accelerator.pin_memory(source)
row = locked[5]
assert accelerator.unpin_memory(locked) is True
assert accelerator.unpin_memory(locked) is False
assert not accelerator.is_pinned(row)
locked.data = torch.empty(0)
assert torch.equal(row, source[5])
del locked, row
gc.collect()
assert lt.memory_allocated() == 0

# Redirected first: the recorded address counts.
locked = accelerator.pin_empty(10, 20, dtype=torch.float16)
address = locked.data_ptr()
locked.data = torch.zeros(5)
assert accelerator.unpin_memory(locked) is True
handle = pin_memory.pin_handle()
for nowhere in (0, address, address + 1, id(handle)):
    assert handle.free_cpu_locked_tensor_by_ptr(nowhere) is False
mine = handle.new_cpu_locked_tensor(100, torch.empty(0))
assert handle.is_pinned(mine[3:4]) and not handle.is_pinned(torch.empty(1))
assert handle.free_cpu_locked_tensor_by_ptr(mine.data_ptr() + 4) is False
assert handle.free_cpu_locked_tensor(mine) is True and mine.numel() == 0
""", DS_PIN_MEMORY_BACKEND="native")


def test_fast_file_writer_writes_what_torch_save_gives_it(disk_folder):
    run_code("""
import deepspeed.io.fast_file_writer as home
from deepspeed.io import FastFileWriter, FastFileWriterConfig
install()
# Its operator for the CPU exists nowhere in DeepSpeed: bytes of each tensor.
utils = types.SimpleNamespace(cast_to_byte_tensor=lambda many: [each.view(torch.uint8) for each in many])
home.UtilsBuilder = lambda: types.SimpleNamespace(load=lambda: utils)
from deepspeed.ops.op_builder import AsyncIOBuilder
state = {"weight": torch.randn(700, 1001), "bias": torch.arange(13)}
for is_double in (True, False):
    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(3 << 10, torch.empty(0, dtype=torch.uint8))  # 1024, not 4096, divides it
    path = f"{sys.argv[1]}/checkpoint{is_double}"
    writer = FastFileWriter(path, FastFileWriterConfig(handle, buffer, is_double))
    torch.save(state, writer)
    writer.close()
    loaded = torch.load(path)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert handle.free_cpu_locked_tensor(buffer) is True
""", disk_folder)


@pytest.mark.parametrize("operation", ["write", "read"])
def test_ds_io_runs_on_this_engine(disk_folder, operation):
    arguments = ["--folder", disk_folder, "--io_size", "4M", "--loops", "2"] + ["--read"] * (operation == "read")
    said = run(
        ["-m", "locked_tensor.integrations.deepspeed.ds_io", *arguments],
        TORCH_EXTENSIONS_DIR=str(disk_folder / "nothing_is_compiled"),
    )
    assert f"Task {operation.capitalize()} Speed" in said
    assert not (disk_folder / "nothing_is_compiled").exists()
    sizes = {path.stat().st_size for path in disk_folder.iterdir() if path.is_file()}
    assert sizes == {4 << 20}


# --- ZeRO stage 3 with both engines ---------------------------------------------------------------


def train(folder, is_ours, buffer_count, is_pipelined, has_swapped_params, steps=4):
    folder.mkdir()
    settings = Settings(str(folder), is_ours, 1024, 3, buffer_count, is_pipelined, has_swapped_params)
    said = run(["-m", "locked_tensor.cli.zero_training", json.dumps(asdict(settings))], input="\n" * steps)
    answers = [json.loads(line.removeprefix(MARK)) for line in said.splitlines() if line.startswith(MARK)]
    assert len(answers) == steps + 1
    files = sum(len(names) for _, _, names in os.walk(folder))
    return [answer["loss"] for answer in answers[:-1]], answers[-1]["stats"], files


@pytest.mark.slow
@pytest.mark.parametrize(
    "buffer_count, is_pipelined, has_swapped_params",
    [(5, False, False), (30, True, False), (30, True, True)],
    ids=["optimizer", "optimizer, pipelined", "optimizer and parameters"],
)
def test_zero_3_has_equal_losses_on_both_engines(disk_folder, buffer_count, is_pipelined, has_swapped_params):
    kind = (buffer_count, is_pipelined, has_swapped_params)
    losses, stats, files = train(disk_folder / "ours", True, *kind)
    their_losses, no_stats, their_files = train(disk_folder / "theirs", False, *kind)
    assert losses == their_losses
    assert losses[-1] < losses[0]
    assert files == their_files >= 9
    assert no_stats == []
    assert sum(each["bytes_direct"] for each in stats) > 100 << 20
    assert sum(each["bytes_bounced"] + each["bytes_buffered"] for each in stats) == 0
