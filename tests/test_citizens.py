"""LockedTensors in the company of modules, optimizers, processes, transforms and other subclasses."""

import subprocess
import sys

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.two_tensor import TwoTensor

import locked_tensor as lt

OPTIMIZERS = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
}
# Not compared step by step, each with the reason.
OTHER_OPTIMIZERS = {"SparseAdam": "takes sparse gradients only", "LBFGS": "takes a closure: below"}


def locked(*sizes, dtype=torch.float32):
    return lt.lock(torch.arange(torch.Size(sizes).numel()).reshape(sizes).to(dtype))


def locked_linear(inputs, outputs):
    module = torch.nn.Linear(inputs, outputs)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(lt.lock(parameter.detach())))
    return module


# --- files --------------------------------------------------------------------------------------


def test_a_saved_file_loads_where_this_package_is_not(tmp_path):
    path = tmp_path / "file"
    module = locked_linear(2, 3)
    torch.save({"tensor": locked(4), "view": locked(2, 6).t()[1:], "state": module.state_dict()}, path)
    program = (
        "import sys; sys.modules['locked_tensor'] = None\n"
        "import torch\n"
        f"loaded = torch.load({str(path)!r}, weights_only=True)\n"
        "sys.stdout.write(f\"{loaded['tensor'].tolist()} {tuple(loaded['view'].shape)} {type(loaded['tensor'])}\")"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0] (5, 2) <class 'torch.Tensor'>"
    with lt.locked_memory():
        loaded = torch.load(path, weights_only=True)
    assert loaded["tensor"].is_locked() and type(loaded["view"]) is lt.LockedTensor
    assert torch.equal(loaded["view"], locked(2, 6).t()[1:])
    assert all(lt.is_locked(each) for each in loaded["state"].values())


def test_a_storages_buffer_is_the_locked_memory():
    tensor = locked(3, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    assert bytes(storage) == b"\x00\x01\x02" and storage.nbytes() == 3
    storage[1] = 9
    assert tensor.tolist() == [0, 9, 2]


# --- modules and optimizers ---------------------------------------------------------------------


def test_modules_keep_locked_parameters_and_buffers():
    module = locked_linear(3, 2)
    module.register_buffer("scale", locked(2) + 0)
    module.register_buffer("offset", locked(2))
    state = module.state_dict()
    assert type(state["weight"]) is lt.LockedTensor and state["offset"].is_locked()
    assert not lt.is_locked(state["scale"])
    other = torch.nn.Linear(3, 2)
    other.load_state_dict({"weight": state["weight"], "bias": state["bias"]}, assign=True)
    assert lt.is_locked(other.weight) and other.weight.data_ptr() == module.weight.data_ptr()
    assert torch.equal(other(torch.ones(1, 3)), torch.nn.functional.linear(torch.ones(1, 3), other.weight, other.bias))
    module.to(torch.float32)
    assert lt.is_locked(module.weight)
    for convert, dtype in ((module.half, torch.half), (module.double, torch.double), (module.bfloat16, torch.bfloat16)):
        convert()
        assert module.weight.dtype == dtype and module.offset.tolist() == [0, 1]
        assert not lt.is_locked(module.weight)  # in memory of its own


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - set(OTHER_OPTIMIZERS)))
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_steps_as_on_plain_parameters(name):
    def steps(make):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(make(torch.rand(4, 3))), torch.nn.Parameter(make(torch.rand(5, 5)))]
        optimizer = OPTIMIZERS[name](parameters, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            sum((parameter**2).sum() for parameter in parameters).backward()
            optimizer.step()
        return parameters

    for ours, plain in zip(steps(lt.lock), steps(torch.clone)):
        assert lt.is_locked(ours)
        torch.testing.assert_close(lt.as_plain(ours), plain, rtol=1e-5, atol=1e-6)


def test_lbfgs_steps_as_on_a_plain_parameter():
    def run(make):
        parameter = torch.nn.Parameter(make(torch.full((3,), 4.0)))
        optimizer = torch.optim.LBFGS([parameter])

        def closure():
            optimizer.zero_grad()
            loss = ((parameter - 1) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return parameter

    ours = run(lt.lock)
    assert lt.is_locked(ours)
    torch.testing.assert_close(lt.as_plain(ours), run(torch.clone))


def test_hooks_run_and_gradients_accumulate():
    leaf = locked(3).requires_grad_()
    seen = []
    leaf.register_hook(lambda grad: seen.append(grad.clone()))
    leaf.register_post_accumulate_grad_hook(lambda each: seen.append(each))
    (leaf * 2).sum().backward()
    (leaf * 2).sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 2.0)) and seen[1] is leaf
    assert leaf.grad.tolist() == [4, 4, 4]
    with lt.locked_memory():
        gradient = torch.zeros(3)
    other = locked(3).requires_grad_()
    other.grad = gradient
    other.sum().backward()
    assert other.grad is gradient and gradient.is_locked() and gradient.tolist() == [1, 1, 1]


# --- transforms ---------------------------------------------------------------------------------


def test_functional_call_vmap_and_jvp_take_locked_parameters():
    module = locked_linear(3, 2)
    inputs = torch.rand(5, 3)
    parameters = dict(module.named_parameters())
    plain = {name: lt.as_plain(each).detach().clone() for name, each in parameters.items()}

    def loss(values):
        return torch.func.functional_call(module, values, (inputs,)).square().sum()

    ours, expected = torch.func.grad(loss)(parameters), torch.func.grad(loss)(plain)
    assert all(torch.equal(ours[name], expected[name]) for name in plain)
    value, tangent = torch.func.jvp(torch.sin, (locked(4),), (torch.ones(4),))
    assert torch.equal(tangent, torch.arange(4.0).cos()) and torch.equal(value, torch.arange(4.0).sin())
    stacked = lt.lock(torch.rand(4, 2, 3))
    mapped = torch.func.vmap(torch.func.functional_call, (None, {"weight": 0, "bias": None}, None))
    outputs = mapped(module, {"weight": stacked, "bias": plain["bias"]}, (inputs,))
    assert outputs.shape == (4, 5, 2)
    torch.testing.assert_close(outputs[1], torch.nn.functional.linear(inputs, stacked[1], plain["bias"]))


GRADIENTS = ("add", "mul", "matmul", "bmm", "softmax", "nn.functional.layer_norm", "nn.functional.linear", "sum",
             "index_select", "gather", "cat", "narrow", "transpose", "unfold", "split", "nn.functional.gelu", "cumsum",
             "linalg.solve", "nn.functional.conv2d", "where", "logsumexp", "nn.functional.embedding", "prod", "t")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_as_plain(name):
    op = next(each for each in op_db if each.name == name and not each.variant_test_name)

    def gradients(sample, make):
        tree_map = torch.utils._pytree.tree_map_only
        made = []

        def leaf(tensor):
            copy = make(tensor.detach())
            if tensor.requires_grad:
                made.append(copy.requires_grad_())
            return copy

        sample.input, sample.args, sample.kwargs = (
            tree_map(torch.Tensor, leaf, each) for each in (sample.input, sample.args, sample.kwargs)
        )
        results = torch.utils._pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
        sum(each.sum() for each in results if each.requires_grad).backward()
        return [each.grad for each in made]

    samples = zip(*(op.sample_inputs("cpu", torch.float64, requires_grad=True) for _ in range(2)))
    for _, (ours, plain) in zip(range(5), samples):
        ours, plain = gradients(ours, lt.lock), gradients(plain, torch.clone)
        assert len(ours) == len(plain) > 0
        for found, expected in zip(ours, plain):
            torch.testing.assert_close(found, expected)


# --- processes ----------------------------------------------------------------------------------


def _double(queue, answers):
    tensor = queue.get()
    tensor.mul_(2)
    answers.put((type(tensor).__name__, lt.is_locked(tensor), tensor.sum().item()))


@pytest.mark.slow
def test_what_goes_to_another_process_is_shared_and_says_the_truth():
    tensor = locked(4)
    view = tensor[1:]
    tensor.share_memory_()
    assert tensor.is_shared() and not tensor.is_locked() and not lt.is_locked(view)
    assert tensor.tolist() == [0, 1, 2, 3] and "not locked" in repr(tensor)
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=_double, args=(queue, answers))
    child.start()
    queue.put(tensor)
    assert answers.get(timeout=100) == ("Tensor", False, 12.0)
    child.join(100)
    assert tensor.tolist() == [0, 2, 4, 6]


# --- other subclasses ---------------------------------------------------------------------------


def test_swapped_tensors_change_places():
    ours, plain = locked(3), torch.zeros(3)
    torch.utils.swap_tensors(ours, plain)
    assert type(plain) is lt.LockedTensor and plain.is_locked() and plain.tolist() == [0, 1, 2]
    assert type(ours) is torch.Tensor and ours.tolist() == [0, 0, 0]


def test_a_torch_function_subclass_in_the_same_call_decides():
    class Counting(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs)

    other = torch.ones(3).as_subclass(Counting)
    for total in (locked(3) + other, other + locked(3)):
        assert total.tolist() == [1, 2, 3] and type(total) is Counting
    assert Counting.calls >= 2


def test_a_wrapper_of_locked_tensors_computes_on_them():
    pair = TwoTensor(locked(4), locked(4) + 1)
    view = pair[1:]
    assert type(view) is TwoTensor and type(view.a) is lt.LockedTensor and view.a.is_locked()
    assert (pair * 2).a.tolist() == [0, 2, 4, 6] and (pair * 2).b.tolist() == [2, 4, 6, 8]


def test_a_wrapper_without_bytes_in_the_same_call_is_asked_and_never_read():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.inner = inner
            return made

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            unwrapped = [each.inner if isinstance(each, Wrapper) else each for each in args]
            return func(*unwrapped, **(kwargs or {}))

    for total in (locked(3) + Wrapper(torch.ones(3)), Wrapper(torch.ones(3)) + locked(3)):
        assert type(total) is torch.Tensor and total.tolist() == [1, 2, 3]


def test_an_operator_of_ones_own_is_called_and_its_views_tagged():
    with torch.library._scoped_library("locked_tensor_test", "DEF") as library:
        library.define("halves(Tensor(a) t, int at=1, *, str name='x') -> Tensor(a)[]")
        library.define("same(Tensor t) -> Tensor")
        library.define("named(Dict(str, int) sizes, Tensor t) -> (Tensor, int)")
        library.impl("halves", lambda t, at=1, name="x": [t[:at], t[at:]], "CompositeExplicitAutograd")
        library.impl("same", lambda t: t.view(-1), "CPU")
        library.impl("named", lambda sizes, t: (t + sizes["a"], 3), "CPU")
        first, second = torch.ops.locked_tensor_test.halves(locked(4), 3, name="y")
        assert first.is_locked() and second.tolist() == [3] and type(second) is lt.LockedTensor
        assert torch.ops.locked_tensor_test.same(locked(2, 2)).is_locked()
        total, number = torch.ops.locked_tensor_test.named({"a": 2}, locked(2))
        assert total.tolist() == [2, 3] and number == 3 and type(total) is torch.Tensor


@pytest.mark.parametrize("number", [2, 2.5, True, 1 + 2j])
def test_numbers_where_the_schema_says_tensor(number):
    tensor, plain = locked(3), torch.arange(3.0)
    for operator in (torch.add, torch.mul, torch.pow, torch.eq):
        result, expected = operator(tensor, number), operator(plain, number)
        assert torch.equal(result, expected) and result.dtype == expected.dtype
    result, expected = torch.where(tensor > 1, number, tensor), torch.where(plain > 1, number, plain)
    assert torch.equal(result, expected) and result.dtype == expected.dtype


def test_higher_order_operators_pass_through_the_context():
    with lt.locked_memory():
        (sine,) = torch.ops.higher_order.cond(True, lambda x: (x.sin(),), lambda x: (x.cos(),), (torch.arange(3.0),))
    assert sine.is_locked() and torch.equal(sine, torch.arange(3.0).sin())


def test_dispatch_called_by_hand_says_what_is_wrong():
    dispatch = lt.LockedTensor.__torch_dispatch__
    tensor = locked(4)
    assert dispatch(torch.ops.aten.view.default, (lt.LockedTensor,), (tensor, [2, 2])).is_locked()
    assert dispatch(func=torch.ops.aten.neg.default, types=(), args=(tensor,), kwargs={}).tolist() == [0, -1, -2, -3]
    assert dispatch(torch.ops.aten.neg.default, (TwoTensor,), (tensor,)) is NotImplemented
    with pytest.raises(TypeError, match="__torch_dispatch__"):
        dispatch(torch.ops.aten.neg.default)
    with pytest.raises(TypeError, match="unexpected argument 'other'"):
        dispatch(torch.ops.aten.neg.default, (), other=1)
    with pytest.raises(RuntimeError, match="missing value for argument"):
        dispatch(torch.ops.aten.neg.default, (), ())
    with pytest.raises(RuntimeError, match="size of tensor a"):
        locked(3) + locked(4)
