"""Which tensors have bytes of their own in CPU memory, to be copied, viewed and moved: one rule for all."""

from __future__ import annotations

from typing import Optional

import torch

# torch keeps what such bytes mean (scale, zero point) beside them, and crashes where they are viewed as others.
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def check_dtype(dtype: object) -> None:
    """Raises TypeError for what no plain tensor has as its dtype: a quantized dtype, or none at all."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
    if dtype in _QUANTIZED:
        raise TypeError(f"{dtype} is quantized, and its bytes are nothing by themselves: use int_repr()")


def check_movable(name: str, tensor: object) -> None:
    """Raises for what `is_movable` denies, with what it is in the place of `name`.

    Raises:
        TypeError: not a tensor.
        ValueError: a tensor without such bytes.
    """
    obstacle = _obstacle(tensor)
    if obstacle is None:
        return
    kind = ValueError if isinstance(tensor, torch.Tensor) else TypeError
    raise kind(f"{name} must be a strided CPU tensor with bytes of its own, got {obstacle}")


def is_movable(tensor: object) -> bool:
    """Is it a strided CPU tensor whose elements are its bytes, or one without elements?

    Not quantized, sparse, nested, meta, fake, a wrapper of other tensors, uninitialized, or emptied.
    """
    return _obstacle(tensor) is None


def _obstacle(tensor: object) -> Optional[str]:
    """What keeps it from being moved, as it is told; None where nothing does."""
    if not isinstance(tensor, torch.Tensor):
        return "None" if tensor is None else f"a {type(tensor).__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        return f"a {type(tensor).__name__}, whose shape is not known yet"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"a {'nested ' if tensor.is_nested else ''}tensor of layout {tensor.layout}: to_dense() makes one"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}"
    if tensor.dtype in _QUANTIZED:
        return f"a quantized tensor of {tensor.dtype}: its int_repr() is one"
    if not _has_bytes(tensor):
        return f"a {type(tensor).__name__} without bytes (fake, a wrapper, or its storage emptied?)"
    return None


def _has_bytes(tensor: torch.Tensor) -> bool:
    if not torch._C._has_storage(tensor) or tensor.untyped_storage().device != tensor.device:
        return False
    return tensor.numel() == 0 or torch._C._data_address(tensor) != 0  # type: ignore[attr-defined]  # copies no lazy clone
