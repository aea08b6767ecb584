"""SwappedOptimizer: the same bits as the class it wraps, with its state on disk."""

import contextlib
import copy
import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import locked_tensor as lt
from locked_tensor.swap import SwappedOptimizer, SwappedParameters

BUDGET = 9 << 16  # nine buffers of 64 KiB, the smallest: AdamW's are cut at 8,192 floats

ELEMENTWISE = {
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "ASGD": {"t0": 2},
}
WHOLE = {"Adafactor": {}, "Muon": {}}


def locked_bytes() -> int:
    lt.empty_cache()
    return lt.memlock_limit().locked


def parameters(dtype=torch.float32, name="Adam"):
    torch.manual_seed(0)
    only_matrices = name == "Muon"
    shapes = [(130, 130), (64, 7), (2, 3)] if only_matrices else [(150, 150), (64, 7), (5,), (), (1,)]
    if name in ELEMENTWISE:
        shapes.append((0,))
    made = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    if not only_matrices:
        made.append(torch.nn.Parameter(torch.randn(8, 16, 20, 20).to(dtype, memory_format=torch.channels_last)))
    return made


def set_gradients(params, step):
    torch.manual_seed(100 + step)
    for param in params:
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape))


def assert_same_state(expected, found):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            other = found["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.shape) == (other.dtype, other.shape), key
                assert torch.equal(value, other), (index, key)
            else:
                assert value == other


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_five_steps_give_the_bits_of_the_class(disk_folder, name, dtype, foreach, pipeline):
    options = {**ELEMENTWISE, **WHOLE}[name]
    if name != "Muon":
        options = {**options, "foreach": foreach}
    cls = getattr(torch.optim, name)
    ours, theirs = parameters(dtype, name), parameters(dtype, name)
    plain = cls(theirs, lr=0.01, **options)
    with SwappedOptimizer(
        ours,
        cls,
        lr=0.01,
        folder=disk_folder,
        max_locked_bytes=BUDGET,
        min_bytes=1024,
        pipeline=pipeline,
        **options,
    ) as swapped:
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (plain, swapped)]
        for step in range(5):
            for params, optimizer in ((theirs, plain), (ours, swapped)):
                set_gradients(params, step)
                optimizer.step()
            for schedule in schedules:
                schedule.step()
        for mine, other in zip(ours, theirs):
            assert torch.equal(mine, other)
        assert_same_state(plain.state_dict(), swapped.state_dict())
        moved = swapped.stats()
        assert moved.steps == 5 and moved.bytes_written > moved.bytes_read > 0
        assert len(swapped.state) == 0
    assert os.listdir(disk_folder) == []


def same_state(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], value) for key, value in theirs.items())


def make(params, folder, cls=torch.optim.AdamW, **options):
    options = {"max_locked_bytes": BUDGET, "min_bytes": 1024, **options}
    return SwappedOptimizer(params, cls, folder=folder, **options)


def train(params, optimizer, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def test_what_torch_exports_is_supported_or_refused_by_name(disk_folder):
    names = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    assert names == {*ELEMENTWISE, *WHOLE, "SparseAdam", "LBFGS"}
    with pytest.raises(ValueError, match="LBFGS cannot be swapped: its state is a history"):
        make(parameters(), disk_folder, torch.optim.LBFGS)
    with pytest.raises(ValueError, match="must be a torch.optim.Optimizer"):
        make(parameters(), disk_folder, torch.nn.Linear)
    with pytest.raises(ValueError, match="differentiable"):
        make(parameters(), disk_folder, differentiable=True)
    with pytest.raises(ValueError, match="max_locked_bytes must be at least"):
        make(parameters(), disk_folder, max_locked_bytes=4096)
    with pytest.raises(FileNotFoundError):
        make(parameters(), disk_folder / "missing")
    assert os.listdir(disk_folder) == []


def test_sparse_adam_steps_to_the_same_bits(disk_folder):
    embeddings = []
    for _ in range(2):
        torch.manual_seed(0)
        embeddings.append(torch.nn.Embedding(3000, 16, sparse=True))
    plain = torch.optim.SparseAdam(embeddings[0].parameters())
    with make(embeddings[1].parameters(), disk_folder, torch.optim.SparseAdam) as swapped:
        for step in range(3):
            for embedding, optimizer in zip(embeddings, (plain, swapped)):
                optimizer.zero_grad()
                embedding(torch.arange(step, 50 + step)).square().sum().backward()
                optimizer.step()
        assert torch.equal(embeddings[0].weight, embeddings[1].weight)
        assert_same_state(plain.state_dict(), swapped.state_dict())
        assert swapped.stats().bytes_read > 0


def test_a_sparse_gradient_where_the_class_takes_none_changes_nothing(disk_folder):
    embedding = torch.nn.Embedding(3000, 16, sparse=True)
    before = embedding.weight.detach().clone()
    with make(embedding.parameters(), disk_folder) as swapped:
        embedding(torch.arange(3)).sum().backward()
        with pytest.raises(RuntimeError, match="AdamW does not take sparse gradients"):
            swapped.step()
    assert torch.equal(embedding.weight, before)


def test_state_dicts_go_both_ways(disk_folder, tmp_path):
    ours, theirs = parameters(), parameters()
    plain = torch.optim.AdamW(theirs, amsgrad=True)
    train(theirs, plain, range(2))
    with make(ours, disk_folder, amsgrad=True) as swapped:
        with torch.no_grad():
            for mine, other in zip(ours, theirs):
                mine.copy_(other)
        swapped.load_state_dict(plain.state_dict())
        assert_same_state(plain.state_dict(), swapped.state_dict())
        train(ours, swapped, range(2, 4))
        train(theirs, plain, range(2, 4))
        torch.save(swapped.state_dict(), tmp_path / "state.pt")
    again = torch.optim.AdamW(ours, amsgrad=True)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_state(plain.state_dict(), again.state_dict())
    train(ours, again, [4])
    train(theirs, plain, [4])
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs))


def test_a_run_resumed_in_a_new_process_gives_the_same_bits(disk_folder, tmp_path):
    script = """
        import sys, torch
        sys.path.insert(0, "tests")
        from test_swap_optimizer import make, parameters, train
        folder, path = sys.argv[1:3]
        saved = torch.load(path, weights_only=True)
        params = parameters()
        with torch.no_grad():
            for param, value in zip(params, saved["params"]):
                param.copy_(value)
        with make(params, folder) as swapped:
            swapped.load_state_dict(saved["optimizer"])
            train(params, swapped, range(2, 5))
        torch.save(params, path)
    """
    ours, theirs = parameters(), parameters()
    train(theirs, torch.optim.AdamW(theirs), range(5))
    path = tmp_path / "checkpoint"
    with make(ours, disk_folder) as swapped:
        train(ours, swapped, range(2))
        torch.save({"params": ours, "optimizer": swapped.state_dict()}, path)
    command = [sys.executable, "-c", textwrap.dedent(script), str(disk_folder), str(path)]
    subprocess.run(command, check=True, timeout=120)
    resumed = torch.load(path, weights_only=True)
    assert all(torch.equal(mine, other) for mine, other in zip(resumed, theirs))


def test_state_is_got_and_set_for_one_parameter(disk_folder):
    params = parameters()
    with make(params, disk_folder) as swapped:
        assert swapped.get_state(params[0]) == {}
        train(params, swapped, range(1))
        state = swapped.get_state(params[0])
        assert state["step"] == 1 and state["exp_avg"].shape == (150, 150)
        state["exp_avg"].fill_(0.5)
        swapped.set_state(params[0], state)
        assert torch.equal(swapped.get_state(params[0])["exp_avg"], torch.full((150, 150), 0.5))
        assert torch.equal(swapped.get_state(params[0])["exp_avg_sq"], state["exp_avg_sq"])
        with pytest.raises(ValueError, match="not a parameter of this optimizer"):
            swapped.set_state(torch.zeros(3), {})


def test_parameters_without_a_gradient_cause_no_io_and_keep_their_state(disk_folder):
    params = parameters()
    with make(params, disk_folder) as swapped:
        train(params, swapped, range(1))
        before = swapped.get_state(params[0])
        for param in params:
            param.grad = None
        params[2].grad = torch.ones_like(params[2])  # 5 elements: in memory
        moved = swapped.stats()
        swapped.step()
        assert swapped.stats()[1:3] == moved[1:3]
        assert all(torch.equal(value, before[key]) for key, value in swapped.get_state(params[0]).items())
        assert swapped.get_state(params[2])["step"] == 2


def test_groups_are_added_and_have_their_own_settings(disk_folder):
    ours, theirs = parameters(), parameters()
    plain = torch.optim.SGD(theirs[:1], lr=0.1, momentum=0.9)
    with make(ours[:1], disk_folder, torch.optim.SGD, lr=0.1, momentum=0.9) as swapped:
        for params, optimizer in ((ours, swapped), (theirs, plain)):
            train(params, optimizer, range(1))
            optimizer.add_param_group({"params": params[1:], "lr": 0.5, "momentum": 0.0})
            train(params, optimizer, range(1, 3))
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs))
        assert_same_state(plain.state_dict(), swapped.state_dict())


def test_closures_hooks_scaler_and_clipping_work_as_with_any_optimizer(disk_folder):
    models, losses = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3)))
    batch = torch.randn(16, 200)
    calls = []
    with make(models[1].named_parameters(), disk_folder, lr=0.01) as swapped:
        plain = torch.optim.AdamW(models[0].named_parameters(), lr=0.01)
        swapped.register_step_pre_hook(lambda *arguments: calls.append("before"))
        swapped.register_step_post_hook(lambda *arguments: calls.append("after"))
        for model, optimizer in zip(models, (plain, swapped)):
            scaler = torch.amp.GradScaler("cpu")
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(model(batch).square().mean()).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == losses[1]
        assert calls == ["before", "after"] * 3
        (group,) = swapped.state_dict()["param_groups"]
        assert group["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(torch.equal(mine, other) for mine, other in zip(*(model.parameters() for model in models)))


def test_close_is_final(disk_folder):
    params = parameters()
    swapped = make(params, disk_folder)
    train(params, swapped, range(1))
    kept = swapped.state_dict()["state"][0]["exp_avg"]
    expected = kept.clone()
    swapped.close()
    swapped.close()
    assert torch.equal(kept, expected)  # a map outlives its file
    for use in (swapped.step, swapped.state_dict, lambda: swapped.get_state(params[0])):
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(swapped)
    assert os.listdir(disk_folder) == []


def test_progress_is_reported(disk_folder):
    params, seen = parameters(), []
    with make(params, disk_folder, on_progress=lambda done, total: seen.append((done, total))) as swapped:
        train(params, swapped, range(1))
    total = len(seen)
    assert total > 5 and seen == [(done, total) for done in range(1, total + 1)]


def test_locked_memory_stays_within_the_budget_and_nothing_leaks(disk_folder):
    params = parameters()
    before = locked_bytes()
    descriptors = len(os.listdir("/proc/self/fd"))
    worst = 0

    def sample(done, total):
        nonlocal worst
        worst = max(worst, lt.memlock_limit().locked)

    budget = 20 << 20
    swapped = make(params, disk_folder, max_locked_bytes=budget, on_progress=sample)
    for step in range(200):
        train(params, swapped, [step])
        if step == 5:
            (private,) = os.listdir(disk_folder)
            size = os.path.getsize(disk_folder / private / "data")
            open_now = len(os.listdir("/proc/self/fd"))
    assert os.path.getsize(disk_folder / private / "data") == size
    assert len(os.listdir("/proc/self/fd")) == open_now
    assert 0 < worst - before <= budget
    swapped.close()
    assert locked_bytes() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(disk_folder) == []


def test_a_full_disk_leaves_everything_as_before_the_step(small_disk):
    params, expected = parameters(), parameters()
    with make(params, small_disk) as swapped:
        (small_disk / "ballast").write_bytes(bytes(700 << 10))
        set_gradients(params, 0)
        with pytest.raises(OSError, match="more bytes of swap space are needed, .* are free") as refused:
            swapped.step()
        assert refused.value.errno == 28 and refused.value.filename.endswith("/data")
        assert all(torch.equal(param, other) for param, other in zip(params, expected))
        assert all(swapped.get_state(param) == {} for param in params)
        (small_disk / "ballast").unlink()
        train(params, swapped, range(1))
        train(expected, torch.optim.AdamW(expected), range(1))
        assert all(torch.equal(param, other) for param, other in zip(params, expected))


def test_a_step_that_fails_in_the_middle_says_what_is_not_updated_and_loses_nothing(disk_folder):
    params, expected = parameters(), parameters()
    with make(params, disk_folder) as swapped:
        plain = torch.optim.AdamW(expected)
        train(params, swapped, range(1))
        train(expected, plain, range(1))
        (private,) = os.listdir(disk_folder)
        path = disk_folder / private / "data"
        lost = swapped.get_state(params[-1])  # the last on disk
        os.truncate(path, os.path.getsize(path) - 200_000)
        set_gradients(params, 1)
        with pytest.raises(lt.ShortReadError) as cut_short:
            swapped.step()
        not_updated = cut_short.value.not_updated
        assert any(param is params[-1] for param in not_updated)
        assert not any(param is params[0] for param in not_updated)
        os.truncate(path, os.path.getsize(path) + 200_000)
        swapped.set_state(params[-1], lost)
        train(expected, plain, range(1, 2))
        for param, other in zip(params[:1], expected):
            assert torch.equal(param, other)
            assert same_state(swapped.get_state(param), plain.state[other])


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_step_whose_writes_fail_keeps_their_state_in_memory_and_can_be_ended(disk_folder, files_of_at_most, pipeline):
    params, expected = parameters(), parameters()
    plain = torch.optim.AdamW(expected)
    with make(params, disk_folder, pipeline=pipeline) as swapped:
        train(params, swapped, range(1))
        train(expected, plain, range(1))
        (private,) = os.listdir(disk_folder)
        half = os.path.getsize(disk_folder / private / "data") // 2
        set_gradients(params, 1)
        with files_of_at_most(half), pytest.raises(OSError, match="File too large") as failed:
            swapped.step()
        not_updated = {id(param) for param in failed.value.not_updated}
        for param in params:
            if id(param) not in not_updated:
                param.grad = None
        swapped.step()
        train(params, swapped, range(2, 3))
        train(expected, plain, range(1, 3))
        in_half = {id(param) for param in failed.value.not_updated[:1]}  # cut, and failed between its pieces
        for param, other in zip(params, expected):
            if id(param) in in_half:
                continue
            assert torch.equal(param, other)
            assert same_state(swapped.get_state(param), plain.state[other])



def test_a_killed_process_leaves_a_folder_that_the_next_start_removes(disk_folder, tmp_path):
    script = """
        import os, signal, sys, torch
        sys.path.insert(0, "tests")
        from test_swap_optimizer import make, parameters, train
        params = parameters()

        def die(done, total):
            if swapped.stats().steps == 2 and done == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        swapped = make(params, sys.argv[1], on_progress=die)
        train(params, swapped, range(1))
        torch.save(swapped.state_dict(), sys.argv[2])
        train(params, swapped, range(1, 4))
    """
    path = tmp_path / "saved"
    command = [sys.executable, "-c", textwrap.dedent(script), str(disk_folder), str(path)]
    killed = subprocess.run(command, timeout=120)
    assert killed.returncode == -9
    assert len(os.listdir(disk_folder)) == 1
    params = parameters()
    with make(params, disk_folder) as swapped:
        assert len(os.listdir(disk_folder)) == 1  # its own: the other is gone
        swapped.load_state_dict(torch.load(path, weights_only=True))
        assert swapped.get_state(params[0])["step"] == 1
        with make(parameters(), disk_folder):
            assert len(os.listdir(disk_folder)) == 2  # a living one stays
    assert os.listdir(disk_folder) == []


def test_sharded_parameters_of_two_processes_train_to_the_same_bits(disk_folder):
    script = """
        import os, sys, torch, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        sys.path.insert(0, "tests")
        from test_swap_optimizer import make

        dist.init_process_group("gloo")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))

        def model():
            torch.manual_seed(0)
            made = torch.nn.Sequential(torch.nn.Linear(250, 333), torch.nn.ReLU(), torch.nn.Linear(333, 5))
            return fully_shard(made, mesh=mesh)

        models = [model(), model()]
        plain = torch.optim.AdamW(models[0].parameters())
        swapped = make(models[1].parameters(), sys.argv[1])
        for step in range(3):
            torch.manual_seed(10 * dist.get_rank() + step)
            batch = torch.randn(4, 250)
            for each, optimizer in zip(models, (plain, swapped)):
                optimizer.zero_grad()
                each(batch).square().mean().backward()
                optimizer.step()
        for mine, other in zip(models[1].parameters(), models[0].parameters()):
            assert torch.equal(mine.to_local(), other.to_local())
        expected, found = plain.state_dict(), swapped.state_dict()
        for index, state in expected["state"].items():
            for key, value in state.items():
                other = found["state"][index][key]
                assert type(other) is type(value), (key, type(other))
                local = value.to_local() if hasattr(value, "to_local") else value
                theirs = other.to_local() if hasattr(other, "to_local") else other
                assert torch.equal(local, theirs)
        swapped.load_state_dict(expected)
        dist.barrier()
        assert len(os.listdir(sys.argv[1])) == 2
        dist.barrier()
        swapped.close()
        dist.destroy_process_group()
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = disk_folder.parent / "sharded.py"
    path.write_text(textwrap.dedent(script))
    ran = subprocess.run([*command, str(path), str(disk_folder)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert os.listdir(disk_folder) == []


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_gradients_on_disk_add_up_and_step_to_the_same_bits(disk_folder, name):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(width, 150, bias=name != "Muon") for width in (150, 150, 150))
        models.append(torch.nn.Sequential(*layers))
    cls = getattr(torch.optim, name)
    plain = cls(models[0].parameters(), lr=0.01)
    with make(models[1].parameters(), disk_folder, cls, lr=0.01, swap_gradients=True) as swapped:
        for step in range(3):
            for model, optimizer in zip(models, (plain, swapped)):
                optimizer.zero_grad()
                for part in range(2):  # accumulated
                    torch.manual_seed(10 * step + part)
                    model(torch.randn(8, 150)).square().mean().backward()
                if optimizer is swapped:
                    assert all(layer.weight.grad is None for layer in model)
                    assert all(layer.bias is None or layer.bias.grad is not None for layer in model)  # small
                optimizer.step()
        for mine, other in zip(models[1].parameters(), models[0].parameters()):
            assert torch.equal(mine, other)
        before = models[1][0].weight.detach().clone()
        swapped.zero_grad()
        swapped.step()
        assert torch.equal(models[1][0].weight, before)
    models[1](torch.randn(8, 150)).sum().backward()
    assert models[1][0].weight.grad is not None  # closed: gradients stay again
    assert os.listdir(disk_folder) == []


def test_float64_with_three_states_and_gradients_on_disk_fits_the_smallest_budget(disk_folder):
    ours, theirs = (torch.nn.Parameter(torch.ones(150, 150, dtype=torch.float64)) for _ in range(2))
    plain = torch.optim.Adam([theirs], amsgrad=True)
    with make([ours], disk_folder, torch.optim.Adam, amsgrad=True, swap_gradients=True) as swapped:
        for param, optimizer in ((theirs, plain), (ours, swapped)):
            for _ in range(3):
                optimizer.zero_grad()
                param.square().sum().backward()
                optimizer.step()
        assert torch.equal(ours, theirs)
        assert_same_state(plain.state_dict(), swapped.state_dict())


def test_an_accumulated_gradient_whose_write_failed_is_not_forgotten(disk_folder, files_of_at_most):
    param = torch.nn.Parameter(torch.zeros(64, 1024))
    with make([param], disk_folder, torch.optim.SGD, swap_gradients=True) as swapped:
        param.sum().backward()
        swapped.step()
        swapped.zero_grad()
        with files_of_at_most(4096):
            param.sum().backward()
            with pytest.raises(OSError, match="File too large"):
                swapped.step()
            with pytest.raises(OSError, match="File too large"):  # still
                swapped.step()
        with pytest.raises(OSError, match="File too large"):
            param.sum().backward()  # nothing to add to
        swapped.zero_grad()
        param.sum().backward()
        swapped.step()
        assert torch.equal(param, torch.full_like(param, -0.002))


def test_dropping_it_without_closing_leaves_no_file_and_no_descriptor(disk_folder):
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        train(params := parameters(), make(params, disk_folder), range(1))
        gc.collect()
    assert os.listdir(disk_folder) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


@contextlib.contextmanager
def interrupted_at(line):
    """A KeyboardInterrupt before the so-many-th line of the swapped optimizer's own files, as ctrl-C may come."""
    seen = [0]

    def in_frame(frame, event, argument):
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                raise KeyboardInterrupt
        return in_frame

    def trace(frame, event, argument):
        return in_frame if "/locked_tensor/swap/optimizer" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def snapshot(params, swapped):
    return [(param.detach().clone(), copy.deepcopy(swapped.get_state(param))) for param in params]


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(value, expected[1][key]) for key, value in found[1].items())


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize(
    "dtype, options",
    [(torch.float32, {}), (torch.float32, {"swap_gradients": True}), (torch.bfloat16, {"master_weights": True})],
    ids=["plain", "swap_gradients", "master_weights"],
)
def test_an_interrupt_anywhere_names_what_is_not_as_before_the_step(disk_folder, dtype, options, pipeline):
    def prepared():
        params = parameters(dtype)
        swapped = make(params, disk_folder, pipeline=pipeline, **options)
        for step in range(2):
            swapped.zero_grad()
            torch.manual_seed(step)
            sum((param.float() * torch.randn(param.shape)).sum() for param in params).backward()
            if step == 0:
                swapped.step()
        return params, swapped

    params, swapped = prepared()
    with swapped:
        before = snapshot(params, swapped)
        with interrupted_at(0) as seen:
            swapped.step()
        after = snapshot(params, swapped)
    ends = set()
    for line in range(1, seen[0], max(seen[0] // 12, 1)):
        params, swapped = prepared()
        with swapped:
            with pytest.raises(KeyboardInterrupt) as ended, interrupted_at(line):
                swapped.step()
            not_updated = {id(each) for each in getattr(ended.value, "not_updated", params)}
            half_updated = {id(each) for each in getattr(ended.value, "half_updated", [])}
            assert half_updated <= not_updated
            for found, old, new, param in zip(snapshot(params, swapped), before, after, params):
                if id(param) not in half_updated:
                    assert_same(found, old if id(param) in not_updated else new)
            ends.add((len(not_updated), len(half_updated)))
            swapped.step()
    assert len(ends) > 1  # it came at different times


@pytest.mark.parametrize("pipeline", [True, False])
def test_what_on_progress_raises_comes_when_the_parameter_is_whole(disk_folder, pipeline):
    seen = []

    def stop(done, total):
        seen.append((done, total))
        raise ZeroDivisionError

    ours = [torch.nn.Parameter(torch.randn(60000)), torch.nn.Parameter(torch.randn(60000))]
    theirs = copy.deepcopy(ours)
    with make(ours, disk_folder, on_progress=stop, pipeline=pipeline) as swapped:
        set_gradients(ours, 0)
        with pytest.raises(ZeroDivisionError) as stopped:
            swapped.step()
        assert seen == [(1, seen[0][1])] and seen[0][1] > 4
        assert [param is ours[1] for param in stopped.value.not_updated] == [True]
        assert stopped.value.half_updated == [] and swapped.get_state(ours[1]) == {}
        plain = torch.optim.AdamW(theirs)
        set_gradients(theirs, 0)
        theirs[1].grad = None
        plain.step()
        assert same_state(swapped.get_state(ours[0]), plain.state[theirs[0]])
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_a_parameter_whose_own_arithmetic_fails_is_named_with_its_state_as_before(disk_folder, monkeypatch):
    ours = [torch.nn.Parameter(torch.randn(50, 50))]
    with make(ours, disk_folder) as swapped:
        set_gradients(ours, 0)
        swapped.step()
        (before,) = snapshot(ours, swapped)

        def fail(inner):
            inner.param_groups[0]["params"][0].mul_(2)
            next(iter(inner.state.values()))["step"].add_(1)
            raise MemoryError

        with monkeypatch.context() as patched, pytest.raises(MemoryError) as failed:
            patched.setattr("locked_tensor.swap.optimizer.step_without_hooks", fail)
            swapped.step()
        assert [param is ours[0] for param in failed.value.half_updated] == [True]
        assert_same((before[0] * 2, swapped.get_state(ours[0])), (ours[0].detach(), before[1]))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_is_refused_when_it_is_made(disk_folder):
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match="on_progress must be a function or None, got int"):
        make(params, disk_folder, on_progress=5)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for refused, told in (
        (quantized, "quantized tensor of torch.qint8"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.nn.UninitializedParameter(), "not known yet|uninitialized"),
    ):
        with pytest.raises(ValueError, match=told):
            make([params[0], refused], disk_folder)
        with make(params, disk_folder) as swapped:
            with pytest.raises(ValueError, match=told):
                swapped.add_param_group({"params": [refused]})
            assert len(swapped.param_groups) == 1
    assert os.listdir(disk_folder) == []


def test_statistics_outlive_close(disk_folder):
    params = [torch.nn.Parameter(torch.ones(5000))]
    with make(params, disk_folder) as swapped:
        set_gradients(params, 0)
        swapped.step()
        before = swapped.stats()
    assert swapped.stats() == before and before.steps == 1 and before.bytes_written > 0


def test_parameters_that_are_on_disk_themselves_name_the_step_to_call(disk_folder):
    module = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(4)])
    with SwappedParameters(module, folder=disk_folder, max_locked_bytes=1 << 19) as swapped:
        with make(module.parameters(), disk_folder) as optimizer:
            module(torch.ones(1, 200)).sum().backward()
            with pytest.raises(RuntimeError, match=r"call swapped.step\(optimizer\) in the place"):
                optimizer.step()
            swapped.step(optimizer)
            assert all(optimizer.get_state(param)["step"] == 1 for param in module.parameters())


def test_a_file_size_limit_is_told_as_such(disk_folder, files_of_at_most):
    params = [torch.nn.Parameter(torch.ones(1 << 20))]
    with make(params, disk_folder) as swapped:
        set_gradients(params, 0)
        with files_of_at_most(1 << 20), pytest.raises(OSError, match="ulimit -f") as refused:
            swapped.step()
        assert "free" not in str(refused.value) and swapped.get_state(params[0]) == {}
        swapped.step()


def test_a_state_dict_that_is_kept_outlives_close(disk_folder):
    params = [torch.nn.Parameter(torch.ones(5000))]
    with make(params, disk_folder) as swapped:
        set_gradients(params, 0)
        swapped.step()
        kept = swapped.state_dict()["state"][0]
        expected = copy.deepcopy(swapped.get_state(params[0]))
    assert same_state(kept, expected)
