"""Every fast lane against dispatch: random arguments, under every mode that could tell them apart."""

import contextlib
import random

import pytest
import torch
from conftest import Log
from torch.overrides import TorchFunctionMode

import locked_tensor as lt

LANES = ["narrow", "view", "select", "transpose", "chunk", "split", "unbind", "__getitem__"]
ROUNDS = 150  # for each lane and mode


WELL_KNOWN = {
    "narrow": lambda t: t.narrow(0, 1, 2),
    "view": lambda t: t.view(6, -1),
    "select": lambda t: t.select(1, 2),
    "transpose": lambda t: t.transpose(0, 1),
    "chunk": lambda t: t.chunk(2)[1],
    "split": lambda t: t.split([1, 3])[1],
    "unbind": lambda t: t.unbind(dim=1)[2],
    "__getitem__": lambda t: t[1:, 2],
}



class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "plainly": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "dispatch mode": Log,
    "torch function mode": Functions,
    "locked_memory": lt.locked_memory,
    "autocast": lambda: torch.autocast("cpu"),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "torch function disabled": torch._C.DisableTorchFunction,
}


def a_tensor(choose):
    """A locked tensor of 0 to 4 dimensions: a base or a view, with and without history."""
    sizes = [choose.choice([0, 1, 2, 3, 4, 6]) for _ in range(choose.randint(0, 4))]
    dtype = choose.choice([torch.float32, torch.float64, torch.int16, torch.bool, torch.complex64])
    tensor = lt.lock((torch.arange(torch.Size(sizes).numel() + 1) % 7).to(dtype)[1:].reshape(sizes))
    kind = choose.randrange(8)
    if dtype.is_floating_point and kind == 0:
        tensor.requires_grad_()
    elif dtype.is_floating_point and kind == 1:
        tensor = torch.nn.Parameter(tensor)
    elif dtype.is_floating_point and kind == 2:
        tensor = tensor.requires_grad_().expand_as(tensor)
    elif dtype is torch.complex64 and kind < 4:
        tensor = tensor.conj()
    elif kind == 4 and len(sizes) > 1:
        tensor = tensor.movedim(0, -1)
    elif kind == 5:
        with torch.no_grad():
            tensor = tensor.unsqueeze(0)
    elif kind == 6:
        tensor.set_(torch.zeros(sizes, dtype=dtype))  # of the class, and not locked
    return tensor


def an_int(choose):
    return choose.choice([choose.randint(-3, 5), choose.randint(0, 2), choose.randint(-9, 9), 1 << 70, True, 2.0, None,
                          torch.tensor(1)]) if choose.randrange(4) == 0 else choose.randint(-2, 3)


def a_slice(choose):
    bound = lambda: choose.choice([None, an_int(choose), choose.randint(-3, 5)])  # noqa: E731
    return slice(bound(), bound(), choose.choice([None, None, 1, 2, 3, 0, -1, an_int(choose)]))


def a_call(choose, lane, tensor):
    """Positional and named arguments, most of them right."""
    dim = [an_int(choose)] if choose.randrange(2) else []
    named = {"dim": dim.pop()} if dim and choose.randrange(3) == 0 else {}
    if lane == "narrow":
        likely = [choose.randint(-1, 0), choose.randint(0, 1), choose.randint(0, 2)]
        return [an_int(choose) if choose.randrange(5) == 0 else each for each in likely], {}
    if lane == "view":
        shape = list(tensor.shape)
        choose.shuffle(shape)
        other = choose.choice([shape, [-1], [1, *shape], [an_int(choose), -1], [-1, *shape[1:]], [[-1]], [tuple(shape)],
                               [torch.Size(shape)], [torch.int16], []])
        return other, {}
    if lane in ("select", "transpose"):
        return [an_int(choose), an_int(choose)], {}
    if lane == "chunk":
        return [an_int(choose), *dim], named
    if lane == "split":
        sizes = choose.choice([an_int(choose), [1, 1], (2, 1), list(tensor.shape[:1]), [choose.randint(0, 3)]])
        return [sizes, *dim], named
    if lane == "unbind":
        return dim, named
    items = [choose.choice([an_int(choose), a_slice(choose)]) for _ in range(choose.randint(0, 3))]
    return [choose.choice([an_int(choose), a_slice(choose), tuple(items), (*items, Ellipsis), slice(None),
                           (slice(None),) * tensor.dim(), None])], {}


def outcome(call):
    try:
        return call(), None
    except Exception as error:
        return None, error


def message(error):
    return str(error).partition("Exception raised from")[0]  # torch adds its C++ stack to some


def shares_memory(view, tensor):
    return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def facts(view, tensor):
    """All that a user can ask of a view."""
    with torch._C.DisableTorchFunctionSubclass():
        base = view._base
        return {
            "type": type(view),
            "shape": view.shape,
            "stride": view.stride(),
            "offset": view.storage_offset(),
            "dtype": view.dtype,
            "address": view.data_ptr() if shares_memory(view, tensor) else "its own",
            "locked": lt.is_locked(view),
            "is_view": torch.Tensor._is_view(view),
            "base": base if base is tensor else (base is None or base is tensor._base),
            "version": None if view.is_inference() else view._version,
            "inference": view.is_inference(),
            "requires_grad": view.requires_grad,
            "grad_fn": type(view.grad_fn),
            "is_leaf": view.is_leaf,
            "conj": view.is_conj(),
            "keys": torch._C._dispatch_keys(view).raw_repr(),
            "values": lt.as_plain(view).detach().clone().resolve_conj().tolist(),
        }


def assert_equal_outcomes(lane, tensor, args, kwargs):
    view, error = outcome(lambda: getattr(tensor, lane)(*args, **kwargs))
    expected, expected_error = outcome(lambda: getattr(torch.Tensor, lane)(tensor, *args, **kwargs))
    what = f"{lane} of {type(tensor).__name__} {tuple(tensor.shape)}, {args}, {kwargs}"
    assert type(error) is type(expected_error) and message(error) == message(expected_error), what
    if error is not None:
        return 0
    assert type(view) is type(expected), what
    views, wanted = ([view], [expected]) if isinstance(view, torch.Tensor) else (view, expected)
    assert len(views) == len(wanted), what
    for found, each in zip(views, wanted):
        assert facts(found, tensor) == facts(each, tensor), what
    for found, each in zip(views, wanted):
        before = (each._version, tensor._version) if not each.is_inference() and not tensor.is_inference() else None
        in_place, expected_in_place = outcome(lambda: found.zero_()), outcome(lambda: each.zero_())
        assert type(in_place[1]) is type(expected_in_place[1]), what
        if before is not None and in_place[1] is None and shares_memory(found, tensor) and found.numel():
            assert tensor._version == before[1] + 2, what  # one counter for all
    return 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lane", LANES)
def test_a_lane_cannot_be_told_from_dispatch(lane, mode):
    choose = random.Random(f"{lane} {mode}")
    succeeded = 0
    for _ in range(ROUNDS):
        tensor = a_tensor(choose)
        args, kwargs = a_call(choose, lane, tensor)
        with MODES[mode]():
            succeeded += assert_equal_outcomes(lane, tensor, args, kwargs)
    assert succeeded > ROUNDS // 6


@pytest.mark.parametrize("lane", LANES)
def test_a_dispatch_mode_sees_what_the_lane_would_hide(lane):
    choose = random.Random(lane)
    for _ in range(ROUNDS):
        tensor = a_tensor(choose)
        args, kwargs = a_call(choose, lane, tensor)
        with Log() as ours:
            outcome(lambda: getattr(tensor, lane)(*args, **kwargs))
        with Log() as expected:
            outcome(lambda: getattr(torch.Tensor, lane)(tensor, *args, **kwargs))
        assert ours.seen == expected.seen



@pytest.mark.parametrize("lane", LANES)
def test_a_lane_is_taken_where_nothing_is_in_its_way(lane, monkeypatch):
    seen = []

    def watched(func, types, args=(), kwargs=None):
        seen.append(str(func))
        return torch_dispatch(func, types, args, kwargs)

    torch_dispatch = lt.LockedTensor.__torch_dispatch__
    monkeypatch.setattr(lt.LockedTensor, "__torch_dispatch__", staticmethod(watched))
    tensor = lt.lock(torch.arange(24.0).reshape(4, 6))
    view = WELL_KNOWN[lane](tensor)
    assert seen == []
    parameter = torch.nn.Parameter(tensor)
    with torch.no_grad():
        frozen = WELL_KNOWN[lane](parameter)
    assert type(view) is type(frozen) is lt.LockedTensor
    assert view._base is tensor and frozen._base is parameter
    assert seen == ["aten.detach.default"]  # Parameter's own


@pytest.mark.parametrize("lane", LANES)
def test_transforms_and_tracing_see_the_operator(lane):
    call = WELL_KNOWN[lane]
    tensor = lt.lock(torch.arange(24.0).reshape(4, 6))
    plain = lt.as_plain(tensor).clone()
    batch = lt.lock(torch.arange(72.0).reshape(3, 4, 6))
    mapped = torch.func.vmap(call)(batch)
    assert torch.equal(mapped, torch.func.vmap(call)(lt.as_plain(batch).clone()))
    gradient = torch.func.grad(lambda t: (call(t) ** 2).sum())(tensor)
    assert torch.equal(gradient, torch.func.grad(lambda t: (call(t) ** 2).sum())(plain))
    value, tangent = torch.func.jvp(call, (tensor,), (torch.ones(4, 6),))
    assert torch.equal(value, call(plain)) and torch.equal(tangent, torch.ones_like(value))
    traced = torch.jit.trace(lambda t: call(t) * 2, (tensor,), check_trace=False)
    assert torch.equal(traced(plain + 1), call(plain + 1) * 2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensor, lt.lock(torch.ones(4, 6)))
        assert type(torch.autograd.forward_ad.unpack_dual(call(dual)).tangent) is lt.LockedTensor


@pytest.mark.parametrize("lane", LANES)
def test_gradients_through_a_view_are_as_plain(lane):
    call = WELL_KNOWN[lane]
    leaf = lt.lock(torch.arange(24.0).reshape(4, 6)).requires_grad_()
    plain = lt.as_plain(leaf).detach().clone().requires_grad_()
    for tensor in (leaf, plain):
        (call(tensor * 1) ** 2).sum().backward()
    assert torch.equal(leaf.grad, plain.grad)
    view, plain_view = call(leaf), call(plain)
    assert type(view.grad_fn) is type(plain_view.grad_fn) and view._base is leaf


def test_an_in_place_change_of_a_lanes_view_is_seen_by_autograd():
    weight = torch.ones(6, requires_grad=True)
    tensor = lt.lock(torch.arange(24.0).reshape(4, 6))
    product = (tensor * weight).sum()
    tensor[1:3].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    base = lt.lock(torch.zeros(4, 6))
    base[1].add_(weight)  # history by a view of a tensor without
    assert base.requires_grad and type(base) is lt.LockedTensor
    base.sum().backward()
    assert torch.equal(weight.grad, torch.ones(6))


def test_subclasses_of_ours_take_no_lane():
    class Named(lt.LockedTensor):
        pass

    named = torch.Tensor._make_subclass(Named, lt.as_plain(lt.lock(torch.arange(6.0))))
    assert type(named[1:]) is lt.LockedTensor and named[1:].tolist() == [1, 2, 3, 4, 5]
    assert type(named.narrow(0, 1, 2)) is lt.LockedTensor
