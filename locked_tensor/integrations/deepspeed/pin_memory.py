"""What `PinMemoryBuilder().load()` returns: the names of DeepSpeed's compiled pin_memory module."""

from __future__ import annotations

import torch

import locked_tensor as lt
from locked_tensor import _C
from locked_tensor.memory import is_pinned, new_claimed_tensor


class pin_handle:
    """Makes locked tensors that are given up by hand: by tensor, or by the address they began at.

    Giving up never frees memory under a live tensor: it goes with the last view. Holds nothing.
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A one-dimensional `LockedTensor` of `num_elem` elements with the example's dtype.

        Raises:
            ValueError: `num_elem` is negative.
            LockLimitError: the memory could not be locked.
        """
        return new_claimed_tensor(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """As `AioHandle.free_cpu_locked_tensor`."""
        return _C.free_claimed_tensor(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Gives up the claim of the tensor that begins at `address`; False when there is none (any more)."""
        return _C.free_claimed_at(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """True for locked memory, and for memory that torch has pinned for an accelerator."""
        return is_pinned(buffer)


def why_unusable() -> str:
    """Empty where memory can be locked; else what the kernel said, and the remedy."""
    try:
        new_claimed_tensor(1, torch.uint8)
    except lt.LockLimitError as error:
        return str(error)
    return ""
