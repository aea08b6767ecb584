"""A tensor in a file, or a box cut out of it: which bytes of the file its elements are."""

from __future__ import annotations

import math
from typing import Any, Iterator, NamedTuple

import torch

from locked_tensor.scratch import AT_ONCE_BYTES

NEAR_BYTES = 64 << 10  # reading this much in vain is cheaper than another request


class Piece(NamedTuple):
    """A part of a box that is read at once."""

    file_offset: int
    nbytes: int  #: from its first byte in the file to its last
    strides: tuple[int, ...]  #: in elements, in the file
    target: torch.Tensor  #: where the elements go

    @property
    def is_contiguous(self) -> bool:
        return self.nbytes == self.target.nbytes


class Box(NamedTuple):
    """Elements of a tensor in a file: all, or those that an index selects."""

    offset: int  #: in elements, from the tensor's first
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements
    is_kept: tuple[bool, ...]  #: False: an integer selected it, and the result lacks the dimension

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for size, kept in zip(self.sizes, self.is_kept) if kept)

    @property
    def is_contiguous(self) -> bool:
        return math.prod(self.sizes) == _span(self.sizes, self.strides)


def select(shape: tuple[int, ...], index: Any) -> Box:
    """The box that `index` selects: None (everything), or integers, slices of step 1 and one `...`.

    Raises:
        TypeError, ValueError, IndexError: the index is something else, has another step, or is out of
            the shape's range.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    parts = _spread(index, len(shape))
    offset = 0
    sizes: list[int] = []
    kept: list[bool] = []
    for part, size, stride in zip(parts, shape, strides):
        if isinstance(part, slice):
            begin, end, step = part.indices(size)
            if step != 1:
                raise ValueError(f"only slices of step 1 can be read, got {part}")
            sizes, kept = sizes + [max(end - begin, 0)], kept + [True]
        else:
            if not -size <= part < size:
                raise IndexError(f"index {part} is out of range for a dimension of size {size}")
            begin, sizes, kept = part % size, sizes + [1], kept + [False]
        offset += begin * stride
    return Box(offset, tuple(sizes), tuple(strides), tuple(kept))


def _spread(index: Any, dimensions: int) -> list[Any]:
    """One integer or slice for each dimension."""
    parts = [] if index is None else list(index) if isinstance(index, tuple) else [index]
    for part in parts:
        if part is not Ellipsis and (isinstance(part, bool) or not isinstance(part, (int, slice))):
            raise TypeError(f"an index is made of integers, slices and ..., got {part!r}")
    if parts.count(Ellipsis) > 1:
        raise IndexError("an index has at most one ...")
    given = len(parts) - parts.count(Ellipsis)
    if given > dimensions:
        raise IndexError(f"an index for {given} dimensions, and the tensor has {dimensions}")
    place = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    return parts[:place] + [slice(None)] * (dimensions - given) + parts[place + 1 :]


def pieces(box: Box, target: torch.Tensor, file_offset: int) -> Iterator[Piece]:
    """Cuts a box, whose tensor begins at `file_offset`, into pieces, in the order of the file.

    `target` has the box's sizes. A piece is contiguous, or spans at most `AT_ONCE_BYTES` of which no
    stretch of more than `NEAR_BYTES` is read in vain.
    """
    if target.numel() == 0:
        return
    item = target.element_size()
    begin = file_offset + box.offset * item
    yield from _cut(box.sizes, box.strides, target.view(box.sizes), begin, item)


def _cut(
    sizes: tuple[int, ...], strides: tuple[int, ...], target: torch.Tensor, begin: int, item: int
) -> Iterator[Piece]:
    span = _span(sizes, strides)
    if math.prod(sizes) == span or (span * item <= AT_ONCE_BYTES and _is_dense(sizes, strides, item)):
        yield Piece(begin, span * item, strides, target)
        return
    rows = 1
    row_span = _span(sizes[1:], strides[1:])
    if _is_dense(sizes, strides, item):
        rows = max(1, (AT_ONCE_BYTES // item - row_span) // strides[0] + 1)
    for row in range(0, sizes[0], rows):
        count = min(rows, sizes[0] - row)
        row_begin = begin + row * strides[0] * item
        if count == 1:
            yield from _cut(sizes[1:], strides[1:], target[row], row_begin, item)
        else:
            yield from _cut((count, *sizes[1:]), strides, target[row : row + count], row_begin, item)


def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if 0 not in sizes else 0


def _is_dense(sizes: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    """Is no gap between neighbours longer than `NEAR_BYTES`?"""
    return all(
        size == 1 or (stride - _span(sizes[dim + 1 :], strides[dim + 1 :])) * item <= NEAR_BYTES
        for dim, (size, stride) in enumerate(zip(sizes, strides))
    )
