"""Page-locked memory: the context that allocates it, locking in place, limits and statistics."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any, Generator, NamedTuple, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from locked_tensor import _C
from locked_tensor.tensor import tag


class MemlockLimit(NamedTuple):
    """How much memory this process may lock and has locked, in bytes; None is unlimited."""

    soft: Optional[int]
    hard: Optional[int]
    locked: int


class _TagAllocations(TorchDispatchMode):
    """Makes every result that lies in locked memory a LockedTensor."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        return _C.dispatch_in_mode(func, types, args, kwargs)


def _tag_what_torch_loads() -> None:
    """Has `torch.load` return LockedTensors where it loads into locked memory.

    It makes a tensor without bytes and then `set_`s its storage; an in-place result is the tensor that
    was there, which nobody below autograd can exchange. So its last step is wrapped, once.
    """
    rebuild = torch._utils._rebuild_tensor
    if getattr(rebuild, "tags_locked", False):
        return

    def rebuild_and_tag(*arguments: Any) -> torch.Tensor:
        return tag(rebuild(*arguments))

    rebuild_and_tag.tags_locked = True  # type: ignore[attr-defined]
    torch._utils._rebuild_tensor = rebuild_and_tag


@contextlib.contextmanager
def locked_memory(
    *, huge_pages: str = "auto", numa_node: Optional[int] = None, on_limit: str = "raise"
) -> Generator[None, None, None]:
    """Inside, what this thread allocates on the CPU is page-locked, and a `LockedTensor`.

    Every tensor storage that ATen takes from the CPU allocator on this thread: factories,
    `torch.tensor`, arithmetic, `torch.load`, `nn.Linear(...)`. Bare `UntypedStorage(n)` and
    `storage.clone()` do not come that way, and other threads (autograd's, a DataLoader's) are not
    affected. Views of unlocked tensors stay plain. Nests; also a decorator. Tensors may outlive it.

    Args:
        huge_pages: "auto" (transparent huge pages where a whole aligned 2 MiB fits), "2M" (the
            hugetlbfs pool) or "off".
        numa_node: bind the memory to this node (mbind(2)).
        on_limit: "raise", or "fall_back" to ordinary memory, untagged, with one warning.

    Raises:
        LockLimitError: inside, by whatever allocates, when the memory cannot be locked.
        ValueError: an argument is not one of the above, or the node does not exist.
        RuntimeError: another library has replaced torch's CPU allocator since.
    """
    if on_limit not in ("raise", "fall_back"):
        raise ValueError(f'on_limit must be "raise" or "fall_back", got {on_limit!r}')
    saved = _C.enter_locked_mode(huge_pages, numa_node, on_limit == "fall_back")
    fall_backs = _C.fall_back_count()
    _tag_what_torch_loads()
    try:
        with _TagAllocations():
            yield
    finally:
        _C.leave_locked_mode(saved)
        log_milestones()
        if on_limit == "fall_back" and _C.fall_back_count() > fall_backs:
            warnings.warn(
                "some memory could not be locked and is ordinary memory now: "
                + _describe_limit(),
                RuntimeWarning,
                stacklevel=3,
            )


def _describe_limit() -> str:
    limit = memlock_limit()
    return (
        f"RLIMIT_MEMLOCK is {_show(limit.soft)}, {_show(limit.locked)} locked; "
        'raise it with "ulimit -l" (systemd LimitMEMLOCK=, docker --ulimit memlock=-1)'
    )


def _show(nbytes: Optional[int]) -> str:
    return "unlimited" if nbytes is None else f"{nbytes:,} bytes"


_logger = logging.getLogger("locked_tensor")
_next_milestone = 32 << 30


def set_log_milestone(nbytes: int) -> None:
    """From how many locked bytes on each doubling is logged (INFO, logger "locked_tensor"); 32 GiB at first.

    Raises:
        ValueError: `nbytes` is not positive.
    """
    global _next_milestone
    if nbytes <= 0:
        raise ValueError(f"nbytes must be positive, got {nbytes}")
    _next_milestone = nbytes


def log_milestones() -> None:
    """Logs once that a milestone is reached. Called where locked memory has grown."""
    global _next_milestone
    reserved = _C.memory_reserved()
    if reserved >= _next_milestone:
        _logger.info("%.1f GiB are locked now (%s)", reserved / 2**30, _describe_limit())
        while _next_milestone <= reserved:
            _next_milestone *= 2


def lock(tensor: torch.Tensor) -> torch.Tensor:
    """A locked copy of a CPU tensor; the same object if it is locked already.

    The copy has the tensor's values, dtype, strides and `requires_grad`, is a leaf, and is an
    `nn.Parameter` if the tensor is one. `lock_` locks without copying.

    Raises:
        LockLimitError: the memory could not be locked.
    """
    if is_locked(tensor):
        return tensor
    with torch.no_grad(), locked_memory():
        copy = torch.empty_like(tensor, device="cpu").copy_(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def lock_(tensor: torch.Tensor) -> torch.Tensor:
    """Locks the tensor's existing storage in place; returns the tensor.

    Data, address and views stay, and the tensor's class: a plain tensor may be locked. Nests: what
    was locked twice is unlocked twice. Undone by itself when the storage dies. Locking a private
    map of a file (`torch.load(mmap=True)`) copies the file to memory.

    Raises:
        LockLimitError: the memory could not be locked; then nothing has changed.
        ValueError: no bytes, not a strided CPU tensor, or shared memory (which torch would no
            longer recognise as such).
    """
    _C.lock_storage(tensor)
    return tensor


def unlock_(tensor: torch.Tensor) -> torch.Tensor:
    """Undoes one `lock_` of the tensor's storage; returns the tensor.

    Raises:
        ValueError: the storage was not locked by `lock_`.
    """
    _C.unlock_storage(tensor)
    return tensor


def is_locked(tensor: torch.Tensor) -> bool:
    """Does the tensor's whole byte extent lie in live locked memory? For any tensor, tagged or plain.

    False for a tensor without bytes in CPU memory; an empty view of locked memory is locked.
    """
    return _C.is_locked(tensor)


def is_pinned(tensor: torch.Tensor) -> bool:
    """DeepSpeed's question: true for locked memory, and for memory that torch has pinned for an accelerator."""
    return _C.is_locked(tensor) or (torch.cuda.is_initialized() and tensor.is_pinned())


def new_claimed_tensor(num_elem: int, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional `LockedTensor` that can be given up by hand, as DeepSpeed's handles do.

    Raises:
        LockLimitError: the memory could not be locked.
    """
    tensor = tag(_C.new_claimed_tensor(num_elem, dtype))
    log_milestones()
    return tensor


def memlock_limit() -> MemlockLimit:
    """RLIMIT_MEMLOCK and what this process has locked now. Read from the kernel at each call."""
    return MemlockLimit(*_C.memlock_limit())


def memory_allocated() -> int:
    """Bytes in live locked tensors, as asked."""
    return memory_stats()["allocated_bytes.all.current"]


def memory_reserved() -> int:
    """Bytes mapped and locked: live, kept for reuse, and rounding."""
    return _C.memory_reserved()


def max_memory_allocated() -> int:
    """The most bytes in live locked tensors since the start or the last `reset_peak_memory_stats`."""
    return memory_stats()["allocated_bytes.all.peak"]


def reset_peak_memory_stats() -> None:
    """Begins the peaks again at what is allocated now."""
    _C.reset_peak_memory_stats()


def memory_stats() -> dict[str, int]:
    """Everything that is counted, by the names of `torch.cuda.memory_stats` where it has them."""
    return _C.memory_stats()


def memory_summary() -> str:
    """`memory_stats` as a table for people."""
    stats = memory_stats()
    width = max(len(name) for name in stats)
    rows = [
        f"{name:<{width}}  {_show(value) if 'bytes' in name else f'{value:,}'}"
        for name, value in stats.items()
    ]
    return "\n".join(["locked memory", "-" * (width + 2)] + rows)


def empty_cache() -> None:
    """Unlocks and unmaps everything that is kept for reuse."""
    _C.empty_cache()


def set_cache_limit(nbytes: int) -> None:
    """Keeps at most `nbytes` of freed memory for reuse; what exceeds it is unmapped now.

    Raises:
        ValueError: `nbytes` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, got {nbytes}")
    _C.set_cache_limit(nbytes)


