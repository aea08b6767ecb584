"""Golden logs of ten typical programs: what dispatch sees, and what comes back locked.

One line an operator; "(locked)" after each argument and result that is a LockedTensor.
"""

import pytest
import torch
from expecttest import assert_expected_inline
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import locked_tensor as lt


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.lines.append(f"{func}({marks((args, kwargs))}) -> {marks(results)}")
        return results

    def text(self):
        return "\n".join(self.lines)


def marks(values):
    """Each tensor in turn: locked or plain; a claim that the registry denies shows."""
    found = []
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor):
            is_tagged = type(each) is lt.LockedTensor
            found.append(("locked" if is_tagged else "plain") + ("" if is_tagged == lt.is_locked(each) else "?!"))
    return ", ".join(found)


@pytest.fixture
def ones():
    return lt.lock(torch.ones(4, 4))


def test_a_pool_that_is_cut_and_filled(ones):
    with Log() as log:
        pool = ones.view(-1)
        first, second = pool.split([4, 12])
        first.fill_(7)
        second.view(3, 4)[1:].copy_(torch.zeros(2, 4))
        pool.narrow(0, 0, 2).detach()
    assert ones[0].tolist() == [7, 7, 7, 7] and ones[2].tolist() == [0, 0, 0, 0]
    assert_expected_inline(log.text(), """\
aten.view.default(locked) -> locked
aten.split_with_sizes.default(locked) -> locked, locked
aten.fill_.Scalar(locked) -> locked
aten.view.default(locked) -> locked
aten.slice.Tensor(locked) -> locked
aten.zeros.default() -> plain
aten.copy_.default(locked, plain) -> locked
aten.slice.Tensor(locked) -> locked
aten.detach.default(locked) -> locked""")


def test_a_training_step_of_a_locked_layer(ones):
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(ones)
    with Log() as log:
        layer(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0] * 4] * 4
    assert_expected_inline(log.text(), """\
aten.ones.default() -> plain
aten.t.default(locked) -> locked
aten.mm.default(plain, locked) -> plain
aten.sum.default(plain) -> plain
aten.ones_like.default(plain) -> plain
aten.expand.default(plain) -> plain
aten.t.default(plain) -> plain
aten.mm.default(plain, plain) -> plain
aten.t.default(plain) -> plain
aten.t.default(plain) -> plain
aten.detach.default(plain) -> plain""")


def test_an_optimizer_step(ones):
    parameter = torch.nn.Parameter(ones)
    parameter.grad = torch.ones(4, 4)
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.5)
    with Log() as log:
        optimizer.step()
    assert parameter.is_locked() and parameter[0, 0] == 0.5
    assert_expected_inline(log.text(), """\
profiler._record_function_enter_new.default() -> 
aten.detach.default(plain) -> plain
aten.clone.default(plain) -> plain
aten.add_.Tensor(locked, plain) -> locked
profiler._record_function_exit._RecordFunction() -> """)


def test_a_block_of_keys_and_values(ones):
    with Log() as log:
        ones[1, 2:] = torch.full((2,), 5.0)
        gathered = ones.index_select(0, torch.tensor([1, 0]))
        joined = torch.cat([ones[:1], ones[2:]])
    assert gathered[0].tolist() == [1, 1, 5, 5] and joined.shape == (3, 4)
    assert_expected_inline(log.text(), """\
aten.full.default() -> plain
aten.select.int(locked) -> locked
aten.slice.Tensor(locked) -> locked
aten.copy_.default(locked, plain) -> locked
aten.lift_fresh.default(plain) -> plain
aten.index_select.default(locked, plain) -> plain
aten.slice.Tensor(locked) -> locked
aten.slice.Tensor(locked) -> locked
aten.cat.default(locked, locked) -> plain""")


def test_loading_a_state_dict(ones):
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(ones)
    with Log() as log:
        layer.load_state_dict({"weight": torch.full((4, 4), 3.0)})
        layer.state_dict()
    assert lt.is_locked(layer.weight) and layer.weight[0, 0] == 3
    assert_expected_inline(log.text(), """\
aten.full.default() -> plain
aten.copy_.default(locked, plain) -> locked
aten.detach.default(locked) -> locked""")


def test_attention(ones):
    with Log() as log:
        query = ones.view(1, 1, 4, 4)
        result = torch.softmax(query @ query.transpose(-2, -1), dim=-1) @ query
    torch.testing.assert_close(result, torch.ones(1, 1, 4, 4))
    assert_expected_inline(log.text(), """\
aten.view.default(locked) -> locked
aten.transpose.int(locked) -> locked
aten.expand.default(locked) -> locked
aten.view.default(locked) -> locked
aten.expand.default(locked) -> locked
aten.view.default(locked) -> locked
aten.bmm.default(locked, locked) -> plain
aten._unsafe_view.default(plain) -> plain
aten._softmax.default(plain) -> plain
aten.expand.default(plain) -> plain
aten.view.default(plain) -> plain
aten.expand.default(locked) -> locked
aten.view.default(locked) -> locked
aten.bmm.default(plain, locked) -> plain
aten._unsafe_view.default(plain) -> plain""")


def test_other_dtypes_and_shapes(ones):
    with Log() as log:
        ones.to(torch.float32).contiguous().reshape(2, 8)
        ones.double()
        ones.view(torch.int32).t().reshape(-1)
        torch.view_as_complex(ones.view(4, 2, 2)).conj()
    assert_expected_inline(log.text(), """\
aten.view.default(locked) -> locked
aten._to_copy.default(locked) -> plain
aten.view.dtype(locked) -> locked
aten.detach.default(locked) -> locked
aten.t.default(locked) -> locked
aten.clone.default(locked) -> plain
aten._unsafe_view.default(plain) -> plain
aten.view.default(locked) -> locked
aten.view_as_complex.default(locked) -> locked
aten._conj.default(locked) -> locked""")


def test_clipping_and_scaling_in_place(ones):
    with Log() as log:
        ones.mul_(torch.clamp(1.0 / torch.linalg.vector_norm(ones), max=1.0))
        torch.add(ones, 1, out=ones)
        torch.add(ones, 1, out=torch.empty(4, 4))
    assert_expected_inline(log.text(), """\
aten.linalg_vector_norm.default(locked) -> plain
aten.reciprocal.default(plain) -> plain
aten.mul.Tensor(plain) -> plain
aten.clamp.default(plain) -> plain
aten.mul_.Tensor(locked, plain) -> locked
aten.add.out(locked, locked) -> locked
aten.empty.memory_format() -> plain
aten.add.out(locked, plain) -> plain""")


def test_growing(ones):
    address = ones.data_ptr()
    with Log() as log:
        ones.resize_(64, 64).zero_()
        ones.new_empty(3)
        torch.empty_like(ones)
    assert ones.is_locked() and ones.data_ptr() != address
    assert_expected_inline(log.text(), """\
aten.resize_.default(locked) -> locked
aten.zero_.default(locked) -> locked
aten.new_empty.default(locked) -> plain
aten.empty_like.default(locked) -> plain""")


def test_inside_the_context(ones):
    plain = torch.ones(4)
    with lt.locked_memory(), Log() as log:
        torch.empty_like(plain)
        (torch.tensor([1.0]) + 1).clone()
        plain[1:]
        ones + plain
        ones.new_zeros(3)[1:]
    assert_expected_inline(log.text(), """\
aten.empty_like.default(plain) -> locked
aten.lift_fresh.default(plain?!) -> locked
aten.add.Tensor(locked) -> locked
aten.clone.default(locked) -> locked
aten.slice.Tensor(plain) -> plain
aten.add.Tensor(locked, plain) -> locked
aten.new_zeros.default(locked) -> locked
aten.slice.Tensor(locked) -> locked""")
