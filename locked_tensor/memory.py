"""Page-locked memory: locking copies and in place, claims, limits and statistics."""

from __future__ import annotations

import torch

from locked_tensor import _C
from locked_tensor.contexts import locked_memory
from locked_tensor.limits import byte_count, log_milestones, show_bytes
from locked_tensor.movable import check_dtype
from locked_tensor.tensor import check_is_tensor, tag


def lock(tensor: torch.Tensor) -> torch.Tensor:
    """A locked copy of a tensor; the same object if it is locked already.

    The copy is a `LockedTensor` with the tensor's values, dtype and `requires_grad`, and its strides where
    it is dense (as `torch.empty_like` has it; gaps and repeats are not copied). It is a leaf, and an
    `nn.Parameter` if the tensor is one. That of a tensor without elements is an empty view of
    locked memory. `lock_` locks without copying.

    Raises:
        LockLimitError: the memory could not be locked.
        TypeError: not a tensor; a sparse, nested, meta, fake or uninitialized one, or a subclass without bytes of its own.
    """
    check_is_tensor("lock", tensor)
    if is_locked(tensor):
        return tensor
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"lock() copies a tensor's bytes, and an {type(tensor).__name__} has none yet")
    _C.check_copyable(tensor)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), locked_memory():
        if tensor.numel() > 0:
            copy = torch.empty_like(tensor, device="cpu").copy_(tensor)
        else:
            place = torch.empty(1, dtype=tensor.dtype, device="cpu")
            copy = place.as_strided_(tensor.size(), tensor.stride())
    if not is_locked(copy):
        raise TypeError(f"lock() cannot make a locked copy of a {type(tensor).__name__}; lock what it is made of")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def lock_(tensor: torch.Tensor) -> torch.Tensor:
    """Locks the tensor's existing storage in place; returns the tensor.

    Data, address and views stay, and the tensor's class: a plain tensor may be locked. Nests: what
    was locked twice is unlocked twice. Memory that was allocated locked stays so, whatever is counted.
    Undone by itself when the storage dies. Locking a private map of a file (`torch.load(mmap=True)`)
    copies the file to memory.

    Raises:
        LockLimitError: the memory could not be locked; then nothing has changed.
        ValueError: no bytes, not a strided CPU tensor, or shared memory (which torch would no
            longer recognise as such).
        TypeError: not a tensor, or a fake one.
    """
    check_is_tensor("lock_", tensor)
    _C.lock_storage(tensor)
    return tensor


def unlock_(tensor: torch.Tensor) -> torch.Tensor:
    """Undoes one `lock_` of the tensor's storage; returns the tensor.

    Memory that was allocated locked stays locked.

    Raises:
        ValueError: there is no `lock_` to undo, or as of `lock_`.
        TypeError: not a tensor, or a fake one.
    """
    check_is_tensor("unlock_", tensor)
    _C.unlock_storage(tensor)
    return tensor


def is_locked(tensor: torch.Tensor) -> bool:
    """Does the tensor's whole byte extent lie in live locked memory? For any tensor, tagged or plain.

    False for a tensor without bytes in CPU memory (sparse, nested, meta, fake); an empty view of locked
    memory is locked.

    Raises:
        TypeError: not a tensor.
    """
    try:
        return _C.is_locked(tensor)
    except TypeError:
        check_is_tensor("is_locked", tensor)
        raise


def is_pinned(tensor: torch.Tensor) -> bool:
    """DeepSpeed's question: true for locked memory, and for memory that torch has pinned for an accelerator."""
    check_is_tensor("is_pinned", tensor)
    return _C.is_locked(tensor) or (torch.cuda.is_initialized() and tensor.is_pinned())


def new_claimed_tensor(num_elem: int, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional `LockedTensor` that can be given up by hand, as DeepSpeed's handles do.

    Without elements it is an empty view of locked memory.

    Raises:
        LockLimitError: the memory could not be locked.
        TypeError: a quantized dtype.
    """
    check_dtype(dtype)
    tensor = tag(_C.new_claimed_tensor(num_elem, dtype))
    log_milestones()
    return tensor


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
        f"{name:<{width}}  {show_bytes(value) if 'bytes' in name else f'{value:,}'}"
        for name, value in stats.items()
    ]
    return "\n".join(["locked memory", "-" * (width + 2)] + rows)


def empty_cache() -> None:
    """Unlocks and unmaps everything that is kept for reuse, the idle staging of handles among it."""
    _C.empty_cache()


def set_cache_limit(nbytes: int) -> None:
    """Keeps at most `nbytes` of freed memory for reuse; what exceeds it is unmapped now.

    Raises:
        TypeError: `nbytes` is no whole number.
        ValueError: `nbytes` is negative.
    """
    _C.set_cache_limit(min(byte_count("set_cache_limit", nbytes, at_least=0), 2**64 - 1))


