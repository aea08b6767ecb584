"""`LockedTensor`: a tensor whose bytes lie in page-locked memory, and whose views say so too."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable, Optional, SupportsIndex

import torch

from locked_tensor import _C
from locked_tensor.movable import check_dtype


class LockedTensor(torch.Tensor):
    """A `torch.Tensor` in page-locked memory. Made under `locked_memory` or by `lock`.

    It is a tensor to everything that takes one. Results that alias its memory (narrows, views,
    transposes, in-place results) are LockedTensors; results in memory of their own are plain unless
    they were allocated under `locked_memory`. The class is a claim: `is_locked` asks the registry,
    which stays true to the bytes after `set_`, `.data =` or `share_memory_`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # Note [Dispatch in C++] A function of the compiled half: it calls the operator through its handle and
    # makes LockedTensors of the results that the registry knows (csrc/dispatch/operator_table.h). What has
    # no schema (higher-order operators) it hands to _call_in_python.
    __torch_dispatch__ = _C.torch_dispatch

    def is_locked(self) -> bool:
        """Does the whole byte extent lie in live locked memory? The registry's answer."""
        return _C.is_locked(self)

    # Note [Compiling] torch.compile takes a subclass with __torch_dispatch__ apart and works on its inner
    # tensors: here one plain alias of the same bytes. Put together again it is that alias, so what is
    # computed is plain, and an output that aliases a locked input is tagged when it leaves.

    @property
    def _plain_alias(self) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return self.detach()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_plain_alias"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> torch.Tensor:
        return inner["_plain_alias"]

    def _is_view(self) -> bool:
        # While it is being traced, a view input counts as a tensor of its own: its base is not an input.
        return torch._guards.TracingContext.try_get() is None and super()._is_view()

    def numpy(self, *, force: bool = False) -> Any:
        return as_plain(self).numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return as_plain(self).__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return as_plain(self).tolist()

    def __repr__(self, *, tensor_contents: Optional[str] = None) -> str:  # type: ignore[override]
        text = torch._tensor_str._str(as_plain(self), tensor_contents=tensor_contents)
        note = "locked" if self.is_locked() else "not locked"
        return f"{text[:-1]}, {note})"

    def __format__(self, spec: str) -> str:
        return as_plain(self).__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # torch's own refusal
        with torch._C._DisableTorchDispatch():
            duplicate = copy.deepcopy(as_plain(self), memo)
        result = _retag(duplicate, self)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # What is pickled is an ordinary tensor, which loads where this package is not installed.
        return _as_ordinary(self).__reduce_ex__(protocol)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain `torch.Tensor` on the same bytes, with the same `requires_grad` but no history.

    Raises:
        TypeError: not a tensor.
    """
    if type(tensor) is torch.Tensor:
        return tensor
    check_is_tensor("as_plain", tensor)
    with torch._C._DisableTorchDispatch():
        plain = tensor.detach()
    return plain.requires_grad_(tensor.requires_grad) if tensor.requires_grad else plain


def check_is_tensor(function: str, tensor: object) -> None:
    """Raises TypeError, naming the function that was called, for what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function}() takes a torch.Tensor, got {type(tensor).__name__}")


# See Note [Lazy conjugation] in csrc/dispatch/operator_call.cpp.
_RESOLVED_ABOVE_PYTHON = (
    torch._C.DispatchKey.Conjugate,
    torch._C.DispatchKey.Negative,
    torch._C.DispatchKey.ZeroTensor,
)


def _call_in_python(
    func: Callable[..., Any], is_below_python: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What the compiled half does for operators with a schema: calls one, whose results it tags."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _RESOLVED_ABOVE_PYTHON:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with contextlib.ExitStack() as guards:
        guards.enter_context(torch._C._ForceDispatchKeyGuard(included, excluded))
        if is_below_python:
            guards.enter_context(torch._C._DisableTorchDispatch())
        return func(*args, **kwargs)


def tag_results(result: Any) -> Any:
    """Makes LockedTensors of the plain tensors in an operator's result that lie in locked memory."""
    if isinstance(result, torch.Tensor):
        return tag(result)
    if isinstance(result, (list, tuple)):
        return type(result)([tag_results(each) for each in result])
    if isinstance(result, dict):
        return {key: tag_results(value) for key, value in result.items()}
    return result


def tag(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a LockedTensor if the registry knows its bytes; else the tensor itself.

    A Parameter, or a tensor of any other class than `torch.Tensor`, stays what it is.
    """
    return _C.tag(tensor)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as one-dimensional uint8: the same memory where they lie so, else a copy.

    Raises:
        TypeError: it is quantized.
    """
    check_dtype(tensor.dtype)
    plain = as_plain(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    # Not view(-1): that of a single element may keep any stride, which view(torch.uint8) refuses.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


_C.set_up_dispatch(LockedTensor, _call_in_python, tag_results)


def _as_ordinary(tensor: torch.Tensor) -> torch.Tensor:
    plain = as_plain(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(plain.detach(), requires_grad=tensor.requires_grad)
    return plain


def _retag(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a copy of `like` is: tagged if it is locked, a Parameter if `like` is one."""
    tagged = tag(plain.detach())
    if isinstance(like, torch.nn.Parameter):
        result: torch.Tensor = torch.nn.Parameter(tagged, requires_grad=like.requires_grad)
    else:
        result = tagged.requires_grad_(like.requires_grad)
    if like.grad is not None and plain.grad is not None:
        result.grad = plain.grad
    return result
