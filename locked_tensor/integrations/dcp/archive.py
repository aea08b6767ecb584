"""torch.save's archives of one tensor: written around bytes that lie elsewhere, and taken apart without reading them."""

from __future__ import annotations

import threading
from typing import IO, NamedTuple, Union

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

from locked_tensor.errors import InternalError
from locked_tensor.integrations.dcp.page_stream import PAGE_BYTES, PageStream

LEAST_DIRECT_BYTES = 64 << 10  # smaller tensors are copied with what surrounds them
_settings_lock = threading.Lock()


def save_tensor(tensor: torch.Tensor, stream: PageStream) -> int:
    """Appends what `torch.save` makes of the tensor on the CPU, by itself and contiguous; where it begins."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.nbytes < LEAST_DIRECT_BYTES:
        begin = stream.tell()
        torch.save(tensor.cpu().clone(), stream)  # type: ignore[arg-type]
        return begin
    stream.align()
    begin = stream.tell()
    around = _Around(tensor, stream)
    # The archive puts storages on pages, as the stream does; the checksums would take longer than the
    # disk, and torch.load does not look at them. Both settings are the process's.
    with _settings_lock, config.patch({"save.storage_alignment": PAGE_BYTES, "save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(_without_bytes(tensor), around)  # type: ignore[arg-type]
    around.check()
    return begin


def _without_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor of the same dtype and shape, over memory that nobody ever touches."""
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(torch.UntypedStorage(tensor.nbytes), 0, tensor.shape)  # type: ignore[call-overload]


class _Around:
    """Passes an archive on to the stream, and the tensor in the place of its storage."""

    def __init__(self, tensor: torch.Tensor, stream: PageStream) -> None:
        self._tensor = tensor
        self._stream = stream
        self._is_written = False

    def write(self, data: Union[bytes, memoryview]) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes != self._tensor.nbytes:
            return self._stream.write(data)
        self._stream.write_tensor(self._tensor)
        self._is_written = True
        return nbytes

    def flush(self) -> None:
        self._stream.flush()

    def check(self) -> None:
        if not self._is_written:
            raise InternalError("torch.save did not hand over a tensor's storage in one piece")


class StoredTensor(NamedTuple):
    """A contiguous tensor in an archive."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int  #: of its first byte from the archive's begin


def find_tensor(archive: IO[bytes]) -> Union[StoredTensor, None]:
    """Where the archive's tensor lies, its bytes unread; None where it is not one contiguous dense tensor."""
    with FakeTensorMode():
        tensor = torch.load(archive, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return None
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin is None:
            return None
        return StoredTensor(tensor.dtype, tensor.shape, begin + tensor.storage_offset() * tensor.element_size())
