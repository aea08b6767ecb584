"""SwappedParameters: a module larger than its budget, with the results of the module in memory."""

import concurrent.futures
import copy
import errno
import functools
import gc
import os
import time

import pytest
import torch

import locked_tensor as lt
from locked_tensor.swap import SwappedOptimizer, SwappedParameters, save_on_disk
from locked_tensor.swap.saved import hooks_around


def transformer(layers=24):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.05)
    return model


LAYER_BYTES = sum(param.nbytes for param in transformer(1).parameters())
BATCH = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))


def swap(model, folder, **options):
    return SwappedParameters(model, folder=folder, **{"max_locked_bytes": 3 * LAYER_BYTES, **options})


def same(mine, theirs):
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("on_disk", [False, True])
def test_training_a_model_of_24_layers_within_three_gives_the_same_bits(disk_folder, on_disk):
    plain, model = transformer(), transformer()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01)
    if on_disk:
        optimizer = SwappedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.01, folder=disk_folder, max_locked_bytes=9 << 16, min_bytes=1
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    calls = []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append(1))
    with swap(model, disk_folder) as swapped:
        for _ in range(3):
            results = []
            for each in (plain, model):
                results.append(each(BATCH))
                results[-1].square().mean().backward()
            assert torch.equal(*results)
            assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
            expected.step()
            swapped.step(optimizer)
            for each in (expected, optimizer):
                each.zero_grad()
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert same(state.values(), plain.state_dict().values())
        assert len(calls) == 3
        assert swapped.stats().bytes_read > 2 * swapped.nbytes
    if on_disk:
        optimizer.close()
    assert os.listdir(disk_folder) == []


def test_inference_reads_ahead_and_keeps_what_fits(disk_folder):
    plain, model = transformer().eval(), transformer().eval()
    with swap(model, disk_folder) as swapped, torch.no_grad():
        for _ in range(3):
            before = swapped.stats().bytes_read
            assert torch.equal(model(BATCH), plain(BATCH))
        read = swapped.stats().bytes_read - before
        assert read < swapped.nbytes  # the budget's worth stays from pass to pass
        assert read > swapped.nbytes - 3 * LAYER_BYTES - 1


def test_locked_memory_stays_within_the_budget(disk_folder):
    budget = 24 * LAYER_BYTES
    model = transformer(60)
    lt.empty_cache()
    before = lt.memlock_limit().locked
    worst = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *arguments: worst.append(lt.memlock_limit().locked))
    with swap(model, disk_folder, max_locked_bytes=budget):
        model(BATCH).sum().backward()
    lt.empty_cache()
    assert 0 < max(worst) - before <= budget
    assert lt.memlock_limit().locked == before


def test_elsewhere_a_parameter_is_nan_and_cannot_be_written(disk_folder):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    params = list(model.parameters())
    with swap(model, disk_folder, max_locked_bytes=3 * 20480):
        assert all(bool(param.isnan().all()) for param in params[:2])
        assert params[0].shape == (64, 64)
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            params[0].add_(1)


def test_parameters_are_gathered_to_be_read_and_changed(disk_folder):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    expected = copy.deepcopy(model)
    with swap(model, disk_folder, max_locked_bytes=4 * 20480) as swapped:
        weight = model._modules["0"]._parameters.get("weight")
        with swapped.gather(weight), torch.no_grad():
            assert torch.equal(weight, expected[0].weight)
            weight.mul_(2)
        assert torch.equal(model(BATCH), expected_after(expected)(BATCH))
        with pytest.raises(ValueError, match="not swapped by this object"):
            swapped.gather(torch.zeros(3))
        assert torch.equal(model[5].weight, expected[5].weight)  # asked of the module by name


def expected_after(model):
    with torch.no_grad():
        model[0].weight.mul_(2)
    return model


def test_tied_frozen_integer_and_zero_size_tensors(disk_folder):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(100, 64)
            self.middle = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.BatchNorm1d(64))
            self.head = torch.nn.Linear(64, 100, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("positions", torch.arange(100))
            self.nothing = torch.nn.Parameter(torch.zeros(0))
            self.middle[0].weight.requires_grad_(False)

        def forward(self, tokens):
            return self.head(self.middle(self.embedding(tokens + self.positions[:10])))

    plain, model = Tied(), Tied()
    tokens = torch.arange(10)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    with swap(model, disk_folder, max_locked_bytes=3 * 28672) as swapped:
        for _ in range(2):
            assert torch.equal(model(tokens), plain(tokens))
            for each in (plain, model):
                each(tokens).square().mean().backward()
            optimizers[0].step()
            swapped.step(optimizers[1])
        assert same(model.state_dict().values(), plain.state_dict().values())  # running statistics too
        assert int(model.state_dict()["middle.4.num_batches_tracked"]) == 4


def test_state_dicts_go_both_ways_and_restore_brings_back(disk_folder, tmp_path):
    model, other = transformer(6), transformer(6)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.25)
    with swap(model, disk_folder) as swapped:
        model.load_state_dict(other.state_dict())
        torch.save(model.state_dict(), tmp_path / "model")
        assert same(torch.load(tmp_path / "model").values(), other.state_dict().values())
        with pytest.raises(ValueError, match="assign"):
            model.load_state_dict(other.state_dict(), assign=True)
        with pytest.raises(TypeError, match="restore"):
            copy.deepcopy(model)
        swapped.restore()
    assert os.listdir(disk_folder) == []
    assert same(model.parameters(), other.parameters())
    assert torch.equal(model(BATCH), other(BATCH))
    assert type(model._parameters) is dict
    copy.deepcopy(model)


def test_an_exception_in_forward_leaves_it_usable(disk_folder):
    plain, model = transformer(6), transformer(6)
    failing = [True]

    def fail(*arguments):
        if failing[0]:
            raise ZeroDivisionError

    model.layers[3].register_forward_hook(fail)
    with swap(model, disk_folder) as swapped:
        with pytest.raises(ZeroDivisionError):
            model(BATCH)
        failing[0] = False
        assert all(not unit.uses for unit in swapped._parts.units)
        assert torch.equal(model(BATCH), plain(BATCH))


def test_what_cannot_be_is_refused_and_changes_nothing(disk_folder, tmp_path):
    model = transformer(2)
    expected = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"max_locked_bytes must be at least [\d,]+, got"):
        swap(model, disk_folder, max_locked_bytes=8192)
    with pytest.raises(FileNotFoundError):
        swap(model, disk_folder / "missing")
    with pytest.raises(ValueError, match="weight must be a strided CPU tensor .*on meta"):
        swap(torch.nn.Linear(3, 3, device="meta"), disk_folder)
    with_buffer = torch.nn.Linear(3, 3)
    with_buffer.register_buffer("scales", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    for refused, told in ((with_buffer, "scales .*quantized"), (torch.nn.LazyLinear(3), "weight .*not known yet")):
        with pytest.raises(ValueError, match=told):
            swap(refused, disk_folder)
    assert same(model.parameters(), expected.parameters())
    assert os.listdir(disk_folder) == []


def test_after_close_every_use_says_so(disk_folder):
    model, other = linears(3), linears(3)
    swapped = swap(model, disk_folder)
    swapped.close()
    x = torch.ones(1, 100)
    for use in (
        swapped.gather,
        lambda: model(x),
        lambda: model[1](x),
        lambda: model[0].weight,
        model.state_dict,
        lambda: model.load_state_dict(other.state_dict()),
        lambda: model.load_state_dict(other.state_dict(), assign=True),
        lambda: swapped.step(torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with pytest.raises(ValueError, match="are closed and the module's parameters are gone"):
            use()


def test_compiled_and_checkpointed_forward(disk_folder):
    plain, model = transformer(6), transformer(6)
    with swap(model, disk_folder):
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(BATCH), plain(BATCH))
        for each in (model, plain):
            each.zero_grad()
            x = BATCH.clone().requires_grad_()
            for layer in each.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            x.square().mean().backward()
        for mine, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.grad, other.grad)


def test_dropping_it_without_closing_leaves_no_file_and_no_descriptor(disk_folder):
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        swap(torch.nn.Linear(64, 64), disk_folder, max_locked_bytes=1 << 20)
        gc.collect()
    assert os.listdir(disk_folder) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def linears(count):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(count)))


LINEAR_BYTES = 11 * 4096


def test_a_disk_too_small_leaves_the_parameters_as_they_were(small_disk):
    model, expected = linears(40), linears(40)
    with pytest.raises(OSError) as refused:
        swap(model, small_disk, max_locked_bytes=4 * LINEAR_BYTES)
    assert refused.value.errno == 28
    assert same(model.parameters(), expected.parameters())
    assert os.listdir(small_disk) == []


def test_a_change_whose_write_failed_is_kept(disk_folder, files_of_at_most):
    model = linears(10)
    weight = model[0].weight
    with swap(model, disk_folder, max_locked_bytes=3 * LINEAR_BYTES) as swapped:
        with swapped.gather(weight), torch.no_grad():
            weight.fill_(5)
        with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
            for _ in range(2):
                model(torch.ones(1, 100))
        with swapped.gather(weight):
            assert bool((weight == 5).all())
        model(torch.ones(1, 100))
        assert bool((model.state_dict()["0.weight"] == 5).all())


class AsksByName(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = linears(5)

    def forward(self, x):
        first, second = self.layers[0].weight, self.layers[1].weight
        x = self.layers[4](self.layers[3](x @ first))
        return x @ second @ first


@torch.no_grad()
def test_what_a_module_asked_for_by_name_stays_while_it_runs(disk_folder):
    plain, model = AsksByName(), AsksByName()
    x = torch.ones(1, 100)
    with swap(model, disk_folder, max_locked_bytes=3 * LINEAR_BYTES):
        for _ in range(5):
            assert torch.equal(model(x), plain(x))


def test_activations_go_to_disk_too(disk_folder):
    plain, model = transformer(6), transformer(6)
    plain(BATCH).square().mean().backward()
    with swap(model, disk_folder):
        with save_on_disk(disk_folder, min_bytes=4096, max_locked_bytes=5 << 16) as saved:
            loss = model(BATCH).square().mean()
        loss.backward()
        assert saved.stats().bytes_written > 6 * 10 * BATCH.nbytes
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_parameter_changed_between_forward_and_backward_is_refused_as_by_torch(disk_folder):
    model = transformer(6)
    with swap(model, disk_folder) as swapped:
        loss = model(BATCH).square().mean()
        weight = model.layers[2].linear1._parameters.get("weight")
        with swapped.gather(weight), torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@torch.no_grad()
def test_a_call_interrupted_anywhere_leaves_the_right_bytes_and_all_the_room(disk_folder, is_interrupted):
    plain, model = linears(8), linears(8)
    x = torch.ones(1, 100)
    expected = plain(x)
    swapped = swap(model, disk_folder, max_locked_bytes=3 * LINEAR_BYTES)
    model(x)
    began = time.perf_counter()
    model(x)
    length = time.perf_counter() - began
    interrupted = 0
    for step in range(300):
        interrupted += is_interrupted(lambda: model(x), 1e-6 + length * step / 300)
        assert torch.equal(model(x), expected)
    assert interrupted > 0
    assert hooks_around() is None
    swapped.restore()
    assert same(model.parameters(), plain.parameters())


def test_ctrl_c_in_training_leaves_no_hooks_behind(disk_folder):
    plain, model = transformer(4), transformer(4)
    failing = [True]

    def interrupt(*arguments):
        if failing[0]:
            raise KeyboardInterrupt

    model.layers[2].register_forward_hook(interrupt)
    with swap(model, disk_folder):
        around = hooks_around()
        with pytest.raises(KeyboardInterrupt):
            model(BATCH)
        assert hooks_around() == around
        failing[0] = False
        for each in (plain, model):
            each(BATCH).square().mean().backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@torch.no_grad()
def test_threads_share_a_budget_that_one_of_them_would_fill(disk_folder):
    plain, model = linears(12), linears(12)
    x = torch.ones(1, 100)
    expected = plain(x)
    with swap(model, disk_folder, max_locked_bytes=3 * LINEAR_BYTES):
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda _: model(x), range(40)))
    assert all(torch.equal(result, expected) for result in results)


def test_a_module_is_swapped_once(disk_folder):
    model, expected = linears(4), linears(4)
    with swap(model[:2], disk_folder, max_locked_bytes=3 * LINEAR_BYTES) as inner:
        for again in (model, model[0], model[:2]):
            with pytest.raises(ValueError, match="has SwappedParameters already: restore"):
                swap(again, disk_folder, max_locked_bytes=3 * LINEAR_BYTES)
        inner.restore()
    with swap(model, disk_folder, max_locked_bytes=3 * LINEAR_BYTES) as swapped:
        swapped.restore()
    assert same(model.parameters(), expected.parameters())


def test_a_forward_set_on_the_module_itself_is_its_own_again(disk_folder):
    model = linears(2)
    own = model.forward
    model.forward = lambda x: own(x) + 1
    expected = linears(2)(torch.ones(1, 100)) + 1
    mine = model.forward
    with swap(model, disk_folder, max_locked_bytes=3 * LINEAR_BYTES) as swapped:
        assert torch.equal(model(torch.ones(1, 100)), expected)
        swapped.restore()
    assert model.forward is mine
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_step_that_ends_early_names_all_that_is_not_updated(disk_folder, on_disk):
    model, before = linears(4), list(linears(4).parameters())
    params = list(model.parameters())
    kind = functools.partial(SwappedOptimizer, optimizer_class=torch.optim.SGD, folder=disk_folder, min_bytes=1)
    optimizer = (kind if on_disk else torch.optim.SGD)(params, lr=0.5, momentum=0.9)
    with swap(model, disk_folder, max_locked_bytes=3 * LINEAR_BYTES) as swapped:
        for param in params:
            param.grad = torch.ones(param.shape)
        third = swapped._parts.unit_of[params[4]]
        bring = swapped._cache._bring

        def fail(unit):
            if unit is third:
                raise OSError(errno.EIO, "no luck")
            bring(unit)

        swapped._cache._bring = fail
        with pytest.raises(OSError, match="no luck") as ended:
            swapped.step(optimizer)
        swapped._cache._bring = bring
        assert [id(param) for param in ended.value.not_updated] == [id(param) for param in params[4:]]
        swapped.restore()
    for index, (mine, old) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(mine, old - 0.5 if index < 4 else old)
    if on_disk:
        optimizer.close()
