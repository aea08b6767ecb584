"""save and load: the safetensors format, both ways with its own package, hostile headers refused."""

import json
import os
import stat
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import locked_tensor as lt
from locked_tensor.safetensors_format import DTYPES, PACKED


def some_tensors():
    torch.manual_seed(0)
    with lt.locked_memory():
        locked = torch.randn(300, 1000)
    tied = torch.arange(5000)
    made = {
        "locked": locked,
        "narrow": locked[7:99],
        "columns": locked[:, 100:300],
        "transposed": locked.t(),
        "large": torch.randn(1 << 20),
        "tied": tied,
        "tied again": tied[:100],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3, 5)),
        "conjugated": torch.randn(9, dtype=torch.complex64).conj(),
        "näme with 漢字": torch.ones(1),
    }
    for name, dtype in DTYPES.items():
        if dtype not in PACKED and not dtype.is_complex:
            made[name] = torch.randint(0, 2, (3, 7)).to(torch.uint8).to(torch.float32).to(dtype)
    return made


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        mine = found[name].resolve_conj().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(mine, tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)), name


def test_what_is_saved_is_loaded_into_locked_memory(folder):
    tensors = some_tensors()
    path = folder / "file.safetensors"
    lt.save(tensors, path, metadata={"made": "here"})
    found = lt.load(path)
    assert_same(found, {name: tensors[name] for name in found})
    assert all(lt.is_locked(tensor) for tensor in found.values() if tensor.numel())
    assert os.listdir(folder) == ["file.safetensors"]
    assert oct(os.stat(path).st_mode & 0o777) == oct(0o666 & ~current_umask())


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_files_go_both_ways_with_the_package(disk_folder):
    package = pytest.importorskip("safetensors.torch")
    import safetensors

    tensors = {name: tensor for name, tensor in some_tensors().items() if not name.startswith("F8_E8M0")}
    lt.save(tensors, disk_folder / "ours", metadata={"a": "b"})
    assert_same(package.load_file(disk_folder / "ours"), tensors)
    with safetensors.safe_open(disk_folder / "ours", "pt") as file:
        assert file.metadata() == {"a": "b"}
    theirs = {name: tensor.detach().resolve_conj().clone().contiguous() for name, tensor in tensors.items()}
    package.save_file(theirs, disk_folder / "theirs", metadata={"c": "d"})
    assert_same(lt.load(disk_folder / "theirs"), {name: theirs[name] for name in lt.load(disk_folder / "theirs")})


def test_names_and_slices_read_nothing_else(disk_folder):
    tensors = {"a": torch.arange(1 << 20).view(1024, 1024), "b": torch.randn(1 << 20)}
    lt.save(tensors, disk_folder / "file")
    with lt.aio_handle() as handle:
        found = lt.load(disk_folder / "file", {"a": (slice(3, 5), slice(10, 20))}, aio_handle=handle)
        moved = handle.stats()
    assert torch.equal(found["a"], tensors["a"][3:5, 10:20])
    assert moved.bytes_direct + moved.bytes_bounced + moved.bytes_buffered < 200_000
    assert list(lt.load(disk_folder / "file", ["b"])) == ["b"]
    assert torch.equal(lt.load(disk_folder / "file", {"a": 7})["a"], tensors["a"][7])
    with pytest.raises(KeyError, match="no tensor named 'c'"):
        lt.load(disk_folder / "file", ["c"])
    with pytest.raises(IndexError, match="'a'"):
        lt.load(disk_folder / "file", {"a": 2000})
    with pytest.raises(TypeError, match="say"):
        lt.load(disk_folder / "file", "a")


def test_a_failed_save_leaves_the_file_that_was_there(disk_folder):
    path = disk_folder / "file"
    lt.save({"a": torch.ones(3)}, path)
    os.chmod(path, 0o640)
    with pytest.raises(OSError) as refused:
        lt.save({"a": HUGE}, path)
    assert refused.value.errno in (27, 28)
    assert torch.equal(lt.load(path)["a"], torch.ones(3))
    assert os.listdir(disk_folder) == ["file"]
    lt.save({"a": torch.zeros(3)}, path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert torch.equal(lt.load(path)["a"], torch.zeros(3))


HUGE = torch.zeros(1).expand(1 << 60)


@pytest.mark.parametrize(
    "state, error, message",
    [
        ([1], TypeError, "map names to tensors"),
        ({1: torch.ones(1)}, TypeError, "must be a string"),
        ({"a": 1}, TypeError, "must be a tensor"),
        ({"__metadata__": torch.ones(1)}, ValueError, "cannot be named"),
        ({"\ud800": torch.ones(1)}, ValueError, "cannot be named"),
        ({"a": torch.eye(3).to_sparse()}, TypeError, "strided"),
        ({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, TypeError, "strided"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, ValueError, "does not have"),
        ({"a": torch.ones(1, device="meta")}, ValueError, "has no bytes"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_a_file_is_made(disk_folder, state, error, message):
    with pytest.raises(error, match=message):
        lt.save(state, disk_folder / "file")
    assert os.listdir(disk_folder) == []


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "short": (b"", None, "header's length alone takes 8"),
    "longer than the file": (b"{}", 1 << 40, "claims .* bytes and the file has"),
    "not JSON": (b"{", None, "not JSON"),
    "not an object": (b"[]", None, "not a JSON object"),
    "deep": (b"[" * 100_000, None, "not JSON"),
    "NaN": (b'{"a": NaN}', None, "NaN"),
    "twice": (b'{"a": 1, "a": 2}', None, "stands twice"),
    "past the end": ({"a": entry(offsets=(4, 8))}, None, "ends at byte 8"),
    "overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, None, "overlaps|ends at"),
    "gap": ({"a": entry(shape=(2,), offsets=(2, 4))}, None, "belong to no tensor"),
    "wrong size": ({"a": entry(shape=(3,))}, None, "takes 3 bytes"),
    "negative": ({"a": entry(shape=(-4,))}, None, "not negative"),
    "backwards": ({"a": entry(offsets=(4, 0))}, None, "end before they begin"),
    "overflow": ({"a": entry(shape=(1 << 40, 1 << 40), offsets=(0, 4))}, None, "overflows"),
    "hidden overflow": ({"a": entry(shape=(0, 1 << 40, 1 << 40), offsets=(0, 0))}, None, "overflows|belong"),
    "dtype": ({"a": entry(dtype="X9")}, None, "is unknown here"),
    "bool size": ({"a": entry(shape=(True,), offsets=(0, 1))}, None, "not negative"),
    "fields": ({"a": {"dtype": "U8"}}, None, "is missing"),
    "metadata": ({"__metadata__": {"a": 1}}, None, "must map names to strings"),
    "rest": ({}, None, "belong to no tensor"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused_and_name_the_file(disk_folder, what):
    header, length, message = HOSTILE[what]
    path = disk_folder / "hostile"
    if what == "short":
        path.write_bytes(b"123")
    else:
        write_raw(path, header, b"abcd", length)
    with pytest.raises(ValueError, match=message) as refused:
        lt.load(path)
    assert str(path) in str(refused.value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_random_bytes_are_refused_or_read_but_nothing_else(tmp_path_factory, text, length):
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(struct.pack("<Q", length) + text)
    try:
        lt.load(path)
    except ValueError:
        pass


def test_a_missing_file_and_a_closed_one(disk_folder):
    with pytest.raises(FileNotFoundError) as missing:
        lt.load(disk_folder / "missing")
    assert missing.value.filename == str(disk_folder / "missing")
    lt.save({"a": torch.ones(3)}, disk_folder / "file", metadata={"k": "v"})
    with lt.open_safetensors(disk_folder / "file") as file:
        assert file.keys() == ["a"] and file.metadata == {"k": "v"}
        assert file.entries["a"].shape == (3,)
    with pytest.raises(ValueError, match="closed"):
        file.read()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
def test_a_single_element_with_a_stride_is_saved(disk_folder, dtype):
    one = torch.full((1, 3), 3, dtype=dtype)[:, 1]
    lt.save({"one": one, "scalar": one[0]}, disk_folder / "file")
    loaded = lt.load(disk_folder / "file")
    assert torch.equal(loaded["one"], one) and torch.equal(loaded["scalar"], one[0])
