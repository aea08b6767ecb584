"""The header of a safetensors file: written so that data starts on a page, read with every check.

A file is eight bytes (the header's length, little-endian), the header (a JSON object from tensor names to
`dtype`, `shape` and `data_offsets`, and `__metadata__`), then the tensors' elements in row-major order,
without gaps. The format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
from typing import Any, Iterable, Mapping, NamedTuple, Optional

import torch

PAGE_BYTES = 4096
SMALL_BYTES = 256 << 10  # smaller tensors are moved together with their neighbours
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors package refuses larger ones
MAX_DIMENSIONS = 64  # that torch's operators compute with
METADATA = "__metadata__"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# An element of this dtype holds two numbers of the file, which counts numbers.
PACKED = {torch.float4_e2m1fn_x2: 2}


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  #: torch's: two F4 numbers are one element
    begin: int  #: bytes from the start of the data
    end: int  #: bytes from the start of the data

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Header(NamedTuple):
    """What a file holds and where."""

    entries: dict[str, TensorEntry]  #: by name, in the order of the file
    metadata: dict[str, str]
    data_offset: int  #: bytes from the start of the file to the data


# --- writing ---


def arrange(tensors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """Gives each tensor its place: whole pages first, so that these start on a page, then by element size.

    Elements are aligned to their size, as the safetensors package arranges them too.
    """

    def place(item: tuple[str, torch.Tensor]) -> tuple[bool, int, bool]:
        nbytes = item[1].nbytes
        return nbytes % PAGE_BYTES != 0, -item[1].element_size(), nbytes < SMALL_BYTES

    entries, begin = [], 0
    for name, tensor in sorted(tensors.items(), key=place):
        end = begin + tensor.nbytes
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), begin, end))
        begin = end
    return entries


def encode_header(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The file's bytes before its data: a multiple of a page, padded with spaces.

    Raises:
        ValueError: more than `MAX_HEADER_BYTES`.
    """
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        shape = list(entry.shape)
        if entry.dtype in PACKED:
            shape[-1] *= PACKED[entry.dtype]
        fields[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": shape,
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % PAGE_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"names, shapes and metadata take {len(text):,} bytes, and the format has room for "
            f"{MAX_HEADER_BYTES:,}"
        )
    return struct.pack("<Q", len(text)) + text


# --- reading ---


class _Refused(ValueError):
    """What is wrong with a header, without the file's name."""


def header_length(prefix: bytes, file_bytes: int, path: str) -> int:
    """Length in bytes of the header that follows the file's first `LENGTH_BYTES`.

    Raises:
        ValueError: it cannot be true.
    """
    if len(prefix) < LENGTH_BYTES:
        raise _error(path, f"the file has {file_bytes} bytes and its header's length alone takes {LENGTH_BYTES}")
    (length,) = struct.unpack("<Q", prefix[:LENGTH_BYTES])
    if length > file_bytes - LENGTH_BYTES:
        raise _error(path, f"the header claims {length:,} bytes and the file has {file_bytes:,}")
    if length > MAX_HEADER_BYTES:
        raise _error(path, f"the header claims {length:,} bytes, more than {MAX_HEADER_BYTES:,}")
    return length


def parse_header(text: bytes, file_bytes: int, path: str) -> Header:
    """Reads and checks the header of a file of `file_bytes`.

    Raises:
        ValueError: anything in it is not as the format has it: then nothing of the file can be trusted.
    """
    data_offset = LENGTH_BYTES + len(text)
    try:
        fields = _decode(text)
        metadata = _checked_metadata(fields.pop(METADATA, None))
        entries = sorted(
            (_checked_entry(name, value) for name, value in fields.items()),
            key=lambda entry: (entry.begin, entry.end),
        )
        _check_cover(entries, file_bytes - data_offset)
    except _Refused as refused:
        raise _error(path, str(refused)) from None
    return Header({entry.name: entry for entry in entries}, metadata, data_offset)


def _error(path: str, what: str) -> ValueError:
    return ValueError(f"{path} is not a valid safetensors file: {what}")


def _decode(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except _Refused:
        raise
    except (ValueError, RecursionError) as error:
        raise _Refused(f"the header is not JSON in UTF-8 ({error})") from None
    if not isinstance(fields, dict):
        raise _Refused("the header is not a JSON object")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Refused(f"the name {_show(name)} stands twice in the header")
            seen.add(name)
    return fields


def _no_constant(name: str) -> None:
    raise _Refused(f"the header is not JSON: it has {name}")


_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 200
_shorten.maxlist = 10
_show = _shorten.repr


def _checked_metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise _Refused(f"{METADATA} must map names to strings, and is {_show(value)}")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _checked_entry(name: str, value: Any) -> TensorEntry:
    def refused(what: str) -> _Refused:
        return _Refused(f"tensor {_show(name)}: {what}")

    try:
        name.encode()
    except UnicodeEncodeError:
        raise refused("its name is not Unicode text") from None
    if not isinstance(value, dict):
        raise refused(f"expected an object with dtype, shape and data_offsets, found {_show(value)}")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            raise refused(f"{key} is missing")
    label, sizes, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(label) if isinstance(label, str) else None
    if dtype is None:
        raise refused(f"dtype {_show(label)} is unknown here; known are {', '.join(DTYPES)}")
    if not isinstance(sizes, list) or not all(map(_is_count, sizes)):
        raise refused(f"shape must be a list of whole numbers that are not negative, found {_show(sizes)}")
    if len(sizes) > MAX_DIMENSIONS:
        raise refused(f"shape has {len(sizes):,} dimensions, and torch computes with {MAX_DIMENSIONS}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise refused(f"data_offsets must be two whole numbers that are not negative, found {_show(offsets)}")
    begin, end = offsets
    if begin > end:
        raise refused(f"data_offsets {offsets} end before they begin")
    shape = _element_shape(dtype, sizes)
    if shape is None:
        raise refused(f"shape {_show(sizes)} does not fill whole bytes with dtype {label}")
    # Strides are products too, of every size that is not 0.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise refused(f"shape {_show(sizes)} overflows: more than 2**63 bytes")
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise refused(
            f"shape {_show(sizes)} of dtype {label} takes {nbytes:,} bytes, and data_offsets "
            f"{offsets} hold {end - begin:,}"
        )
    return TensorEntry(name, dtype, shape, begin, end)


def _element_shape(dtype: torch.dtype, sizes: list[int]) -> Optional[tuple[int, ...]]:
    count = PACKED.get(dtype, 1)
    if count == 1:
        return tuple(sizes)
    if not sizes or sizes[-1] % count != 0:
        return None
    return (*sizes[:-1], sizes[-1] // count)


def _check_cover(entries: list[TensorEntry], data_bytes: int) -> None:
    """Each byte of the data belongs to one tensor."""
    end = 0
    for entry in entries:
        name = _show(entry.name)
        if entry.end > data_bytes:
            raise _Refused(
                f"tensor {name} ends at byte {entry.end:,} of the data, and the file holds {data_bytes:,}: "
                "it was cut off, or the header is wrong"
            )
        if entry.begin < end:
            raise _Refused(f"tensor {name} overlaps the one before it, at byte {entry.begin:,} of the data")
        if entry.begin > end:
            raise _Refused(f"{entry.begin - end:,} bytes before tensor {name} belong to no tensor")
        end = entry.end
    if end < data_bytes:
        raise _Refused(f"the file's last {data_bytes - end:,} bytes belong to no tensor")
