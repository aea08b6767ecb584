"""Tensors that autograd saves and that stay in memory, as its hooks may hold them."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Protocol

import torch

# Note [Held by hooks] What a hook returns is held by the node that saves it, so a node's own result must be
# detached or the two keep each other alive. And where hooks are set torch no longer checks that a saved
# tensor is unchanged; so that is checked here.


class Packed(Protocol):
    """What a pack hook of ours returns."""

    def take(self) -> torch.Tensor:
        """The tensor, for backward."""


class Kept:
    """A saved tensor that stays in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def take(self) -> torch.Tensor:
        check_unchanged(self._tensor, self._version)
        return self._tensor


class PassedOn:
    """A saved tensor that the hooks around ours have packed."""

    def __init__(self, tensor: torch.Tensor, hooks: Hooks) -> None:
        self._packed = hooks.pack(tensor)
        self._unpack = hooks.unpack

    def take(self) -> torch.Tensor:
        return self._unpack(self._packed)


class Hooks(NamedTuple):
    """A pair of torch's saved-tensors hooks."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


def hooks_around() -> Optional[Hooks]:
    """The hooks that are set now."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return Hooks(*found) if found is not None else None


def check_unchanged(tensor: torch.Tensor, version: int) -> None:
    """Raises what torch raises for a saved tensor that was changed in place since."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )


@torch._disable_dynamo
def take(packed: Packed) -> torch.Tensor:
    """The unpack hook."""
    return packed.take()
