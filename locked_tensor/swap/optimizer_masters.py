"""Master weights: float32 copies of low-precision parameters, which the optimizer updates in their place."""

from __future__ import annotations

from typing import Any, Optional

import torch

MASTER = "master_param"  #: the name of a master among its parameter's state
MASTER_DTYPE = torch.float32


def needs_master(param: torch.Tensor) -> bool:
    """Is it of less precision than a master? A parameter of float32 or more is its own."""
    return param.is_floating_point() and param.dtype.itemsize < MASTER_DTYPE.itemsize


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """A tensor of a master's dtype and shape without a master's memory: torch casts loaded state to it."""
    return torch.zeros((), dtype=MASTER_DTYPE).expand(param.shape)


def check_master(param: torch.Tensor, state: dict[str, Any]) -> None:
    """Raises ValueError for a state whose master is not of the parameter's shape."""
    master = state.get(MASTER)
    if master is not None and master.shape != param.shape:
        raise ValueError(
            f"{MASTER} must have its parameter's shape {tuple(param.shape)}, got {tuple(master.shape)}"
        )


def with_gradient(target: torch.Tensor, gradient: Optional[torch.Tensor], unscale: Optional[float]) -> torch.Tensor:
    """The target, with the gradient cast to its dtype and multiplied by `unscale`."""
    if gradient is not None:
        gradient = gradient.to(target.dtype)
        target.grad = gradient if unscale is None else gradient.mul(unscale)
    return target
