"""`DirectWriter`: a `torch.distributed.checkpoint` storage writer by direct I/O."""

from __future__ import annotations

import os
from typing import Any, Optional, Union

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

import locked_tensor as lt
from locked_tensor.files import sync_folder
from locked_tensor.integrations.dcp.archive import save_tensor
from locked_tensor.integrations.dcp.page_stream import BLOCKS, PAGE_BYTES, PageStream


class DirectWriter(FileSystemWriter):
    """Writes the checkpoint folder of torch's `FileSystemWriter`, a file a rank, by direct I/O.

    Tensors in locked memory are written from where they lie; others are staged through the handle's
    bounded locked buffers. With `dcp.async_save` the copy that is written in the background is in
    locked memory.

    Args:
        path: the checkpoint's folder, made if need be.
        aio_handle: used and left open; else one is made for each save.
        sync_files: files, and the folder, are on the device (fsync) when a save ends.
        overwrite: replace a checkpoint that is there; else RuntimeError.
        staging_bytes: locked memory at most for what is written around the tensors, and once more,
            with a handle of its own, for tensors that are not locked; at least 64 KiB.

    Raises:
        ValueError: `staging_bytes` is too small.
        OSError: by a save (in its CheckpointException): what the kernel said.
    """

    def __init__(
        self,
        path: Union[str, "os.PathLike[str]"],
        *,
        aio_handle: Optional[lt.AioHandle] = None,
        sync_files: bool = True,
        overwrite: bool = True,
        staging_bytes: int = 32 << 20,
    ) -> None:
        if staging_bytes < 64 << 10:
            raise ValueError(f"staging_bytes must be at least {64 << 10}, got {staging_bytes}")
        super().__init__(path, sync_files=sync_files, overwrite=overwrite)
        self._aio_handle = aio_handle
        self._staging_bytes = staging_bytes

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of the state dict whose tensors are in locked memory; `dcp.async_save` asks for it.

        Tensors of classes that are not torch's plain ones, Parameter, DTensor or LockedTensor are copied
        to ordinary memory, as FileSystemWriter does.
        """
        return self._staged(state_dict)

    def _staged(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._staged(each) for name, each in value.items()}
        if isinstance(value, DTensor):
            local = _locked_copy(value.to_local())
            return DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        if type(value) in (torch.Tensor, torch.nn.Parameter, lt.LockedTensor):
            return _locked_copy(value)
        return super().stage({"": value})[""]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items to one file and returns where each lies."""
        results: Future[list[WriteResult]] = Future()
        if self._aio_handle is not None:
            results.set_result(self._write_file(self._aio_handle, plan, planner))
            return results
        with lt.aio_handle(staging_bytes=self._staging_bytes) as handle:
            results.set_result(self._write_file(handle, plan, planner))
        return results

    def _write_file(self, handle: lt.AioHandle, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        block_bytes = self._staging_bytes // BLOCKS // PAGE_BYTES * PAGE_BYTES
        stream = PageStream(handle, self.fs.concat_path(self.path, name), min(block_bytes, 4 << 20))
        try:
            results = [_write_item(stream, item, planner, name) for item in plan.items]
            stream.finish(is_durable=self.sync_files)
        except BaseException:
            stream.abandon()
            raise
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Puts the metadata in place: the checkpoint exists from here on."""
        super().finish(metadata, results)
        if self.sync_files:
            sync_folder(self.path)


def _write_item(stream: PageStream, item: WriteItem, planner: SavePlanner, name: str) -> WriteResult:
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        begin = stream.tell()
        stream.write(data.getbuffer())  # type: ignore[union-attr]
    else:
        begin = save_tensor(_plain(data), stream)  # type: ignore[arg-type]
    length = stream.tell() - begin
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, begin, length))


@torch.no_grad()
def _locked_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.cpu().clone()
    with lt.locked_memory():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return lt.as_plain(tensor) if isinstance(tensor, lt.LockedTensor) else tensor.detach()
