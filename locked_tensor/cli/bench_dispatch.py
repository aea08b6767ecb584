"""`locked-tensor bench dispatch`: what a LockedTensor costs beside a plain tensor and the smallest Python subclass.

One thread, and its CPU time: other processes do not count.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, Iterator, Optional

import torch

import locked_tensor as lt
from locked_tensor.cli.bench import Figure, add_output_options, add_rounds_option, show
from locked_tensor.cli.measure import interleaved

Works = dict[str, Callable[[], object]]
Call = Callable[[torch.Tensor], object]
CALLS = 500  # of one measurement

# By the method a user calls: short cuts of the class count.
METHODS: dict[str, Call] = {
    "narrow": lambda t: t.narrow(0, 1, 3),
    "view": lambda t: t.view(-1),
    "t[3:11]": lambda t: t[3:11],
    "t[3]": lambda t: t[3],
    "t[1, 2:5]": lambda t: t[1, 2:5],
    "select": lambda t: t.select(0, 2),
    "transpose": lambda t: t.transpose(0, 1),
    "chunk": lambda t: t.chunk(4),
    "split": lambda t: t.split(4),
    "unbind": lambda t: t.unbind(),
}
# By torch's own method: every call goes through dispatch.
VIEWS: dict[str, Call] = {
    "transpose": lambda t: torch.Tensor.transpose(t, 0, 1),
    "select": lambda t: torch.Tensor.select(t, 0, 2),
    "narrow": lambda t: torch.Tensor.narrow(t, 0, 1, 3),
    "view": lambda t: torch.Tensor.view(t, -1),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "detach": lambda t: t.detach(),
    "permute": lambda t: t.permute(1, 0),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t.squeeze(),
    "expand": lambda t: t.expand(2, 16, 16),
    "as_strided": lambda t: t.as_strided((4, 4), (1, 16)),
    "diagonal": lambda t: t.diagonal(),
    "t": lambda t: t.t(),
    "view(dtype)": lambda t: t.view(torch.int32),
}
LISTS: dict[str, Call] = {
    "chunk": lambda t: torch.Tensor.chunk(t, 4),
    "split": lambda t: torch._VF.split(t, 4, 0),  # type: ignore[attr-defined]
    "unbind": lambda t: torch.Tensor.unbind(t),
}


class SmallestSubclass(torch.Tensor):
    """The least Python that makes a subclass whose views are of its class: what ours is measured against."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Optional[dict[str, Any]] = None) -> Any:  # type: ignore[override]
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs or {})
        if not func.is_view:
            return result
        if type(result) is torch.Tensor:
            return torch.Tensor._make_subclass(cls, result)
        return [torch.Tensor._make_subclass(cls, each) for each in result]


class AnswersNothing(torch.Tensor):
    """Computes nothing and returns one same tensor: what is left is torch's own way to a subclass and back."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    answer = torch.empty(0)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Optional[dict[str, Any]] = None) -> Any:  # type: ignore[override]
        return cls.answer


def add_parser(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = groups.add_parser("dispatch", help="operators on locked tensors, one thread", description=__doc__)
    add_output_options(parser)
    add_rounds_option(parser, 21)
    parser.set_defaults(run=lambda chosen: show("bench dispatch", figures(chosen.rounds), chosen.json, chosen.plot))


def figures(rounds: int) -> list[Figure]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = list(_operators("", METHODS, rounds))
        found += _operators(" through dispatch", VIEWS, rounds)
        found += _operators(" through dispatch", LISTS, rounds)
        found += _floor(rounds)
        found += _operators("", {"torch.add of two small tensors": lambda t: torch.add(t, t)}, rounds)
        found += _add_to_plain(rounds)
        found += _training_step(rounds)
        found += _empty_in_the_context(rounds)
    finally:
        torch.set_num_threads(threads)
    return found


def _three_tensors() -> dict[str, torch.Tensor]:
    plain = torch.arange(256, dtype=torch.float32).reshape(16, 16)
    return {
        "plain": plain,
        "ours": lt.lock(plain),
        "smallest": torch.Tensor._make_subclass(SmallestSubclass, plain.clone()),
    }


def _repeated(call: Callable[..., object], *arguments: Any) -> Callable[[], None]:
    def work() -> None:
        for _ in range(CALLS):
            call(*arguments)

    return work


def _compared(what: str, works: Works, rounds: int) -> Iterator[Figure]:
    costs = interleaved(works, rounds)
    ours = costs["ours"].cpu
    yield Figure(what, ours / CALLS * 1e6, "us")
    yield Figure(f"{what}, ours / the smallest Python subclass", ours / costs["smallest"].cpu, "x")
    yield Figure(f"{what}, ours / plain", ours / costs["plain"].cpu, "x")


def _operators(how: str, calls: dict[str, Call], rounds: int) -> Iterator[Figure]:
    tensors = _three_tensors()
    for name, call in calls.items():
        works: Works = {kind: _repeated(call, tensor) for kind, tensor in tensors.items()}
        yield from _compared(name + how, works, rounds)


def _floor(rounds: int) -> Iterator[Figure]:
    tensors = _three_tensors()
    del tensors["smallest"]
    tensors["floor"] = torch.Tensor._make_subclass(AnswersNothing, tensors["plain"].clone())
    works: Works = {kind: _repeated(torch.neg, tensor) for kind, tensor in tensors.items()}
    costs = interleaved(works, rounds)
    plain, ours, floor = (costs[kind].cpu / CALLS * 1e6 for kind in ("plain", "ours", "floor"))
    yield Figure("torch.neg, plain", plain, "us")
    yield Figure("torch.neg, torch's way to a subclass and back, nothing computed", floor, "us")
    yield Figure("torch.neg, ours beyond both", ours - floor - plain, "us")


def _add_to_plain(rounds: int) -> Iterator[Figure]:
    other = torch.ones(16, 16)
    works: Works = {kind: _repeated(torch.add, tensor, other) for kind, tensor in _three_tensors().items()}
    yield from _compared("torch.add of two small tensors, one locked", works, rounds)


def _training_step(rounds: int) -> Iterator[Figure]:
    def step_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(4):
            layers += [torch.nn.Linear(512, 512), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers)
        for layer in layers[::2]:
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, torch.nn.Parameter(make(parameter.detach())))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(256, 512)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    costs = interleaved({"plain": step_of(torch.clone), "ours": step_of(lt.lock)}, rounds)
    yield Figure("a training step, 4 layers of 512, batch 256", costs["ours"].cpu * 1e3, "ms")
    yield Figure(
        "a training step, parameters locked / plain", costs["ours"].cpu / costs["plain"].cpu, "x"
    )


def _empty_in_the_context(rounds: int) -> Iterator[Figure]:
    def inside() -> None:
        with lt.locked_memory():
            _repeated(torch.empty, 16)()

    costs = interleaved({"outside": _repeated(torch.empty, 16), "inside": inside}, rounds)
    microseconds = {name: cost.cpu / CALLS * 1e6 for name, cost in costs.items()}
    yield Figure("torch.empty(16) inside the context", microseconds["inside"], "us")
    yield Figure(
        "torch.empty(16) inside the context, over outside", microseconds["inside"] - microseconds["outside"], "us"
    )
