"""save_on_disk: the same gradients, with what backward needs on disk."""

import contextlib
import gc
import os

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import locked_tensor as lt
from locked_tensor.swap import save_on_disk


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


def model_and_batch():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(64) for _ in range(4)))
    return model, torch.randn(8, 32, 64, requires_grad=True)


def gradients(run):
    model, batch = model_and_batch()
    run(model, batch).square().mean().backward()
    return [batch.grad, *(param.grad for param in model.parameters())]


def save(folder, **options):
    return save_on_disk(folder, min_bytes=4096, max_locked_bytes=5 << 16, **options)


def test_gradients_are_the_same_bits(folder):
    expected = gradients(lambda model, batch: model(batch))
    kept = [save(folder)]

    def run(model, batch):
        with kept[0]:
            return model(batch)

    found = gradients(run)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected))
    moved = kept.pop().stats()
    assert moved.bytes_written > 8 * 32 * 64 * 4 * 20  # twenty activations of this shape at least
    assert moved.bytes_read > 0
    gc.collect()
    assert os.listdir(folder) == []


def test_files_go_with_the_graph_when_there_is_no_backward(disk_folder):
    model, batch = model_and_batch()
    with save(disk_folder):
        out = model(batch)
    assert len(os.listdir(disk_folder)) == 1
    del out
    gc.collect()
    assert os.listdir(disk_folder) == []


def test_an_exception_inside_leaves_no_file(disk_folder):
    model, batch = model_and_batch()
    with pytest.raises(ZeroDivisionError):
        with save(disk_folder):
            model(batch)
            raise ZeroDivisionError
    gc.collect()
    assert os.listdir(disk_folder) == []


def test_a_graph_may_be_used_twice(disk_folder):
    x = torch.randn(300, 300, requires_grad=True)
    with save(disk_folder):
        y = (x.exp() * 2).sin().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad((x.exp() * 2).sin().sum(), x)[0])


def test_what_two_nodes_save_is_written_once(disk_folder):
    x = torch.randn(100, 100, requires_grad=True)
    with save(disk_folder) as saved:
        y = x.exp()
        z = y * y + y.sin()
    assert saved.stats().bytes_written == 10 * 4096  # 40,000 bytes: exp saves y, and so do mul, mul, sin
    z.sum().backward()
    plain = x.detach().requires_grad_()
    y = plain.exp()
    (y * y + y.sin()).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_parameters_their_views_and_small_tensors_stay(disk_folder):
    layer = torch.nn.Linear(200, 200)
    x = torch.randn(2, 200, requires_grad=True)
    with save(disk_folder) as saved:
        layer(x).sum().backward()
    assert saved.stats().bytes_written == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.view(torch.complex64).conj(),
        lambda x: x.view(10, 10, 10, 10).to(memory_format=torch.channels_last),
        lambda x: x[:1].expand(100, 100),
        lambda x: x.bfloat16(),
    ],
)
def test_strides_and_dtypes_come_back(disk_folder, make):
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x.abs().sum().real.float()

        @staticmethod
        def backward(context, gradient):
            seen.append(context.saved_tensors[0])
            return None

    source = torch.randn(100, 100)
    tensor = make(source)
    with save(disk_folder):
        out = Probe.apply(tensor) * torch.ones((), requires_grad=True)
        through = Probe.apply(tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_())
    through.backward()
    del out
    assert seen[0].dtype == tensor.dtype and torch.equal(seen[0], tensor)
    assert seen[0].stride() == tensor.detach().clone(memory_format=torch.preserve_format).stride()


def test_a_tensor_changed_after_it_was_saved_comes_back_as_it_was(disk_folder):
    x = torch.randn(100, 100, requires_grad=True)
    with save(disk_folder):
        y = x.exp()
        expected = y.detach().clone()
        z = y.sum()
        with torch.no_grad():
            y.data.zero_()
    z.backward()
    assert torch.equal(x.grad, expected)


def test_checkpoints_and_compiled_models_work(disk_folder):
    expected = gradients(lambda model, batch: model(batch))

    def checkpointed(model, batch):
        with save(disk_folder):
            for block in model:
                batch = checkpoint(block, batch, use_reentrant=False)
            return batch

    def compiled(model, batch):
        with save(disk_folder):
            return torch.compile(model, backend="aot_eager")(batch)

    assert all(torch.equal(mine, other) for mine, other in zip(gradients(checkpointed), expected))
    for mine, other in zip(gradients(compiled), expected):
        torch.testing.assert_close(mine, other)


def test_locked_memory_stays_within_its_bound(disk_folder):
    lt.empty_cache()
    before = lt.memlock_limit().locked
    worst = []

    def run(model, batch):
        with save_on_disk(disk_folder, min_bytes=4096, max_locked_bytes=20 << 20):
            out = model(batch)
            worst.append(lt.memlock_limit().locked)
            return out

    gradients(run)
    assert 0 < max(worst) - before <= 20 << 20
    with pytest.raises(ValueError, match="max_locked_bytes must be at least"):
        save_on_disk(disk_folder, max_locked_bytes=4096)


def test_a_graph_that_is_not_used_whole_leaves_nothing(disk_folder):
    x = torch.randn(100, 100, requires_grad=True)
    gc.disable()
    try:
        with save(disk_folder) as saved:
            y = x.exp()
            small = y[0, :3].tanh()  # stays in memory, saved by the node that made it
        del saved
        y.sum().backward()
        del y, small
        assert os.listdir(disk_folder) == []
    finally:
        gc.enable()


def test_a_kept_tensor_that_was_changed_is_refused_as_by_torch(disk_folder):
    x = torch.randn(10, requires_grad=True)
    with save(disk_folder):
        y = x.exp()
        z = y.sum()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


class Saving(torch.autograd.Function):
    """Saves a tensor of any kind for backward, which finds it."""

    found: list[torch.Tensor] = []

    @staticmethod
    def forward(ctx, x, other):
        ctx.save_for_backward(other)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Saving.found.append(ctx.saved_tensors[0])
        return gradient * 2, None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(4000), 0.1, 0, torch.qint8),
        lambda: torch.eye(3000).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2000), torch.ones(3000)], layout=torch.jagged),
        lambda: torch.ones(4000, device="meta"),
        lambda: TwoTensor(torch.ones(4000), torch.ones(4000)),
    ],
    ids=["quantized", "sparse", "jagged", "meta", "wrapper"],
)
def test_tensors_without_bytes_to_move_stay_as_they_are(disk_folder, make):
    Saving.found.clear()
    kept = make()
    x = torch.ones(3, requires_grad=True)
    with save_on_disk(disk_folder, min_bytes=1024) as saved:
        result = Saving.apply(x, kept)
    result.sum().backward()
    (found,) = Saving.found
    assert type(found) is type(kept) and (found.dtype, found.layout) == (kept.dtype, kept.layout)
    assert saved.stats().bytes_written == 0 and torch.equal(x.grad, torch.full((3,), 2.0))
    if kept.is_quantized:
        assert torch.equal(found.int_repr(), kept.int_repr())


def test_a_tensor_and_its_lazy_conjugate_are_told_apart(disk_folder):
    gradients = []
    for is_on_disk in (False, True):
        torch.manual_seed(0)
        x = torch.randn(4000, dtype=torch.complex64, requires_grad=True)
        y = x * (2 + 1j)
        with save_on_disk(disk_folder, min_bytes=1024) if is_on_disk else contextlib.nullcontext():
            product = (y * y.conj()).real.sum() + (y.conj() * 3j * y * y).real.sum()
        product.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
