"""LockedTensor: which results are tagged, and that it is a tensor to everything that takes one."""

import copy
import gc
import io
import pickle
import weakref

import numpy
import pytest
import torch
from expecttest import assert_expected_inline
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import locked_tensor as lt


def locked(*sizes, dtype=torch.float32):
    with lt.locked_memory():
        return torch.arange(max(1, torch.Size(sizes).numel())).reshape(sizes).to(dtype).clone()


def ordinary(tensor):
    return lt.as_plain(tensor).detach().clone()


VIEWS = {
    "narrow": lambda t: t.narrow(0, 1, 3),
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(2, -1),
    "transpose": lambda t: t.transpose(0, 1),
    "T": lambda t: t.T,
    "permute": lambda t: t.permute(1, 0),
    "slice": lambda t: t[1:3],
    "steps": lambda t: t[::2, 1:],
    "index": lambda t: t[2],
    "select": lambda t: t.select(1, 2),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "expand": lambda t: t[0:1].expand(5, -1),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "squeeze": lambda t: t.unsqueeze(0).squeeze(0),
    "diagonal": lambda t: t.diagonal(),
    "view as bytes": lambda t: t.view(torch.uint8),
    "as_strided": lambda t: t.as_strided((2, 2), (1, 2)),
    "contiguous": lambda t: t.contiguous(),
    "to itself": lambda t: t.to("cpu"),
    "alias": lambda t: torch.ops.aten.alias(t),
    "empty slice": lambda t: t[1:1],
    "in place": lambda t: t.add_(1),
    "out": lambda t: torch.add(t, 1, out=t),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "view_as_real": lambda t: torch.view_as_real(t.view(torch.complex64)),
}
LISTS = {
    "chunk": lambda t: t.chunk(2),
    "split": lambda t: t.split(2),
    "unbind": lambda t: t.unbind(),
    "tensor_split": lambda t: t.tensor_split(3),
    "hsplit": lambda t: t.hsplit(2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_tagged_and_equal(name):
    tensor = locked(4, 6)
    plain = ordinary(tensor)
    view, expected = VIEWS[name](tensor), VIEWS[name](plain)
    assert type(view) is lt.LockedTensor and view.is_locked()
    assert torch.equal(view, expected) and view.stride() == expected.stride()
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    with lt.aio_handle() as handle:
        assert handle.is_pinned(view)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_views_is_tagged(name):
    tensor = locked(4, 6)
    views, expected = LISTS[name](tensor), LISTS[name](ordinary(tensor))
    assert type(views) is type(expected) and len(views) == len(expected)
    for view, each in zip(views, expected):
        assert type(view) is lt.LockedTensor and view.is_locked() and torch.equal(view, each)


@pytest.mark.parametrize(
    "make",
    [lambda t: t + 1, lambda t: t.clone(), lambda t: torch.cat([t, t]), lambda t: t.sum(),
     lambda t: t.double(), lambda t: torch.empty_like(t), lambda t: t @ t.T, lambda t: t.new_zeros(3)],
)
def test_results_in_their_own_memory_are_plain_outside(make):
    result = make(locked(4, 6))
    assert type(result) is torch.Tensor and not lt.is_locked(result)


def test_the_last_byte_is_inside_and_one_past_the_end_is_not():
    tensor = locked(4096, dtype=torch.uint8)
    base = lt.as_plain(tensor)
    assert lt.is_locked(base[4095:]) and lt.is_locked(tensor[4095:])
    assert lt.is_locked(base[4096:])  # an empty view of locked memory


def test_views_keep_memory_alive_and_the_last_one_gives_it_back():
    gc.collect()
    before = lt.memory_allocated()
    tensor = locked(1000)
    view = tensor[10:20]
    array = tensor.numpy()
    del tensor
    assert lt.memory_allocated() > before and view[0] == 10 and array[5] == 5
    del view, array
    gc.collect()
    assert lt.memory_allocated() == before


# --- citizenship --------------------------------------------------------------------------------


def test_deepcopy_has_its_own_memory_keeps_sharing_and_flags():
    tensor = locked(10)
    strided = locked(4, 6).T
    leaf = locked(3).requires_grad_()
    parameter = torch.nn.Parameter(locked(5))
    for original in (tensor, strided, leaf, parameter):
        duplicate = copy.deepcopy(original)
        assert torch.equal(duplicate, original) and duplicate.data_ptr() != original.data_ptr()
        assert duplicate.requires_grad == original.requires_grad and duplicate.stride() == original.stride()
        assert isinstance(duplicate, torch.nn.Parameter) == isinstance(original, torch.nn.Parameter)
        assert not lt.is_locked(duplicate)
    with lt.locked_memory():
        duplicate = copy.deepcopy(tensor)  # torch clones the storage, which is not ATen's allocation
    assert torch.equal(duplicate, tensor)
    assert (type(duplicate) is lt.LockedTensor) == lt.is_locked(duplicate)
    both = copy.deepcopy([tensor, tensor])
    assert both[0] is both[1]
    base, part = copy.deepcopy([tensor, tensor[2:]])
    part[0] = 99
    assert base[2] == 99
    assert copy.copy(tensor).data_ptr() == tensor.data_ptr()


def test_saved_files_hold_ordinary_tensors(tmp_path):
    tensor = locked(100)
    torch.save({"t": tensor, "p": torch.nn.Parameter(locked(3))}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert type(loaded["t"]) is torch.Tensor and torch.equal(loaded["t"], tensor)
    assert type(loaded["p"]) is torch.nn.Parameter
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
    module = torch.nn.Linear(3, 3)
    module.weight = torch.nn.Parameter(locked(3, 3))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["weight"], module.weight)


def test_numpy_lists_items_and_text():
    tensor = locked(2, 3)
    assert tensor.numpy().ctypes.data == tensor.data_ptr()
    assert numpy.asarray(tensor).tolist() == [[0, 1, 2], [3, 4, 5]] == tensor.tolist()
    assert tensor[1, 2].item() == 5 and float(tensor[1, 2]) == 5 and bool(tensor[0, 1])
    assert [row.tolist() for row in tensor] == tensor.tolist()
    assert f"{tensor[1, 2]:.1f}" == "5.0"
    assert_expected_inline(repr(tensor), """\
tensor([[0., 1., 2.],
        [3., 4., 5.]], locked)""")
    tensor.set_(torch.zeros(1))
    assert_expected_inline(str(tensor), """tensor([0.], not locked)""")
    assert hash(tensor) == id(tensor) and weakref.ref(tensor)() is tensor
    assert len(locked(4)) == 4 and locked(4)[2:2].tolist() == []


def test_dlpack_both_ways_keeps_address_and_lock():
    tensor = locked(100)
    back = torch.from_dlpack(tensor)
    assert back.data_ptr() == tensor.data_ptr() and lt.is_locked(back)
    assert numpy.from_dlpack(lt.as_plain(tensor)).ctypes.data == tensor.data_ptr()
    again = torch.from_numpy(tensor.numpy())
    assert type(again) is torch.Tensor and lt.is_locked(again)


def test_modules_optimizers_and_backward_are_as_plain():
    def train(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        for name, parameter in list(model.named_parameters()):
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(make(parameter.detach())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
        return model

    plain, ours = train(torch.clone), train(lt.lock)
    for name, parameter in ours.named_parameters():
        assert lt.is_locked(parameter) and isinstance(parameter, torch.nn.Parameter)
        assert torch.equal(parameter, plain.get_parameter(name))
    state = {name: value.clone() * 2 for name, value in plain.state_dict().items()}
    addresses = [p.data_ptr() for p in ours.parameters()]
    ours.load_state_dict(state)
    assert addresses == [p.data_ptr() for p in ours.parameters()]
    assert torch.equal(ours.get_parameter("0.weight"), state["0.weight"])
    for converted in (copy.deepcopy(ours).double(), copy.deepcopy(ours).half(), copy.deepcopy(ours).cpu()):
        assert converted.get_parameter("0.weight").shape == (8, 8)


def test_views_share_the_version_counter():
    tensor = locked(4).requires_grad_()
    product = tensor * 2
    with torch.no_grad():
        assert tensor.mul_(2) is tensor and tensor.is_locked()
    leaf = locked(4).requires_grad_()
    squared = (leaf * 1).view(-1).sin_()
    squared.sum().backward()
    assert torch.allclose(leaf.grad, torch.cos(lt.as_plain(leaf).detach()))
    saved = (locked(4).requires_grad_() * 2).exp()
    result = saved.sum()
    saved.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    del product


def test_another_mode_sees_every_operator_once():
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensor = locked(4, 4)
    with Log():
        view = tensor.detach().view(-1)[2:5]
        view + 1
    assert type(view) is lt.LockedTensor
    assert_expected_inline(
        "\n".join(seen),
        """\
aten.detach.default
aten.view.default
aten.slice.Tensor
aten.add.Tensor""",
    )


def test_data_loaders_give_values_back():
    items = [locked(4, dtype=torch.int16) + i for i in range(4)]
    for workers in (0, 2):
        loader = DataLoader(items, num_workers=workers, collate_fn=lambda batch: batch)
        loaded = [batch[0] for batch in loader]
        assert all(each.dtype == torch.int16 for each in loaded)
        assert all(torch.equal(each, item) for each, item in zip(loaded, items))
        assert not any(lt.is_locked(each) for each in loaded)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64])
def test_dtypes_and_odd_shapes(dtype):
    with lt.locked_memory():
        tensor = torch.zeros(3, 4).to(dtype)
        scalar = torch.tensor(1.0).to(dtype)
        last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert tensor.is_locked() and scalar.is_locked() and last.is_locked()
    assert scalar.dim() == 0 and type(scalar.view(1)) is lt.LockedTensor
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_inference_mode_judges_by_address():
    tensor = locked(4, 6)
    with torch.inference_mode():
        assert tensor.reshape(-1).is_locked() and type(tensor.contiguous()) is lt.LockedTensor
        assert not lt.is_locked(tensor.T.contiguous())
        assert not lt.is_locked(tensor.to(torch.float64))


def test_functional_transforms_and_checkpointing():
    tensor = locked(5)
    plain = ordinary(tensor)
    assert torch.equal(torch.func.grad(lambda x: x.square().sum())(tensor), 2 * plain)
    assert torch.equal(torch.func.vmap(lambda x: x * 2)(tensor), 2 * plain)
    leaf = locked(5).requires_grad_()
    torch.utils.checkpoint.checkpoint(lambda x: x.sin().sum(), leaf, use_reentrant=False).backward()
    assert torch.equal(leaf.grad, plain.cos())


def test_as_plain_is_plain_on_the_same_bytes():
    tensor = locked(5)
    plain = lt.as_plain(tensor)
    assert type(plain) is torch.Tensor and plain.data_ptr() == tensor.data_ptr() and lt.is_locked(plain)
    assert type(plain[1:]) is torch.Tensor
    assert lt.as_plain(plain) is plain
    assert lt.as_plain(locked(2).requires_grad_()).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_have_no_break_and_equal_eager(backend):
    def compiled(function):
        return torch.compile(function, fullgraph=True, backend=backend)

    tensor = locked(8, 8)
    plain = ordinary(tensor)
    computed = compiled(lambda x: (3 * x.t()).contiguous().sum(0))(tensor)
    assert type(computed) is torch.Tensor and torch.equal(computed, (3 * plain.t()).sum(0))
    view = compiled(lambda x: x.view(-1)[2:5])(tensor)
    assert type(view) is lt.LockedTensor and view.is_locked() and torch.equal(view, plain.view(-1)[2:5])
    assert torch.equal(compiled(lambda x: x.view(-1) * 2)(tensor[2:4]), plain[2:4].view(-1) * 2)

    def change(x):
        x.add_(1)
        return x * 2

    doubled = compiled(change)(tensor)
    assert tensor.is_locked() and torch.equal(tensor, plain + 1) and torch.equal(doubled, (plain + 1) * 2)
    module = torch.nn.Linear(8, 8)
    module.weight = torch.nn.Parameter(locked(8, 8))
    inputs = torch.ones(2, 8)
    compiled_module = torch.compile(module, fullgraph=True, backend=backend)
    compiled_module(inputs).sum().backward()
    gradient = module.weight.grad.clone()
    module.weight.grad = None
    module(inputs).sum().backward()
    assert torch.equal(gradient, module.weight.grad)


def test_fake_tensors_and_export_touch_no_storage():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = locked(4, 4)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(tensor)
        assert (fake + 1).shape == (4, 4) and not lt.is_locked(fake)
    module = torch.nn.Linear(4, 4)
    module.weight = torch.nn.Parameter(locked(4, 4))
    exported = torch.export.export(module, (torch.ones(2, 4),))
    assert torch.equal(exported.module()(torch.ones(2, 4)), module(torch.ones(2, 4)))


def test_is_view_and_base_are_torchs():
    tensor = locked(4, 6)
    view = tensor[1:]
    plain_view = ordinary(tensor)[1:]
    assert view._is_view() == plain_view._is_view()
    assert (view._base is None) == (plain_view._base is None)


def test_operators_that_conjugate_inside_are_right_on_and_under():
    matrix = torch.randn(5, 5, dtype=torch.complex64)
    expected = torch.linalg.pinv(matrix)
    torch.testing.assert_close(torch.linalg.pinv(lt.lock(matrix)), expected)
    with lt.locked_memory():
        torch.testing.assert_close(lt.as_plain(torch.linalg.pinv(matrix)), expected)
