"""`DirectReader`: a `torch.distributed.checkpoint` storage reader by direct I/O."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import NamedTuple, Optional, Union

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

import locked_tensor as lt
from locked_tensor.integrations.dcp.archive import StoredTensor, find_tensor


class _Part(NamedTuple):
    """What one item asks of a stored tensor."""

    item: ReadItem
    stored: StoredTensor
    path: str
    begin: int  # of the stored tensor in the file, in bytes


class DirectReader(FileSystemReader):
    """Reads the checkpoint folders of torch's `FileSystemWriter` and of `DirectWriter`, by direct I/O.

    Only what an item asks for is read. A run of whole rows goes straight into a target of the same dtype
    (without a copy where that is locked memory); other parts, as resharding asks for, are read in
    rows through a locked buffer.

    Args:
        path: the checkpoint's folder.
        aio_handle: used and left open; else one is made for each load.
        staging_bytes: locked memory at most for parts that are no run of whole rows (a row that is
            longer is locked as a whole), and once more, with a handle of its own, for targets
            that are not locked; at least 64 KiB.

    Raises:
        ValueError: `staging_bytes` is too small.
        OSError, ShortReadError: by a load (in its CheckpointException): what the kernel said; a file is too short.
    """

    def __init__(
        self,
        path: Union[str, "os.PathLike[str]"],
        *,
        aio_handle: Optional[lt.AioHandle] = None,
        staging_bytes: int = 32 << 20,
    ) -> None:
        if staging_bytes < 64 << 10:
            raise ValueError(f"staging_bytes must be at least {64 << 10}, got {staging_bytes}")
        super().__init__(path)
        self._aio_handle = aio_handle
        self._staging_bytes = staging_bytes

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan lists into the planner's targets."""
        if self._aio_handle is not None:
            return self._read(self._aio_handle, plan, planner)
        with lt.aio_handle(staging_bytes=self._staging_bytes) as handle:
            return self._read(handle, plan, planner)

    def _read(self, handle: lt.AioHandle, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts, others = self._find_parts(plan)
        in_rows: list[tuple[_Part, torch.Tensor]] = []
        pending: list[tuple[_Part, torch.Tensor, lt.IoTicket]] = []
        try:
            for part in parts:
                target = planner.resolve_tensor(part.item).detach()
                if target.size() != part.item.lengths:
                    raise ValueError(
                        f"{part.item.storage_index.fqn}: the target's shape is {tuple(target.size())}, "
                        f"the item's {tuple(part.item.lengths)}"
                    )
                if target.dtype == part.stored.dtype and _is_run_of_rows(part):
                    ticket = handle.submit_pread(target, part.path, part.begin + _row_bytes(part.stored) * _first_row(part))
                    pending.append((part, target, ticket))
                else:
                    in_rows.append((part, target))
            staging = self._new_staging([part for part, _ in in_rows])
            for part, target in in_rows:
                _read_rows(handle, part, target, staging)
                planner.commit_tensor(part.item, target)
            while pending:
                part, target, ticket = pending.pop()
                ticket.wait()
                planner.commit_tensor(part.item, target)
        except BaseException:
            for _, _, ticket in pending:
                ticket.exception()  # nothing is written to any more when this is left
            raise
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _find_parts(self, plan: LoadPlan) -> tuple[list[_Part], list[ReadItem]]:
        """The items that are parts of contiguous tensors, and the others, for torch's own way."""
        parts: list[_Part] = []
        others: list[ReadItem] = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO or info.transform_descriptors:
                others.append(item)
            else:
                by_file.setdefault(info.relative_path, []).append(item)
        for name, items in by_file.items():
            path = os.fspath(self.fs.concat_path(self.path, name))
            with open(path, "rb") as file:
                found: dict[int, Optional[StoredTensor]] = {}  # by offset: resharding asks for parts of one
                for item in items:
                    info = self.storage_data[item.storage_index]
                    if info.offset not in found:
                        found[info.offset] = find_tensor(self._slice_file(file, info))
                    stored = found[info.offset]
                    if stored is None:
                        others.append(item)
                    else:
                        parts.append(_Part(item, stored, path, info.offset + stored.offset))
        return parts, others

    def _new_staging(self, parts: list[_Part]) -> torch.Tensor:
        """Locked bytes for the longest row at least, and for no more than all rows of any part."""
        longest_row = max((_row_bytes(part.stored) for part in parts), default=0)
        largest = max((_row_bytes(part.stored) * _row_count(part) for part in parts), default=0)
        with lt.locked_memory():
            return torch.empty(max(longest_row, min(largest, self._staging_bytes)), dtype=torch.uint8)


def _read_rows(handle: lt.AioHandle, part: _Part, target: torch.Tensor, staging: torch.Tensor) -> None:
    """Reads the rows that the item lies in, as many at a time as fit, and copies its columns."""
    stored, item = part.stored, part.item
    row_bytes, row_count = _row_bytes(stored), _row_count(part)
    if row_bytes * row_count == 0:
        return
    if not stored.shape:
        target = target.view(1)
    rows_at_once = staging.numel() // row_bytes
    for done in range(0, row_count, rows_at_once):
        count = min(rows_at_once, row_count - done)
        rows = staging[: count * row_bytes].view(stored.dtype).view(count, *stored.shape[1:])
        handle.submit_pread(rows, part.path, part.begin + (_first_row(part) + done) * row_bytes).wait()
        for dim in range(1, len(stored.shape)):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target[done : done + count].copy_(rows)


def _row_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape[1:]) * stored.dtype.itemsize


def _row_count(part: _Part) -> int:
    return part.item.lengths[0] if part.stored.shape else 1


def _first_row(part: _Part) -> int:
    return part.item.storage_offsets[0] if part.stored.shape else 0


def _is_run_of_rows(part: _Part) -> bool:
    return tuple(part.item.lengths[1:]) == tuple(part.stored.shape[1:])
