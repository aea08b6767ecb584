"""SwappedOptimizer with master weights: the same bits as float32 clones kept by hand."""

import copy
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from test_swap_optimizer import ELEMENTWISE, WHOLE, assert_same_state, locked_bytes, make, parameters

import locked_tensor as lt
from locked_tensor.swap import SwappedParameters
from locked_tensor.swap.optimizer_records import step_without_hooks

HALVES = [torch.bfloat16, torch.float16]
MASTER = "master_param"


class ByHand:
    """Mixed precision in memory, as one writes it without this library."""

    def __init__(self, params, cls, **options):
        self.params = list(params)
        self.masters = [self._master(param) for param in self.params]
        self.optimizer = cls(self.masters, **options)

    def _master(self, param):
        return param if param.dtype == torch.float32 else param.detach().clone().float()

    def add_param_group(self, group):
        masters = [self._master(param) for param in group["params"]]
        self.params += group["params"]
        self.masters += masters
        self.optimizer.add_param_group({**group, "params": masters})

    def lend_gradients(self):
        for param, master in zip(self.params, self.masters):
            if master is not param:
                master.grad = None if param.grad is None else param.grad.float()

    @torch.no_grad()
    def copy_back(self):
        for param, master in zip(self.params, self.masters):
            if master is not param and master.grad is not None:
                param.copy_(master)

    def step(self):
        self.lend_gradients()
        self.optimizer.step()
        self.copy_back()

    def state_dict(self):
        """With each master among its parameter's state, and nothing of those that were never stepped."""
        saved = self.optimizer.state_dict()
        for index, (param, master) in enumerate(zip(self.params, self.masters)):
            if master.grad is None:
                saved["state"].pop(index, None)
            elif master is not param:
                saved["state"].setdefault(index, {})[MASTER] = master
        return saved


def mixed(dtype, name="Adam"):
    """Parameters of a low precision, one of float32, and one that is frozen."""
    params = parameters(dtype, name)
    torch.manual_seed(1)
    params.append(torch.nn.Parameter(torch.randn(40, 40)))
    params.append(torch.nn.Parameter(torch.randn(70, 70).to(dtype), requires_grad=False))
    return params


def set_gradients(params, step):
    torch.manual_seed(100 + step)
    for param in params:
        if param.requires_grad:
            param.grad = torch.empty_like(param).copy_(torch.randn(param.shape))


def train(params, optimizer, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def masters(params, folder, cls=torch.optim.AdamW, **options):
    return make(params, folder, cls, master_weights=True, **options)


def assert_same(params, others):
    for index, (mine, other) in enumerate(zip(params, others)):
        assert mine.dtype == other.dtype and torch.equal(mine, other), index


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_five_steps_give_the_bits_of_masters_kept_by_hand(disk_folder, name, dtype, is_plain):
    options = {**ELEMENTWISE, **WHOLE}[name]
    if name != "Muon":
        options = {**options, "foreach": not is_plain}
    cls = getattr(torch.optim, name)
    ours, theirs = mixed(dtype, name), mixed(dtype, name)
    plain = ByHand(theirs, cls, lr=0.01, **options)
    with masters(ours, disk_folder, cls, lr=0.01, pipeline=not is_plain, **options) as swapped:
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (plain.optimizer, swapped)]
        for step in range(5):
            train(theirs, plain, [step])
            train(ours, swapped, [step])
            for schedule in schedules:
                schedule.step()
        assert_same(ours, theirs)
        assert_same_state(plain.state_dict(), swapped.state_dict())
        assert len(swapped.state) == 0
    assert os.listdir(disk_folder) == []


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_fused_steps_give_the_same_bits(disk_folder, name):
    cls = getattr(torch.optim, name)
    ours, theirs = mixed(torch.float16), mixed(torch.float16)
    plain = ByHand(theirs, cls, lr=0.01, fused=True)
    with masters(ours, disk_folder, cls, lr=0.01, fused=True) as swapped:
        train(theirs, plain, range(3))
        train(ours, swapped, range(3))
        assert_same(ours, theirs)
        assert_same_state(plain.state_dict(), swapped.state_dict())


@pytest.mark.parametrize("dtype", HALVES)
def test_sparse_adam_steps_to_the_same_bits(disk_folder, dtype):
    ours, theirs = (torch.nn.Parameter(torch.full((3000, 16), 0.3, dtype=dtype)) for _ in range(2))
    plain = ByHand([theirs], torch.optim.SparseAdam)
    with masters([ours], disk_folder, torch.optim.SparseAdam) as swapped:
        for step in range(3):
            torch.manual_seed(step)
            rows, values = torch.randint(3000, (1, 50)), torch.randn(50, 16).to(dtype)
            for param, optimizer in ((theirs, plain), (ours, swapped)):
                param.grad = torch.sparse_coo_tensor(rows, values, (3000, 16), check_invariants=True)
                optimizer.step()
        assert_same([ours], [theirs])
        assert_same_state(plain.state_dict(), swapped.state_dict())


def test_a_step_reads_and_writes_each_master_once_and_none_for_float32(disk_folder):
    count = 1 << 16
    for dtype, tensors in ((torch.bfloat16, 3), (torch.float32, 2)):  # beside Adam's two
        params = [torch.nn.Parameter(torch.zeros(count, dtype=dtype)) for _ in range(3)]
        with masters(params, disk_folder) as swapped:
            train(params, swapped, [0])
            before = swapped.stats()
            assert (before.bytes_read, before.bytes_written) == (0, 3 * tensors * 4 * count)
            train(params, swapped, [1])
            moved = swapped.stats()
            assert moved.bytes_read == 3 * tensors * 4 * count
            assert moved.bytes_written == 2 * before.bytes_written


def test_without_the_option_nothing_has_a_master(disk_folder):
    params = parameters(torch.bfloat16)
    with make(params, disk_folder) as swapped:
        train(params, swapped, [0])
        assert all(MASTER not in swapped.get_state(param) for param in params)
        with pytest.raises(ValueError, match="made without master_weights=True"):
            swapped.refresh_master_weights()


def test_small_updates_add_up_in_the_master_and_reach_the_parameter(disk_folder):
    param = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    with masters([param], disk_folder, torch.optim.SGD, lr=2.0**-12) as swapped:
        for step in range(1, 33):
            param.grad = -torch.ones_like(param)
            swapped.step()
            master = swapped.get_state(param)[MASTER]
            assert torch.equal(master, torch.full((4096,), 1 + step * 2.0**-12))
            assert param[0] == master[0].bfloat16()
        assert param[0] == 1 + 2.0**-7  # which no single update reaches


def test_parameters_without_a_gradient_keep_master_and_state_and_cause_no_io(disk_folder):
    params = mixed(torch.bfloat16)
    with masters(params, disk_folder) as swapped:
        train(params, swapped, range(1))
        before = swapped.get_state(params[0])
        for param in params:
            param.grad = None
        params[2].grad = torch.ones_like(params[2])  # 5 elements: in memory
        moved, values = swapped.stats(), [param.detach().clone() for param in params]
        swapped.step()
        assert swapped.stats()[1:3] == moved[1:3]
        assert swapped.get_state(params[0]).keys() == before.keys() >= {MASTER}
        assert all(torch.equal(value, before[key]) for key, value in swapped.get_state(params[0]).items())
        assert swapped.get_state(params[-1]) == {}
        changed = [not torch.equal(param, value) for param, value in zip(params, values)]
        assert changed == [index == 2 for index in range(len(params))]


def test_a_parameter_that_gets_its_first_gradient_late_starts_its_master_then(disk_folder):
    ours, theirs = mixed(torch.bfloat16), mixed(torch.bfloat16)
    plain = ByHand(theirs, torch.optim.AdamW)
    with masters(ours, disk_folder) as swapped:
        for params, optimizer in ((ours, swapped), (theirs, plain)):
            set_gradients(params, 0)
            params[0].grad = None
            optimizer.step()
            params[-1].requires_grad_()
            train(params, optimizer, range(1, 3))
        assert_same(ours, theirs)
        assert_same_state(plain.state_dict(), swapped.state_dict())


def test_groups_are_added_and_closures_are_called(disk_folder):
    ours, theirs = mixed(torch.bfloat16)[:-1], mixed(torch.bfloat16)[:-1]
    plain = ByHand(theirs[:1], torch.optim.SGD, lr=0.1, momentum=0.9)
    with masters(ours[:1], disk_folder, torch.optim.SGD, lr=0.1, momentum=0.9) as swapped:
        for params, optimizer in ((ours, swapped), (theirs, plain)):
            train(params, optimizer, range(1))
            optimizer.add_param_group({"params": params[1:], "lr": 0.5, "momentum": 0.0})
            train(params, optimizer, range(1, 3))
        assert swapped.step(lambda: set_gradients(ours, 3) or 7.0) == 7.0
        train(theirs, plain, [3])
        assert_same(ours, theirs)
        assert_same_state(plain.state_dict(), swapped.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_gradients_on_disk_add_up_in_their_own_precision(disk_folder, name):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(width, 150, bias=name != "Muon") for width in (150, 150, 150))
        models.append(torch.nn.Sequential(*layers).bfloat16())
    tied = models[0][1].weight, models[1][1].weight
    models[0][2].weight, models[1][2].weight = tied
    cls = getattr(torch.optim, name)
    options = {"amsgrad": True} if name == "AdamW" else {}  # 18 bytes an element, in buffers for 16 of 4,096
    plain = ByHand(models[0].parameters(), cls, lr=0.01, **options)
    with masters(models[1].parameters(), disk_folder, cls, lr=0.01, swap_gradients=True, **options) as swapped:
        for step in range(3):
            for model, optimizer in zip(models, (plain, swapped)):
                model.zero_grad() if optimizer is plain else swapped.zero_grad()
                for part in range(2):  # accumulated
                    torch.manual_seed(10 * step + part)
                    model(torch.randn(8, 150).bfloat16()).square().mean().backward()
                if optimizer is swapped:
                    assert all(layer.weight.grad is None for layer in model)
                optimizer.step()
        assert_same(models[1].parameters(), models[0].parameters())
        assert_same_state(plain.state_dict(), swapped.state_dict())


@pytest.mark.parametrize("dtype", HALVES)
def test_a_scaler_scales_skips_and_scales_again(disk_folder, dtype):
    ours, theirs = mixed(dtype)[:-1], mixed(dtype)[:-1]
    plain = ByHand(theirs, torch.optim.AdamW)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    with masters(ours, disk_folder) as swapped:
        for step in range(4):
            for params, scaler in ((ours, scalers[0]), (theirs, scalers[1])):
                scaler.scale(torch.ones(()))
                set_gradients(params, step)
                params[-1].grad *= 1024
                if step == 2:
                    params[0].grad[3, 3] = torch.inf
            before = [param.detach().clone() for param in ours]
            scaled = ours[-1].grad.clone()
            scalers[0].step(swapped)
            assert torch.equal(ours[-1].grad, scaled)
            plain.lend_gradients()
            scalers[1].step(plain.optimizer)
            if step != 2:
                plain.copy_back()
            for scaler in scalers:
                scaler.update()
            assert_same(ours, theirs)
            assert (step == 2) == all(torch.equal(param, value) for param, value in zip(ours, before))
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
        assert swapped.stats().steps == 3
        assert_same_state(plain.state_dict(), swapped.state_dict())


def test_gradients_of_bfloat16_may_be_unscaled_and_clipped_before_the_step(disk_folder):
    ours, theirs = mixed(torch.bfloat16), mixed(torch.bfloat16)
    plain = ByHand(theirs, torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    with masters(ours, disk_folder) as swapped:
        set_gradients(ours, 0)
        set_gradients(theirs, 0)
        for param in theirs[:-1]:
            param.grad /= 1024
        scaler.unscale_(swapped)
        for params in (ours, theirs):
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        scaler.step(swapped)
        plain.step()
        assert_same(ours, theirs)


def test_a_scaled_step_that_fails_is_tried_again_with_the_same_scale(small_disk):
    ours, theirs = mixed(torch.bfloat16), mixed(torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    plain = ByHand(theirs, torch.optim.AdamW)
    with masters(ours, small_disk) as swapped:
        (small_disk / "ballast").write_bytes(bytes(700 << 10))
        set_gradients(ours, 0)
        with pytest.raises(OSError, match="more bytes of swap space"):
            scaler.step(swapped)
        (small_disk / "ballast").unlink()
        scaler.step(swapped)
        set_gradients(theirs, 0)
        for param in theirs:
            param.grad = None if param.grad is None else param.grad / 1024
        plain.step()
        assert_same(ours[:1], theirs[:1])


def test_a_scaler_and_gradients_on_disk_are_refused(disk_folder):
    param = torch.nn.Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16))
    with masters([param], disk_folder, swap_gradients=True) as swapped:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(param.sum()).backward()
        with pytest.raises(RuntimeError, match="gradients are on disk"):
            scaler.step(swapped)
        assert torch.equal(param, torch.zeros_like(param))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "Adafactor"])
def test_a_run_resumed_in_a_new_process_gives_the_same_bits(disk_folder, tmp_path, name):
    script = """
        import sys, torch
        sys.path.insert(0, "tests")
        from test_swap_master_weights import masters, mixed, train
        folder, path, name = sys.argv[1:]
        saved = torch.load(path, weights_only=True)
        params = mixed(torch.bfloat16, name)
        with torch.no_grad():
            for param, value in zip(params, saved["params"]):
                param.copy_(value)
        with masters(params, folder, getattr(torch.optim, name)) as swapped:
            swapped.load_state_dict(saved["optimizer"])
            train(params, swapped, range(2, 5))
            torch.save({"params": params, "optimizer": swapped.state_dict()}, path)
    """
    cls = getattr(torch.optim, name)
    ours, theirs = mixed(torch.bfloat16, name), mixed(torch.bfloat16, name)
    plain = ByHand(theirs, cls)
    train(theirs, plain, range(5))
    path = tmp_path / "checkpoint"
    with masters(ours, disk_folder, cls) as swapped:
        train(ours, swapped, range(2))
        torch.save({"params": ours, "optimizer": swapped.state_dict()}, path)
    command = [sys.executable, "-c", textwrap.dedent(script), str(disk_folder), str(path), name]
    subprocess.run(command, check=True, timeout=120)
    resumed = torch.load(path, weights_only=True)
    assert_same(resumed["params"], theirs)
    assert_same_state(plain.state_dict(), resumed["optimizer"])


def test_a_state_dict_without_masters_starts_them_from_the_parameters(disk_folder):
    ours, theirs = mixed(torch.bfloat16), mixed(torch.bfloat16)
    before = ByHand(theirs, torch.optim.AdamW)
    train(theirs, before, range(2))
    saved = before.optimizer.state_dict()
    with torch.no_grad():
        for mine, other in zip(ours, theirs):
            mine.copy_(other)
    plain = ByHand(theirs, torch.optim.AdamW)
    plain.optimizer.load_state_dict(saved)
    with masters(ours, disk_folder) as swapped:
        train(ours, swapped, [0])  # masters of its own, which are forgotten
        with torch.no_grad():
            for mine, other in zip(ours, theirs):
                mine.copy_(other)
        swapped.load_state_dict(saved)
        assert MASTER not in swapped.get_state(ours[0])
        assert swapped.get_state(ours[0])["exp_avg"].dtype == torch.float32
        train(ours, swapped, [2])
        train(theirs, plain, [2])
        assert_same(ours, theirs)
        assert_same_state(plain.state_dict(), swapped.state_dict())


def test_a_state_dict_loads_into_the_class_over_float32_masters(disk_folder):
    ours = mixed(torch.bfloat16)
    with masters(ours, disk_folder) as swapped:
        train(ours, swapped, range(2))
        saved = copy.deepcopy(swapped.state_dict())
        theirs = [torch.nn.Parameter(param.detach().clone(), param.requires_grad) for param in ours]
        plain = ByHand(theirs, torch.optim.AdamW)
        plain.optimizer.load_state_dict(saved)
        with torch.no_grad():
            for index, state in saved["state"].items():
                if MASTER in state:
                    plain.masters[index].copy_(state[MASTER])
        train(theirs, plain, [2])
        train(ours, swapped, [2])
        assert_same(ours, theirs)


def test_float32_parameters_drop_the_masters_of_a_state_dict(disk_folder):
    ours = parameters(torch.bfloat16)
    with masters(ours, disk_folder) as swapped:
        train(ours, swapped, [0])
        saved = swapped.state_dict()
        with masters(parameters(), disk_folder) as other:
            other.load_state_dict(saved)
            assert other.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_master_of_another_shape_is_refused_and_nothing_changes(disk_folder):
    params = parameters(torch.bfloat16)
    with masters(params, disk_folder) as swapped:
        train(params, swapped, [0])
        before = swapped.get_state(params[0])
        wrong = {**before, MASTER: torch.zeros(3)}
        with pytest.raises(ValueError, match=r"master_param must have its parameter's shape \(150, 150\), got \(3,\)"):
            swapped.set_state(params[0], wrong)
        saved = swapped.state_dict()
        saved["state"][0] = wrong
        saved["param_groups"][0]["lr"] = 7.0
        with pytest.raises(ValueError, match="master_param must have"):
            swapped.load_state_dict(saved)
        assert swapped.param_groups[0]["lr"] == 0.001
        assert all(torch.equal(value, before[key]) for key, value in swapped.get_state(params[0]).items())
        train(params, swapped, [1])
        assert swapped.get_state(params[0])["step"] == 2


def test_a_master_is_set_for_one_parameter(disk_folder):
    params = parameters(torch.bfloat16)
    with masters(params, disk_folder, torch.optim.SGD, lr=1.0) as swapped:
        for param in (params[0], params[2]):  # on disk; in memory
            swapped.set_state(param, {MASTER: torch.full(param.shape, 0.7501, dtype=torch.float64)})
            param.grad = torch.full_like(param, 0.5)
        swapped.step()
        for param in (params[0], params[2]):
            expected = torch.full(param.shape, 0.7501) - 0.5
            assert torch.equal(swapped.get_state(param)[MASTER], expected)
            assert torch.equal(param, expected.bfloat16())


def test_the_master_is_the_truth_until_it_is_refreshed(disk_folder):
    ours, theirs = mixed(torch.bfloat16), mixed(torch.bfloat16)
    plain = ByHand(theirs, torch.optim.AdamW)
    with masters(ours, disk_folder) as swapped:
        with torch.no_grad():
            for param in (ours[0], theirs[0], plain.masters[0]):
                param.fill_(0.75)  # before its first step: taken
        train(ours, swapped, [0])
        train(theirs, plain, [0])
        with torch.no_grad():
            for param in ours:
                param.fill_(3.0) if param.dtype == torch.bfloat16 and param.requires_grad else None
        train(ours, swapped, [1])  # overwritten
        train(theirs, plain, [1])
        assert_same(ours, theirs)
        with torch.no_grad():
            for params in (ours, theirs, plain.masters):
                for param in params[:3]:
                    param.fill_(0.5)
        moved = swapped.stats()
        swapped.refresh_master_weights(iter(ours[:3]))
        assert swapped.stats() == moved
        assert MASTER not in swapped.get_state(ours[0]) and MASTER in swapped.get_state(ours[-3])
        assert swapped.get_state(ours[0])["step"] == 2
        train(ours, swapped, range(2, 4))
        train(theirs, plain, range(2, 4))
        assert_same(ours, theirs)
        assert_same_state(plain.state_dict(), swapped.state_dict())
        swapped.refresh_master_weights()
        with torch.no_grad():
            for param, master in zip(theirs, plain.masters):
                master.copy_(param)
        train(ours, swapped, [4])
        train(theirs, plain, [4])
        assert_same(ours, theirs)
        with pytest.raises(ValueError, match="not a parameter of this optimizer"):
            swapped.refresh_master_weights([torch.zeros(3)])


def test_locked_memory_stays_within_the_budget(disk_folder):
    before, worst = locked_bytes(), 0

    def sample(done, total):
        nonlocal worst
        worst = max(worst, lt.memlock_limit().locked)

    params = mixed(torch.bfloat16)
    budget = 20 << 20
    with masters(params, disk_folder, max_locked_bytes=budget, on_progress=sample) as swapped:
        train(params, swapped, range(3))
        (private,) = os.listdir(disk_folder)
        size = os.path.getsize(disk_folder / private / "data")
        swapped.refresh_master_weights()
        train(params, swapped, range(3, 50))
        assert os.path.getsize(disk_folder / private / "data") == size
    assert 0 < worst - before <= budget
    assert locked_bytes() == before
    assert os.listdir(disk_folder) == []


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_full_disk_leaves_everything_as_before_the_step(small_disk, name):
    cls = getattr(torch.optim, name)
    params, expected = parameters(torch.bfloat16), parameters(torch.bfloat16)
    plain = ByHand(expected, cls)
    with masters(params, small_disk, cls) as swapped:
        (small_disk / "ballast").write_bytes(bytes((1 << 20) - (80 << 10)))
        set_gradients(params, 0)
        with pytest.raises(OSError, match="more bytes of swap space are needed, .* are free") as refused:
            swapped.step()
        assert refused.value.errno == 28 and refused.value.filename.endswith("/data")
        assert_same(params, expected)
        assert all(swapped.get_state(param) == {} for param in params)
        (small_disk / "ballast").unlink()
        train(params, swapped, range(1))
        train(expected, plain, range(1))
        assert_same(params, expected)


def test_a_step_that_cannot_read_leaves_parameters_and_masters_that_it_names(disk_folder):
    params, expected = parameters(torch.bfloat16), parameters(torch.bfloat16)
    plain = ByHand(expected, torch.optim.AdamW)
    with masters(params, disk_folder) as swapped:
        train(params, swapped, range(1))
        train(expected, plain, range(1))
        (private,) = os.listdir(disk_folder)
        path = disk_folder / private / "data"
        lost = swapped.get_state(params[-1])  # the last on disk
        value = params[-1].detach().clone()
        os.truncate(path, os.path.getsize(path) - 4096)
        set_gradients(params, 1)
        with pytest.raises(lt.ShortReadError) as cut_short:
            swapped.step()
        not_updated = cut_short.value.not_updated
        assert [param is params[-1] for param in not_updated] == [True]
        os.truncate(path, os.path.getsize(path) + 4096)
        swapped.set_state(params[-1], lost)
        train(expected, plain, range(1, 2))
        assert_same(params[:-1], expected[:-1])
        for index, param in enumerate(params[:-1]):
            assert torch.equal(swapped.get_state(param)[MASTER], plain.masters[index])
        is_old = params[-1] == value  # cut: the pieces before the lost one are updated
        assert is_old.any() and torch.equal(params[-1][~is_old], expected[-1][~is_old])


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_step_whose_writes_fail_keeps_masters_in_memory_and_can_be_ended(disk_folder, files_of_at_most, pipeline):
    params, expected = parameters(torch.bfloat16), parameters(torch.bfloat16)
    plain = ByHand(expected, torch.optim.AdamW)
    with masters(params, disk_folder, pipeline=pipeline) as swapped:
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
        for index, param in enumerate(params):
            if id(param) not in in_half:
                assert torch.equal(param, expected[index])
                assert torch.equal(swapped.get_state(param)[MASTER], plain.masters[index])


def test_a_first_step_that_ends_between_pieces_gives_the_rest_of_a_master_its_parameters_values(
    disk_folder, monkeypatch
):
    steps = []

    def fail(inner):
        steps.append(step_without_hooks(inner))
        if len(steps) == 2:
            raise OSError("enough")

    param = torch.nn.Parameter(torch.randn(1 << 16).bfloat16())
    before = param.detach().clone()
    with masters([param], disk_folder, torch.optim.SGD, lr=1.0) as swapped:
        param.grad = torch.ones_like(param)
        monkeypatch.setattr("locked_tensor.swap.optimizer.step_without_hooks", fail)
        with pytest.raises(OSError, match="enough") as failed:
            swapped.step()
        assert [each is param for each in failed.value.not_updated] == [True]
        is_updated = param != before
        assert 0 < is_updated.sum() < param.numel()
        expected = before.float() - is_updated.float()
        assert torch.equal(swapped.get_state(param)[MASTER], expected)


def test_swapped_parameters_of_low_precision_step_to_the_same_bits(disk_folder):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4))).bfloat16())
    batch = torch.randn(8, 200).bfloat16()
    plain = ByHand(models[0].parameters(), torch.optim.AdamW)
    optimizer = masters(models[1].parameters(), disk_folder)
    with SwappedParameters(models[1], folder=disk_folder, max_locked_bytes=2 << 20) as swapped, optimizer:
        for step in range(4):
            for model in models:
                model.zero_grad()
                model(batch).square().mean().backward()
            plain.step()
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            swapped.step(optimizer)
        expected, found = models[0].state_dict(), models[1].state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_sharded_parameters_of_two_processes_train_to_the_same_bits(disk_folder):
    script = """
        import sys, torch, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        sys.path.insert(0, "tests")
        from test_swap_master_weights import MASTER, ByHand, masters

        dist.init_process_group("gloo")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))

        def model():
            torch.manual_seed(0)
            made = torch.nn.Sequential(torch.nn.Linear(250, 333), torch.nn.ReLU(), torch.nn.Linear(333, 5))
            return fully_shard(made.bfloat16(), mesh=mesh)

        models = [model(), model()]
        plain = ByHand(models[0].parameters(), torch.optim.AdamW)
        swapped = masters(models[1].parameters(), sys.argv[1])
        for step in range(4):
            torch.manual_seed(10 * dist.get_rank() + step)
            batch = torch.randn(4, 250).bfloat16()
            for each, optimizer in zip(models, (plain, swapped)):
                each.zero_grad()
                each(batch).float().square().mean().backward()
                optimizer.step()
            if step == 1:
                swapped.load_state_dict(swapped.state_dict())
        for mine, other in zip(models[1].parameters(), models[0].parameters()):
            assert torch.equal(mine.to_local(), other.to_local())
        for index, state in plain.state_dict()["state"].items():
            other = swapped.state_dict()["state"][index][MASTER]
            assert type(other) is type(state[MASTER])
            assert torch.equal(other.to_local(), state[MASTER].to_local())
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
