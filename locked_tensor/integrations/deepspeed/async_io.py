"""What `AsyncIOBuilder().load()` returns: the names of DeepSpeed's compiled async_io module."""

from __future__ import annotations

import torch

import locked_tensor as lt

ALIGNMENT_BYTES = 512  # of one thread's share, which DeepSpeed sizes its buffers by


class DeepSpeedAioHandle(lt.AioHandle):
    """An `AioHandle` whose `get_alignment` is DeepSpeed's, which its writers divide buffer sizes by."""

    def get_alignment(self) -> int:
        """512 bytes a thread. Nothing has to be aligned: what is not is staged."""
        return ALIGNMENT_BYTES * self.get_intra_op_parallelism()


def aio_handle(
    block_size: int = 1 << 20,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = False,
    intra_op_parallelism: int = 1,
) -> DeepSpeedAioHandle:
    """`locked_tensor.aio_handle`, with what it raises, for DeepSpeed."""
    return DeepSpeedAioHandle(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)


def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fills `buffer` from the file's start with a handle of its own; 0. Raises what `AioHandle.read` raises."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Writes `buffer` to the file's start with a handle of its own; 0. Raises what `AioHandle.write` raises."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies the first `dest.numel()` elements of `src` into `dest`, in row-major order; returns 0.

    Raises:
        ValueError: `src` has fewer elements, or another dtype.
    """
    if src.numel() < dest.numel():
        raise ValueError(f"src has {src.numel()} elements, fewer than dest's {dest.numel()}")
    if src.dtype != dest.dtype:
        raise ValueError(f"dest is {dest.dtype} and src is {src.dtype}: this copies bytes and does not convert")
    with torch.no_grad():
        dest.copy_(src.reshape(-1)[: dest.numel()].view(dest.shape))
    return 0


def why_unusable() -> str:
    """Empty where a handle can be made; else what every engine said."""
    engines = lt.engines()
    if any(info.usable for info in engines):
        return ""
    return "; ".join(f"{info.name}: {info.reason}" for info in engines)
