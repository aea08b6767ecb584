"""Headers of safetensors files: written as the format has it, read with every check, hostile ones refused."""

import json
import struct

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import locked_tensor as lt
from locked_tensor.safetensors_format import (
    DTYPE_NAMES,
    MAX_HEADER_BYTES,
    PACKED,
    PAGE_BYTES,
    arrange,
    encode_header,
    header_length,
    parse_header,
)


def file_of(header: bytes | dict, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def parsed(content: bytes):
    length = header_length(content[:8], len(content), "the file")
    return parse_header(content[8 : 8 + length], len(content), "the file")


def entry(dtype="U8", shape=(2,), offsets=(0, 2)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HUGE = 1 << 62
HOSTILE = [
    ("no bytes", b"", "has 0 bytes"),
    ("no length", b"\x00" * 7, "has 7 bytes"),
    ("longer than the file", struct.pack("<Q", 100) + b"{}", "claims 100 bytes and the file has 10"),
    ("longest", struct.pack("<Q", 2**64 - 1) + b"{}", "claims 18,446,744,073,709,551,615 bytes"),
    ("empty", file_of(b""), "not JSON"),
    ("not JSON", file_of(b"{nonsense"), "not JSON"),
    ("not UTF-8", file_of(b'{"\xff": 1}'), "not JSON in UTF-8"),
    ("not an object", file_of(b"[1]"), "not a JSON object"),
    ("more behind it", file_of(b"{}{}"), "not JSON"),
    ("NaN", file_of(b'{"a": NaN}'), "it has NaN"),
    ("too deep", file_of(b'{"a":' + b"[" * 200_000), "not JSON"),
    ("too many digits", file_of(b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
    ("half a character", file_of(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "not Unicode text"),
    ("not an entry", file_of({"a": 3}), "tensor 'a': expected an object"),
    ("no dtype", file_of({"a": {"shape": [], "data_offsets": [0, 0]}}), "dtype is missing"),
    ("no shape", file_of({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "shape is missing"),
    ("no offsets", file_of({"a": {"dtype": "U8", "shape": []}}), "data_offsets is missing"),
    ("unknown dtype", file_of({"a": entry("F6_E2M3")}, b"ab"), "dtype 'F6_E2M3' is unknown"),
    ("dtype is a list", file_of({"a": entry(["U8"])}, b"ab"), r"dtype \['U8'\] is unknown"),
    ("negative size", file_of({"a": entry(shape=(-2,))}, b"ab"), "not negative, found"),
    ("two negative sizes", file_of({"a": entry(shape=(-2, -1))}, b"ab"), "not negative, found"),
    ("half a size", file_of({"a": entry(shape=(2.0,))}, b"ab"), "whole numbers"),
    ("size is true", file_of({"a": entry(shape=(True, 2))}, b"ab"), "whole numbers"),
    ("shape is a number", file_of({"a": {"dtype": "U8", "shape": 2, "data_offsets": [0, 2]}}, b"ab"), "must be a list"),
    ("overflowing", file_of({"a": entry(shape=(HUGE, 4))}, b"ab"), "overflows"),
    ("overflowing to nothing", file_of({"a": entry(shape=(0, HUGE, HUGE), offsets=(0, 0))}), "overflows"),
    ("overflowing in bytes", file_of({"a": entry("F64", (HUGE,))}, b"ab"), "overflows"),
    ("too many dimensions", file_of({"a": entry(shape=[1] * 65, offsets=(0, 1))}, b"a"), "65 dimensions"),
    ("one offset", file_of({"a": entry(offsets=(0,))}, b"ab"), "two whole numbers"),
    ("negative offset", file_of({"a": entry(offsets=(-2, 0))}, b"ab"), "two whole numbers"),
    ("backwards", file_of({"a": entry(offsets=(2, 0))}, b"ab"), "end before they begin"),
    ("too few bytes", file_of({"a": entry("F32", (2,), (0, 2))}, b"ab"), "takes 8 bytes, and data_offsets"),
    ("too many bytes", file_of({"a": entry(shape=(1,))}, b"ab"), "takes 1 bytes"),
    ("past the end", file_of({"a": entry(shape=(3,), offsets=(0, 3))}, b"ab"), "ends at byte 3 of the data"),
    ("far past the end", file_of({"a": entry(shape=(HUGE,), offsets=(0, HUGE))}, b"ab"), "the file holds 2"),
    ("overlapping", file_of({"a": entry(), "b": entry(offsets=(1, 3))}, b"abc"), "tensor 'b' overlaps"),
    ("the same bytes", file_of({"a": entry(), "b": entry()}, b"ab"), "tensor 'b' overlaps"),
    ("a gap", file_of({"a": entry(), "b": entry(offsets=(3, 5))}, b"abcde"), "1 bytes before tensor 'b'"),
    ("a gap first", file_of({"a": entry(offsets=(1, 3))}, b"abc"), "1 bytes before tensor 'a'"),
    ("bytes left over", file_of({"a": entry()}, b"abc"), "last 1 bytes belong to no tensor"),
    ("the same name", file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "'a' stands twice"),
    ("the same key", file_of(b'{"a":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}}'), "'shape' stands twice"),
    ("metadata of numbers", file_of({"__metadata__": {"a": 1}}), "must map names to strings"),
    ("metadata is a list", file_of({"__metadata__": ["a"]}), "must map names to strings"),
    ("half an F4", file_of({"a": entry("F4", (3,))}, b"ab"), "does not fill whole bytes"),
    ("F4 without dimensions", file_of({"a": entry("F4", (), (0, 1))}, b"a"), "does not fill whole bytes"),
]


@pytest.mark.parametrize("content, words", [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_file_is_refused_with_its_name_and_what_is_wrong(folder, content, words):
    path = folder / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as raised:
        lt.load(path)
    assert str(raised.value).startswith(f"{path} is not a valid safetensors file: ")
    assert len(str(raised.value)) < 1000


def test_a_header_larger_than_the_format_allows_is_not_read(disk_folder):
    with open(disk_folder / "file", "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(ValueError, match="more than 100,000,000"):
        lt.load(disk_folder / "file")
    with pytest.raises(ValueError, match="the format has room for 100,000,000"):
        encode_header([], {"a": "x" * MAX_HEADER_BYTES})


def test_a_header_longer_than_the_first_read_is_read_whole(folder):
    tensors = {f"{'name' * 20}.{number}": torch.tensor(number) for number in range(3000)}
    lt.save(tensors, folder / "file")
    with lt.open_safetensors(folder / "file") as file:
        assert len(file.keys()) == 3000
        assert file.read([f"{'name' * 20}.2999"]) == {f"{'name' * 20}.2999": torch.tensor(2999)}


def test_what_others_may_write_is_read():
    assert parsed(file_of(b"{}")).entries == {}
    assert parsed(file_of(b' {"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1.5}} \n')).entries["a"].shape == (0,)
    assert parsed(file_of({"__metadata__": None})).metadata == {}
    found = parsed(file_of({"b": entry(offsets=(2, 4)), "a": entry()}, b"abcd"))
    assert list(found.entries) == ["a", "b"]
    assert found.entries["b"].nbytes == 2


def read_by_safetensors(content: bytes) -> dict:
    return {name: (found["dtype"], found["shape"]) for name, found in safetensors.deserialize(content)}


def described_as_in_the_file(entries: dict) -> dict:
    found = {}
    for name, each in entries.items():
        shape = list(each.shape)
        shape[-1:] = [size * PACKED.get(each.dtype, 1) for size in shape[-1:]]
        found[name] = (DTYPE_NAMES[each.dtype], shape)
    return found


NAMES = st.text(max_size=20).filter(lambda name: name != "__metadata__" and name.isprintable() or name == "")
SHAPES = st.lists(st.integers(0, 70), max_size=3).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPE_NAMES)), SHAPES), max_size=8), st.dictionaries(NAMES, NAMES, max_size=3))
def test_a_header_that_is_written_is_read_and_is_right(described, metadata):
    tensors = {
        name: torch.empty(shape or (1,) if dtype in PACKED else shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in described.items()
    }
    entries = arrange(tensors)
    header = encode_header(entries, metadata)
    content = header + bytes(sum(each.nbytes for each in entries))
    assert len(header) % PAGE_BYTES == 0
    found = parsed(content)
    assert (found.data_offset, found.metadata) == (len(header), metadata)
    assert {name: (each.dtype, each.shape) for name, each in found.entries.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    for each in entries:
        assert each.begin % each.dtype.itemsize == 0
        assert each.begin % PAGE_BYTES == 0 or each.nbytes % PAGE_BYTES != 0 or each.nbytes == 0
    assert read_by_safetensors(content) == described_as_in_the_file(found.entries)


VALID = file_of(
    {"__metadata__": {"m": "x"}, "a": entry("F32", (2, 3), (0, 24)), "b": entry("U8", (5,), (24, 29)), "c": entry("I64", (0,), (29, 29))},
    bytes(29),
)


def check_like_safetensors(content: bytes) -> None:
    """Refused with a ValueError, or right: then the safetensors package reads the same."""
    try:
        found = parsed(content)
    except ValueError:
        return
    assert read_by_safetensors(content) == described_as_in_the_file(found.entries)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 60))
def test_a_damaged_file_is_refused_or_read_as_safetensors_reads_it(damage, cut):
    content = bytearray(VALID)
    for place, value in damage:
        content[place] = value
    check_like_safetensors(bytes(content))
    check_like_safetensors(bytes(content[: len(content) - cut]))


NUMBERS = st.integers(-3, 40) | st.sampled_from([HUGE, 2**63, 2**64, 2**200, 1.0, True, None, "2"])
JUNK = st.recursive(NUMBERS | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3))
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4", "C64", "BOOL", "x"]) | JUNK,
        "shape": st.lists(NUMBERS, max_size=3) | JUNK,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JUNK,
    },
)


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), ENTRIES | JUNK), st.integers(0, 40))
def test_any_header_is_refused_or_read_as_safetensors_reads_it(fields, data_bytes):
    check_like_safetensors(file_of(fields, bytes(data_bytes)))
