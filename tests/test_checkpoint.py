"""`save` and `load`: every tensor both ways with safetensors, parts of tensors, replacement, errors."""

import errno
import gc
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import locked_tensor as lt
from locked_tensor import boxes, files, safetensors_reader
from locked_tensor.safetensors_format import DTYPES

ROOT = Path(__file__).parent.parent
ODD = (333, 1111)  # rows and sizes that fit no page
SHAPES = [(), (3,), (0,), (2, 0, 3), (3, 4), (512, 1024), ODD]


def elements(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    top = 2 if dtype == torch.bool else 120
    raw = torch.randint(0, top, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = lt.as_plain(tensor.detach()).resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) if plain.numel() else torch.empty(0)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.fixture(scope="module")
def everything() -> dict[str, torch.Tensor]:
    tensors = {}
    for number, (label, dtype) in enumerate(DTYPES.items()):
        for shape in SHAPES:
            if label == "F4" and shape == ():
                continue
            tensors[f"{label}/{shape}"] = elements(dtype, shape, number)
    with lt.locked_memory():
        pool = torch.randn(1000, 1024)
    tied = torch.nn.Parameter(torch.randn(40, 50))
    tensors |= {
        "locked": pool,
        "locked view": pool[3:700, 5:900],
        "locked transposed": pool.T,
        "locked parameter": torch.nn.Parameter(lt.lock(torch.randn(77))),
        "small, not contiguous": torch.randn(7, 9).T,
        "expanded": torch.randn(3, 1).expand(3, 500),
        "conjugated": torch.randn(7, 9, dtype=torch.complex64).conj(),
        "large, conjugated": torch.randn(700, 90, dtype=torch.complex64).conj(),
        "negated": torch.randn(5, dtype=torch.complex64).conj().imag,
        "tied": tied,
        "tied too": tied,
        "tied, transposed": tied.T,
        "computed": tied * 2,
        "naïve ☃ \n \"name\"": torch.ones(2),
        "": torch.ones(1),
    }
    return tensors


def test_what_is_saved_is_loaded_locked(folder, everything):
    path = folder / "model.safetensors"
    lt.save(everything, path)
    loaded = lt.load(path)
    assert_same(loaded, everything)
    for name, tensor in loaded.items():
        if tensor.numel():
            assert type(tensor) is lt.LockedTensor and tensor.is_locked(), name
        assert tensor.is_contiguous() and tensor.is_leaf and not tensor.requires_grad and tensor._base is None


def test_safetensors_reads_what_is_saved(folder, everything):
    path = folder / "model.safetensors"
    lt.save(everything, path, metadata={"format": "pt", "é": "☃"})
    assert_same(safetensors.torch.load_file(path), everything)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "é": "☃"}


def test_what_safetensors_saves_is_loaded(folder, everything):
    path = folder / "model.safetensors"
    copies = {name: tensor.detach().resolve_conj().resolve_neg().contiguous().clone() for name, tensor in everything.items()}
    safetensors.torch.save_file(copies, path, metadata={"a": "b"})
    assert_same(lt.load(path), everything)
    with lt.open_safetensors(path) as file:
        assert file.metadata == {"a": "b"}
        assert set(file.keys()) == set(everything)
        assert file.entries["F32/(3, 4)"].shape == (3, 4)


@pytest.mark.parametrize("tensors", [{}, {"empty": torch.empty(0)}, {"one": torch.tensor(True)}], ids=["nothing", "empty", "one"])
def test_the_smallest_files_go_both_ways(folder, tensors):
    lt.save(tensors, folder / "ours")
    assert_same(safetensors.torch.load_file(folder / "ours"), tensors)
    safetensors.torch.save_file(tensors, folder / "theirs")
    assert_same(lt.load(folder / "theirs"), tensors)


def test_many_small_tensors_go_both_ways(disk_folder):
    tensors = {f"layer.{number}": torch.full((number % 700 + 1,), number) for number in range(12_000)}
    lt.save(tensors, disk_folder / "file")
    with lt.aio_handle() as handle:
        assert_same(lt.load(disk_folder / "file", aio_handle=handle), tensors)
        assert handle.stats().operations < 20
    assert_same(safetensors.torch.load_file(disk_folder / "file"), tensors)


def test_data_begins_on_a_page_and_whole_pages_come_first(folder):
    tensors = {"odd": torch.ones(3), "pages": torch.ones(2048), "double": torch.ones(5, dtype=torch.float64)}
    lt.save(tensors, folder / "file")
    with lt.open_safetensors(folder / "file") as file:
        assert list(file.entries) == ["pages", "double", "odd"]
    length = int.from_bytes((folder / "file").read_bytes()[:8], "little")
    assert (8 + length) % 4096 == 0
    assert (folder / "file").stat().st_size == 8 + length + 8192 + 40 + 12


def test_locked_pages_move_directly_both_ways(disk_folder):
    with lt.locked_memory():
        tensors = {str(number): torch.full((1 << 20,), number, dtype=torch.uint8) for number in range(8)}
    with lt.aio_handle() as handle:
        lt.save(tensors, disk_folder / "file", aio_handle=handle)
        assert handle.stats().bytes_direct >= 8 << 20
        assert handle.stats().bytes_bounced <= 4096  # the header
    with lt.aio_handle() as handle:
        assert_same(lt.load(disk_folder / "file", aio_handle=handle), tensors)
        assert handle.stats().bytes_direct >= 8 << 20
        assert handle.stats().bytes_bounced <= 65536


def test_files_whose_data_lies_askew_are_loaded_without_a_bounce(disk_folder):
    tensors = {"first": torch.randn(1001), "large": torch.randn(3_000_001)}
    safetensors.torch.save_file(tensors, disk_folder / "file")
    with lt.aio_handle() as handle:
        assert_same(lt.load(disk_folder / "file", aio_handle=handle), tensors)
        assert handle.stats().bytes_direct > 3_000_000 * 4 - 16384


def test_each_tensor_has_memory_of_its_own(folder):
    lt.save({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, folder / "file")
    before = lt.memory_allocated()
    loaded = lt.load(folder / "file")
    view = loaded["a"][5:10]
    del loaded
    gc.collect()
    assert 4 << 20 <= lt.memory_allocated() - before < (4 << 20) + 8192
    assert view.tolist() == [1.0] * 5
    del view
    assert lt.memory_allocated() == before


def test_the_scratch_memory_is_bounded_and_goes(disk_folder):
    tensors = {str(number): torch.full((50_000,), number) for number in range(500)}  # 200 MB of small ones
    before = lt.memory_allocated()
    lt.reset_peak_memory_stats()
    lt.save(tensors, disk_folder / "file")
    assert lt.max_memory_allocated() - before <= 100 << 20
    lt.reset_peak_memory_stats()
    loaded = lt.load(disk_folder / "file")
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    assert lt.max_memory_allocated() - before <= nbytes + (100 << 20)
    assert_same(loaded, tensors)


def test_a_tied_model_comes_back_whole(folder):
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    model[1].weight = model[0].weight
    lt.save(model.state_dict(), folder / "file")
    other = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    other.load_state_dict(lt.load(folder / "file"), assign=True)
    assert torch.equal(other[1].weight, model[0].weight)
    assert isinstance(other[0].weight, torch.nn.Parameter) and lt.is_locked(other[0].weight)
    other(torch.ones(2, 30)).sum().backward()


# --- some of the tensors, parts of them ---


def test_only_the_named_tensors_are_read(disk_folder):
    tensors = {str(number): torch.full((1 << 20,), number, dtype=torch.uint8) for number in range(30)}
    lt.save(tensors, disk_folder / "file")
    with lt.aio_handle() as handle:
        loaded = lt.load(disk_folder / "file", ["7", "3"], aio_handle=handle)
        stats = handle.stats()
    assert list(loaded) == ["7", "3"]
    assert_same(loaded, {"7": tensors["7"], "3": tensors["3"]})
    assert stats.bytes_direct + stats.bytes_bounced + stats.bytes_buffered <= (2 << 20) + (64 << 10)


def test_a_slice_is_read_without_the_rest(disk_folder):
    table = torch.arange(1 << 22).view(4096, 1024)
    lt.save({"table": table}, disk_folder / "file")
    with lt.aio_handle() as handle, lt.open_safetensors(disk_folder / "file", aio_handle=handle) as file:
        before = sum(handle.stats()[:3])
        part = file.read({"table": slice(1000, 1100)})["table"]
        assert sum(handle.stats()[:3]) - before <= part.nbytes + 2 * 4096
        assert torch.equal(part, table[1000:1100]) and part.is_locked()
        before = sum(handle.stats()[:3])
        column = file.read({"table": (slice(None), slice(0, 16))})["table"]
        assert sum(handle.stats()[:3]) - before <= table.nbytes
        assert torch.equal(column, table[:, :16]) and column.is_locked()


def test_far_runs_are_read_one_by_one(disk_folder):
    table = torch.arange(1 << 21).view(64, 32768)
    lt.save({"table": table}, disk_folder / "file")
    with lt.aio_handle() as handle, lt.open_safetensors(disk_folder / "file", aio_handle=handle) as file:
        before = sum(handle.stats()[:3])
        part = file.read({"table": (slice(10, 60), slice(100, 300))})["table"]
        assert sum(handle.stats()[:3]) - before <= 50 * 8192
    assert torch.equal(part, table[10:60, 100:300])


@st.composite
def tables_and_indices(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    index = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-size - 2, size + 2)
        part = st.builds(slice, bound, bound)
        if size:
            part |= st.integers(-size, size - 1)
        index.append(draw(part))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(index)))
        # What stands after it selects from the last dimensions: keep it there only if it still fits.
        if place == len(index):
            index.append(Ellipsis)
    return shape, tuple(index)


@settings(max_examples=150, deadline=None)
@given(
    tables_and_indices(),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([0, 8, 64, 1 << 16]),
    st.sampled_from([64, 1 << 16]),
    st.booleans(),
)
def test_an_index_selects_what_torch_selects(tmp_path_factory, table, dtype, near, at_once, is_ours):
    shape, index = table
    tensor = elements(dtype, shape, 1)
    path = tmp_path_factory.getbasetemp() / "sliced.safetensors"
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "table": tensor, "z": torch.ones(5)}
    lt.save(tensors, path) if is_ours else safetensors.torch.save_file(tensors, path)
    with pytest.MonkeyPatch.context() as patch:
        for module in (boxes, safetensors_reader):
            patch.setattr(module, "NEAR_BYTES", near)
            patch.setattr(module, "AT_ONCE_BYTES", at_once)
        patch.setattr(safetensors_reader, "SMALL_BYTES", at_once)
        found = lt.load(path, {"table": index, "z": None})
    assert_same(found, {"table": tensor[index], "z": torch.ones(5)})


def test_an_index_with_dots_first_selects_from_the_end(folder):
    table = torch.arange(60).view(3, 4, 5)
    lt.save({"table": table}, folder / "file")
    found = lt.load(folder / "file", {"table": (..., 2)})["table"]
    assert torch.equal(found, table[..., 2])


@pytest.mark.parametrize(
    "index, error, words",
    [
        (slice(0, 4, 2), ValueError, "step 1"),
        (5, IndexError, "out of range for a dimension of size 4"),
        ((0, 0, 0), IndexError, "3 dimensions, and the tensor has 2"),
        ((..., ...), IndexError, "at most one"),
        (True, TypeError, "integers, slices"),
        ("x", TypeError, "integers, slices"),
    ],
)
def test_an_index_that_does_not_fit_is_refused_by_name(folder, index, error, words):
    lt.save({"table": torch.ones(4, 5)}, folder / "file")
    with pytest.raises(error, match=words) as raised:
        lt.load(folder / "file", {"table": index})
    assert "'table'" in str(raised.value)


def test_a_name_that_is_not_there_is_a_key_error(folder):
    lt.save({"a": torch.ones(4)}, folder / "file")
    with pytest.raises(KeyError, match="no tensor named 'b'"):
        lt.load(folder / "file", ["a", "b"])
    with pytest.raises(TypeError, match="list of names"):
        lt.load(folder / "file", "a")


def test_an_open_file_stays_the_one_that_was_opened(folder):
    lt.save({"a": torch.zeros(10_000)}, folder / "file")
    with lt.open_safetensors(folder / "file") as file:
        lt.save({"b": torch.ones(3)}, folder / "file")
        assert torch.equal(file.read()["a"], torch.zeros(10_000))
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read()


# --- replacing ---


def test_a_new_file_has_0666_less_umask_and_an_old_ones_mode_stays(folder):
    before = os.umask(0o027)
    try:
        lt.save({"a": torch.ones(3)}, folder / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o640
    (folder / "file").chmod(0o604)
    lt.save({"a": torch.zeros(3)}, folder / "file")
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o604
    assert_same(lt.load(folder / "file"), {"a": torch.zeros(3)})


def test_a_link_stays_and_its_target_is_replaced(folder):
    (folder / "under").mkdir()
    (folder / "link").symlink_to("under/file")
    lt.save({"a": torch.ones(3)}, folder / "link")
    assert (folder / "link").is_symlink()
    assert os.listdir(folder / "under") == ["file"]
    assert_same(lt.load(folder / "under" / "file"), {"a": torch.ones(3)})


def test_the_file_is_on_the_device_before_it_has_its_name(folder, monkeypatch):
    log = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(fd):
        log.append(("fsync", "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"))
        fsync(fd)

    def logged_replace(old, new):
        assert os.path.dirname(old) == os.path.dirname(new) == str(folder)
        log.append(("replace", os.path.basename(new)))
        replace(old, new)

    monkeypatch.setattr(files.os, "fsync", logged_fsync)
    monkeypatch.setattr(files.os, "replace", logged_replace)
    lt.save({"a": torch.ones(3)}, folder / "file")
    assert log == [("fsync", "file"), ("replace", "file"), ("fsync", "folder")]


def test_a_process_that_dies_while_saving_leaves_the_old_file(disk_folder):
    lt.save({"a": torch.zeros(10)}, disk_folder / "file")
    program = (
        "import os, torch, locked_tensor as lt\n"
        "os.replace = lambda *names: os._exit(9)\n"
        "lt.save({'a': torch.ones(1 << 20)}, 'file')\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program], cwd=disk_folder, env=environment, timeout=120)
    assert done.returncode == 9
    assert_same(lt.load(disk_folder / "file"), {"a": torch.zeros(10)})


SAVER = """
import os, sys, threading, torch, locked_tensor as lt
from locked_tensor import files
def wait(fd):
    sys.stdout.write("saving\\n")
    sys.stdout.flush()
    sys.stdin.readline()
files.os.fsync = wait
lt.save({"a": torch.ones(1000)}, sys.argv[1])
"""


def start_saver(path):
    """A process that has written its file, and waits for a line before it gives it its name."""
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path)],
        env=dict(os.environ, PYTHONPATH=str(ROOT)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert saver.stdout.readline() == "saving\n"
    return saver


def test_what_killed_savers_left_goes_with_the_next_save_and_what_lives_stays(folder):
    def temporaries():
        return sorted(name for name in os.listdir(folder) if name.startswith(".locked-tensor-"))

    dead = [start_saver(folder / "file") for _ in range(2)]
    for saver in dead:
        saver.kill()
        saver.communicate()
    assert len(temporaries()) == 2
    living = start_saver(folder / "living")
    lived = temporaries()
    assert len(lived) == 1  # its start removed theirs
    other = lived[0].replace(lived[0].split("-")[2], "0" * 32)
    strange = [other, ".locked-tensor-0123456789abcdef.tmp", lived[0] + "x"]  # of another machine, of none
    for name in strange:
        (folder / name).write_bytes(b"")
    os.mkfifo(folder / (lived[0][:-8] + "0000.tmp"))
    lt.save({"a": torch.zeros(3)}, folder / "file")
    assert temporaries() == sorted([*lived, *strange, lived[0][:-8] + "0000.tmp"])
    living.stdin.write("\n\n")
    living.communicate()
    assert living.returncode == 0
    assert_same(lt.load(folder / "living"), {"a": torch.ones(1000)})
    assert_same(lt.load(folder / "file"), {"a": torch.zeros(3)})


def test_savers_into_one_folder_never_take_each_other_for_dead(folder):
    def save(number):
        for turn in range(30):
            lt.save({"a": torch.full((10,), turn)}, folder / f"file{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    assert sorted(os.listdir(folder)) == [f"file{number}" for number in range(4)]
    for number in range(4):
        assert_same(lt.load(folder / f"file{number}"), {"a": torch.full((10,), 29)})


def test_a_path_that_can_be_no_file_is_refused_and_nothing_replaced(folder, monkeypatch):
    monkeypatch.chdir(folder)
    lt.save({"a": torch.zeros(3)}, "good")
    for path, error in [("", FileNotFoundError), ("good/", NotADirectoryError), ("new/", IsADirectoryError)]:
        with pytest.raises(error) as raised:
            lt.save({"a": torch.ones(3)}, path)
        assert raised.value.filename == path
    assert os.listdir(folder) == ["good"]
    assert_same(lt.load("good"), {"a": torch.zeros(3)})


@pytest.mark.parametrize("nbytes", [3 << 20, 100], ids=["large", "small"])
def test_a_save_that_fails_leaves_what_was_there(disk_folder, files_of_at_most, nbytes):
    path = disk_folder / "file"
    lt.save({"a": torch.zeros(10)}, path)
    with files_of_at_most(2048), pytest.raises(OSError) as raised:
        lt.save({"big": torch.ones(nbytes, dtype=torch.uint8)}, path)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert os.listdir(disk_folder) == ["file"]
    assert_same(lt.load(path), {"a": torch.zeros(10)})


def test_a_failed_write_names_the_tensor_and_the_path(tmpfs_folder):
    path = tmpfs_folder / "file"
    with lt.aio_handle(direct="require") as handle:
        with pytest.raises(OSError, match="writing the header") as raised:
            lt.save({"big": torch.ones(1 << 20)}, path, aio_handle=handle)
        assert (raised.value.errno, raised.value.filename) == (errno.EOPNOTSUPP, str(path))
        assert handle.wait() >= 0  # nothing is raised once more
    assert os.listdir(tmpfs_folder) == []


def test_where_nothing_can_be_saved_the_error_names_the_path(folder):
    for path, number in [(folder / "none" / "file", errno.ENOENT), (folder, errno.EISDIR)]:
        with pytest.raises(OSError) as raised:
            lt.save({"a": torch.ones(3)}, path)
        assert (raised.value.errno, raised.value.filename) == (number, str(path))
    os.mkfifo(folder / "pipe")
    for call in (lambda: lt.save({}, folder / "pipe"), lambda: lt.load(folder / "pipe")):
        with pytest.raises(OSError, match="not a regular file"):
            call()
    assert os.listdir(folder) == ["pipe"]


# --- errors of the caller and of the file ---


@pytest.mark.parametrize(
    "state_dict, error, words",
    [
        ([("a", torch.ones(1))], TypeError, "must map names to tensors, got list"),
        ({1: torch.ones(1)}, TypeError, "name must be a string, got 1"),
        ({"a": 3}, TypeError, "'a' must be a tensor, got int"),
        ({"a": {"b": torch.ones(1)}}, TypeError, "'a' must be a tensor, got dict"),
        ({"a": torch.ones(2, 2).to_sparse()}, TypeError, "'a' must be a strided tensor"),
        ({"a": torch.ones(2, device="meta")}, ValueError, "'a' has no bytes here"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, ValueError, "'a' has dtype torch.complex128"),
        ({"__metadata__": torch.ones(1)}, ValueError, "cannot be named '__metadata__'"),
        ({"\ud800": torch.ones(1)}, ValueError, "cannot be named"),
    ],
)
def test_what_the_format_does_not_have_is_refused_by_name(folder, state_dict, error, words):
    with pytest.raises(error, match=words):
        lt.save(state_dict, folder / "file")
    assert os.listdir(folder) == []


def test_tensors_without_bytes_of_their_own_are_refused(folder):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    with FakeTensorMode():
        fake = torch.ones(4)
    with pytest.raises(ValueError, match="no bytes here: a FakeTensor"):
        lt.save({"a": fake}, folder / "file")
    with pytest.raises(TypeError, match="'a' is a TwoTensor, which wraps others"):
        lt.save({"a": TwoTensor(torch.ones(2), torch.ones(2))}, folder / "file")


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}])
def test_metadata_that_is_not_strings_is_refused(folder, metadata):
    with pytest.raises(TypeError, match="metadata must be a dict of str to str"):
        lt.save({}, folder / "file", metadata=metadata)


def test_a_file_that_shrinks_is_a_short_read_that_names_the_tensor(folder):
    path = folder / "file"
    lt.save({"a": torch.ones(1 << 20), "b": torch.ones(3)}, path)
    with lt.open_safetensors(path) as file:
        os.truncate(path, 100_000)
        for name, nbytes in (("a", 4 << 20), ("b", 12)):
            with pytest.raises(lt.ShortReadError, match=f"reading '{name}'") as raised:
                file.read([name])
            assert raised.value.filename == str(path)
            assert raised.value.wanted == nbytes


def test_under_a_small_lock_limit_loading_can_fall_back(disk_folder, run_with_memlock):
    path = disk_folder / "file"
    lt.save({"a": torch.arange(3 << 20), "b": torch.arange(100)}, path)
    program = (
        "import sys, torch, locked_tensor as lt\n"
        "try: lt.load(sys.argv[1])\n"
        "except lt.LockLimitError: pass\n"
        "else: raise SystemExit('locked beyond the limit')\n"
        "found = lt.load(sys.argv[1], on_limit='fall_back')\n"
        "assert not lt.is_locked(found['a']) and torch.equal(found['a'], torch.arange(3 << 20))\n"
        "assert torch.equal(found['b'], torch.arange(100))\n"
        "lt.save(found, sys.argv[1])\n"
    )
    done = run_with_memlock(8192, "-W", "ignore", "-c", program, str(path))
    assert done.returncode == 0, done.stderr
    assert_same(lt.load(path), {"a": torch.arange(3 << 20), "b": torch.arange(100)})
