"""`locked_memory`: inside, what is allocated is page-locked and tagged."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Optional, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from locked_tensor import _C
from locked_tensor.decorators import run_inside
from locked_tensor.limits import describe_limit, log_milestones
from locked_tensor.tensor import tag

Function = TypeVar("Function", bound=Callable[..., Any])


class _TagAllocations(TorchDispatchMode):
    """Makes every result that lies in locked memory a LockedTensor."""

    supports_higher_order_operators = True

    __torch_dispatch__ = _C.dispatch_in_mode

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The base class would keep torch.compile out of __torch_dispatch__ by a wrapper that imports
        # torch._dynamo, seconds, at the first operator. There is no Python in ours to keep it out of.
        return False


def _tag_what_torch_loads() -> None:
    """Has `torch.load` return LockedTensors where it loads into locked memory.

    It makes a tensor without bytes and then `set_`s its storage; an in-place result is the tensor that
    was there, which nobody below autograd can exchange. So its last step is wrapped, once.
    """
    rebuild = torch._utils._rebuild_tensor

    def rebuild_and_tag(*arguments: Any) -> torch.Tensor:
        return tag(rebuild(*arguments))

    torch._utils._rebuild_tensor = rebuild_and_tag


_C.set_up_contexts(_TagAllocations(), _tag_what_torch_loads)


class locked_memory(_C.LockedContextBase):
    """Inside, what this thread allocates on the CPU is page-locked, and a `LockedTensor`.

    Every tensor storage that ATen takes from the CPU allocator on this thread: factories,
    `torch.tensor`, arithmetic, `torch.load`, `nn.Linear(...)`. Bare `UntypedStorage(n)` and
    `storage.clone()` do not come that way, and other threads (autograd's, a DataLoader's) are not
    affected. Views of unlocked tensors stay plain. Tensors may outlive it.

    It belongs to the logical context (`contextvars`) that enters it. An asyncio task that waits inside
    leaves the others as they are; tasks that are made inside are inside too, until it is left. A
    generator that is suspended inside keeps its caller inside.

    One object may be entered many times, also inside itself. Contexts may be left in any order, on the
    thread that entered them; the innermost one that is open decides.

    Also a decorator, of plain functions and of `async def`, generator and async generator functions:
    a generator is inside from when it is resumed until it yields. What a plain function returns runs
    outside, a generator it made, say.

    Args:
        huge_pages: "auto" (transparent huge pages where a whole aligned 2 MiB fits), "2M" (the
            hugetlbfs pool) or "off".
        numa_node: bind the memory to this node (mbind(2)).
        on_limit: "raise", or "fall_back" to ordinary memory, untagged, with one warning.

    Raises:
        ValueError: an argument is not one of the above, or the node does not exist.
        TypeError: what is decorated is a class or cannot be called; `numa_node` is no whole number.
        LockLimitError: inside, by whatever allocates, when the memory cannot be locked.
        RuntimeError: on entering: another library has replaced torch's CPU allocator since. On
            leaving: another thread has entered it, or nobody has; then nothing has changed.
    """

    def __init__(
        self, *, huge_pages: str = "auto", numa_node: Optional[int] = None, on_limit: str = "raise"
    ) -> None:
        if not isinstance(huge_pages, str):
            raise ValueError(f'huge_pages must be "auto", "2M" or "off", got {huge_pages!r}')
        if on_limit not in ("raise", "fall_back"):
            raise ValueError(f'on_limit must be "raise" or "fall_back", got {on_limit!r}')
        super().__init__(huge_pages, numa_node, on_limit == "fall_back")

    def __call__(self, function: Function) -> Function:
        return run_inside(lambda: self, function)  # type: ignore[return-value]

    def _has_left(self, fall_backs: int) -> None:
        """Called by `__exit__`, when all is as it was, with the number of allocations that fell back."""
        log_milestones()
        if fall_backs > 0:
            warnings.warn(
                f"some memory could not be locked and is ordinary memory now: {describe_limit()}",
                RuntimeWarning,
                stacklevel=2,
            )
