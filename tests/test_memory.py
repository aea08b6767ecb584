"""Locked memory: the context, in-place locks, limits, statistics, and what they leave behind."""

import ctypes
import gc
import logging
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies

import locked_tensor as lt


def vm_locked() -> int:
    for line in open("/proc/self/status"):
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel shows VmLck")


def run_python(program: str, **more) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, **more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WITHOUT_PRIVILEGE = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
import torch, locked_tensor as lt
assert libc.prctl(24, 14, 0, 0, 0) == 0  # PR_CAPBSET_DROP, CAP_IPC_LOCK
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))
os.setgid(65534); os.setuid(65534)
"""


@pytest.fixture(autouse=True)
def nothing_left_behind():
    gc.collect()
    lt.empty_cache()
    before = vm_locked(), lt.memory_stats()["ranges.bytes"]
    yield
    gc.collect()
    lt.empty_cache()
    assert (vm_locked(), lt.memory_stats()["ranges.bytes"]) == before


# --- the context --------------------------------------------------------------------------------


def test_import_changes_nothing_and_the_first_context_installs_the_switch():
    program = """
    import torch, locked_tensor as lt
    assert not lt._C.is_switch_installed()
    assert type(torch.empty(10)) is torch.Tensor
    with lt.locked_memory():
        pass
    assert lt._C.is_switch_installed()
    assert not lt.is_locked(torch.empty(10))
    """
    run_python(program)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1000, dtype=torch.uint8, device="cpu"),
        lambda: torch.zeros(3, 4),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.arange(100) + 1,
        lambda: torch.randn(5, 5) @ torch.randn(5, 5),
        lambda: torch.nn.Linear(4, 4).weight,
        lambda: torch.full((2, 2), 7, dtype=torch.bfloat16),
        lambda: torch.empty(0, 4).new_ones(3),
    ],
)
def test_what_is_allocated_inside_is_locked_and_tagged(make):
    with lt.locked_memory():
        tensor = make()
    assert isinstance(tensor, lt.LockedTensor) and tensor.is_locked() and lt.is_locked(tensor)


def test_views_of_unlocked_tensors_stay_plain_inside():
    ordinary = torch.arange(10)
    with lt.locked_memory():
        assert type(ordinary[2:5]) is torch.Tensor
        assert type(ordinary.view(2, 5)) is torch.Tensor
        assert ordinary.add_(1) is ordinary
        assert type(ordinary + 1) is lt.LockedTensor


def test_nesting_exceptions_and_outliving():
    with lt.locked_memory():
        with lt.locked_memory(huge_pages="off"):
            inner = torch.ones(10)
        outer = torch.ones(10)
        with pytest.raises(ZeroDivisionError):
            with lt.locked_memory():
                raise ZeroDivisionError
        still = torch.ones(10)
    assert all(map(lt.is_locked, (inner, outer, still)))
    assert not lt.is_locked(torch.ones(10))
    assert inner.sum() == 10


def test_another_thread_is_not_affected():
    results = []
    with lt.locked_memory():
        thread = threading.Thread(target=lambda: results.append(torch.ones(10)))
        thread.start()
        thread.join()
    assert type(results[0]) is torch.Tensor and not lt.is_locked(results[0])


def test_it_is_a_decorator():
    @lt.locked_memory()
    def make():
        return torch.ones(3)

    assert lt.is_locked(make()) and lt.is_locked(make())
    assert not lt.is_locked(torch.ones(3))


def test_another_allocator_in_our_place_is_noticed_and_said():
    program = """
    import ctypes, torch, locked_tensor as lt
    with lt.locked_memory():
        before = torch.ones(10)
    c10 = ctypes.CDLL(torch.__path__[0] + "/lib/libc10.so")
    default = c10._ZN3c1022GetDefaultCPUAllocatorEv
    default.restype = ctypes.c_void_p
    c10._ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh(ctypes.c_void_p(default()), ctypes.c_uint8(0))
    try:
        with lt.locked_memory():
            pass
    except RuntimeError as error:
        assert "another library has replaced" in str(error), error
    else:
        raise SystemExit("it was not noticed")
    assert not lt._C.is_switch_installed()
    assert type(torch.ones(10)) is torch.Tensor
    assert before.is_locked()
    del before
    lt.empty_cache()
    assert lt.memory_reserved() == 0
    """
    run_python(program)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="huge_pages"):
        lt.locked_memory(huge_pages="4M").__enter__()
    with pytest.raises(ValueError, match="on_limit"):
        lt.locked_memory(on_limit="pray").__enter__()
    with pytest.raises(ValueError, match="numa_node 99 does not exist"):
        lt.locked_memory(numa_node=99).__enter__()
    with lt.locked_memory(numa_node=0):
        assert lt.is_locked(torch.ones(10))


def test_operators_with_scratch_memory_of_their_own_work_inside_outside_and_across():
    signal, weight = torch.randn(1, 4, 50), torch.randn(4, 8, 3)
    expected = torch.nn.functional.conv_transpose1d(signal, weight)
    with lt.locked_memory():
        inside = torch.nn.functional.conv_transpose1d(signal, weight)
    assert inside.is_locked() and torch.equal(inside, expected)
    assert torch.equal(torch.nn.functional.conv_transpose1d(signal, weight), expected)
    pool = torch.nn.Conv2d(3, 8, 3)
    image = torch.randn(2, 3, 16, 16)
    with lt.locked_memory():
        assert torch.equal(pool(image), pool(image))


def test_torch_load_inside_is_locked(tmp_path):
    torch.save({"a": torch.arange(1000)}, tmp_path / "saved")
    with lt.locked_memory():
        loaded = torch.load(tmp_path / "saved")
    assert type(loaded["a"]) is lt.LockedTensor and loaded["a"].is_locked()
    assert torch.equal(loaded["a"], torch.arange(1000))


# --- exactness ----------------------------------------------------------------------------------


def test_a_thousand_allocations_leave_nothing():
    before = vm_locked(), lt.memory_stats()["ranges.current"]
    for _ in range(1000):
        with lt.locked_memory():
            torch.empty(1 << 20, dtype=torch.uint8)
    lt.empty_cache()
    assert (vm_locked(), lt.memory_stats()["ranges.current"]) == before


def test_a_large_block_locks_its_own_pages_and_no_more():
    before = vm_locked()
    with lt.locked_memory():
        tensor = torch.empty((1 << 28) + 4096, dtype=torch.uint8)
    assert vm_locked() - before == (1 << 28) + 4096
    del tensor


def test_the_cache_limit_bounds_what_is_kept():
    lt.set_cache_limit(8 << 20)
    in_use = lt.memory_reserved()  # by whatever else lives: slabs of small blocks, too
    try:
        with lt.locked_memory():
            tensors = [torch.empty(4 << 20, dtype=torch.uint8) for _ in range(8)]
        del tensors
        assert lt.memory_reserved() - in_use <= 8 << 20
    finally:
        lt.set_cache_limit(2 << 30)
    with pytest.raises(ValueError, match="-1"):
        lt.set_cache_limit(-1)


def test_peaks_are_counted_and_reset():
    lt.reset_peak_memory_stats()
    before = lt.memory_allocated()
    with lt.locked_memory():
        tensor = torch.empty(3 << 20, dtype=torch.uint8)
    assert lt.memory_allocated() == before + (3 << 20)
    del tensor
    assert lt.max_memory_allocated() == before + (3 << 20)
    lt.reset_peak_memory_stats()
    assert lt.max_memory_allocated() == before
    assert "allocated_bytes.all.peak" in lt.memory_summary()


def test_milestones_of_locked_bytes_are_logged_once(caplog):
    lt.set_log_milestone(lt.memory_reserved() + (8 << 20))
    try:
        with caplog.at_level(logging.INFO, logger="locked_tensor"):
            with lt.locked_memory():
                first = torch.empty(12 << 20, dtype=torch.uint8)
            with lt.locked_memory():  # whatever was locked before, the doubled milestone is further
                second = torch.empty(1 << 20, dtype=torch.uint8)
        assert [record.levelno for record in caplog.records] == [logging.INFO]
        assert "locked now" in caplog.text
    finally:
        lt.set_log_milestone(32 << 30)
    with pytest.raises(ValueError, match="-5"):
        lt.set_log_milestone(-5)
    del first, second


def test_settings_may_change_between_allocation_and_free():
    with lt.locked_memory(huge_pages="off"):
        tensor = torch.ones(1 << 20)
    lt.set_cache_limit(0)
    with lt.locked_memory(huge_pages="auto"):
        del tensor
        other = torch.ones(1 << 20)
    lt.set_cache_limit(2 << 30)
    other.resize_(1 << 21)
    assert other.is_locked()
    del other


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to fill the hugetlb pool")
def test_the_hugetlb_pool_serves_and_an_empty_one_is_a_clear_error():
    setting = open("/proc/sys/vm/nr_hugepages").read()
    try:
        open("/proc/sys/vm/nr_hugepages", "w").write("16")
        if int(open("/proc/sys/vm/nr_hugepages").read()) < 16:
            pytest.skip("the kernel has no 16 free huge pages in a row")
        before = lt.memlock_limit().locked
        with lt.locked_memory(huge_pages="2M"):
            tensor = torch.ones(1 << 20)
        assert tensor.is_locked() and tensor.sum() == 1 << 20
        assert lt.memlock_limit().locked - before >= 4 << 20
        with pytest.raises(lt.LockLimitError, match="nr_hugepages"):
            with lt.locked_memory(huge_pages="2M"):
                torch.empty(1 << 30, dtype=torch.uint8)
        del tensor
        lt.empty_cache()
        assert lt.memlock_limit().locked == before
    finally:
        open("/proc/sys/vm/nr_hugepages", "w").write(setting)


def test_exit_with_live_tensors_is_silent():
    program = """
    import torch, locked_tensor as lt
    with lt.locked_memory():
        live = [torch.ones(1000) for _ in range(10)]
    handle = lt.aio_handle()
    kept = handle.new_cpu_locked_tensor(10, live[0])
    lt.lock_(torch.ones(100))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_most_of_a_large_tensor_lies_in_huge_pages():
    with lt.locked_memory():
        tensor = torch.empty(1 << 28, dtype=torch.uint8)
    address, huge, inside = tensor.data_ptr(), 0, False
    for line in open("/proc/self/smaps"):
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            inside = begin < address + tensor.nbytes and address < end
        elif inside and fields[0] == "AnonHugePages:":
            huge += int(fields[1]) * 1024
    assert huge >= 0.95 * tensor.nbytes


def test_seventy_thousand_small_tensors_fit():
    maps_before = sum(1 for _ in open("/proc/self/maps"))
    with lt.locked_memory():
        pool = [lt._C.new_claimed_tensor(4096, torch.uint8) for _ in range(70_000)]
    assert sum(1 for _ in open("/proc/self/maps")) - maps_before < 1400
    assert all(lt.is_locked(tensor) for tensor in pool[::1000])
    del pool


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.tuples(strategies.integers(1, 300_000), strategies.integers(0, 9)), max_size=40))
def test_random_programs_never_overlap(steps):
    live = []
    for number, (nbytes, choice) in enumerate(steps):
        if choice < 6 or not live:
            with lt.locked_memory():
                tensor = torch.empty(nbytes, dtype=torch.uint8)
            lt.as_plain(tensor).fill_(number % 251)
            live.append((number, tensor))
        else:
            live.pop(choice % len(live))
        for value, tensor in live:
            assert tensor.is_locked()
            plain = lt.as_plain(tensor)
            assert int(plain.min()) == int(plain.max()) == value % 251


@pytest.mark.slow
def test_threads_allocate_view_and_free_at_random_for_twenty_seconds():
    failures = []
    stop = time.monotonic() + 20

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            live = []
            while time.monotonic() < stop:
                nbytes = int(torch.randint(1, 1 << 17, (1,), generator=generator))
                with lt.locked_memory():
                    tensor = torch.empty(nbytes, dtype=torch.uint8)
                tensor.fill_(seed)
                view = tensor[nbytes // 3 :]
                assert type(view) is lt.LockedTensor and lt.is_locked(view)
                live.append(view)
                del tensor
                if len(live) > 20:
                    gone = live.pop(int(torch.randint(0, 20, (1,), generator=generator)))
                    assert int(gone.max()) == seed
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- lock, lock_, unlock_ -----------------------------------------------------------------------


def test_lock_copies_once():
    tensor = torch.randn(100, requires_grad=True)
    locked = lt.lock(tensor)
    assert locked.is_locked() and locked is not tensor
    assert locked.is_leaf and locked.requires_grad
    assert torch.equal(locked, tensor)
    assert lt.lock(locked) is locked
    view = locked.detach()[8:]
    assert lt.lock(view).data_ptr() == view.data_ptr()
    parameter = lt.lock(torch.nn.Parameter(torch.ones(3), requires_grad=False))
    assert isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad
    assert lt.is_locked(parameter)


def test_lock_in_place_keeps_data_address_and_views():
    tensor = torch.arange(10_000)
    view = tensor[10:20]
    address = tensor.data_ptr()
    before = vm_locked()
    assert lt.lock_(tensor) is tensor
    assert tensor.data_ptr() == address and lt.is_locked(tensor) and lt.is_locked(view)
    assert vm_locked() > before
    assert torch.equal(view, torch.arange(10, 20))
    lt.unlock_(tensor)
    assert not lt.is_locked(tensor) and vm_locked() == before
    with pytest.raises(ValueError, match="not locked in place"):
        lt.unlock_(tensor)


def test_lock_in_place_nests():
    tensor = torch.ones(5000)
    lt.lock_(lt.lock_(tensor))
    lt.unlock_(tensor)
    assert lt.is_locked(tensor)
    lt.unlock_(tensor)
    assert not lt.is_locked(tensor)


def test_a_storage_locked_in_place_is_unlocked_when_it_dies():
    before = vm_locked()
    for kill in (lambda t: None, lambda t: t.untyped_storage().resize_(0), lambda t: t.resize_(1 << 20)):
        tensor = lt.lock_(lt.lock_(torch.ones(50_000)))
        kill(tensor)
        del tensor
        assert vm_locked() == before


def test_two_storages_in_one_page_are_counted():
    page = numpy.zeros(8192, dtype=numpy.uint8)
    start = -page.ctypes.data % 4096
    first = torch.from_numpy(page[start : start + 1024])
    second = torch.from_numpy(page[start + 1024 : start + 2048])
    before = vm_locked()
    lt.lock_(first)
    lt.lock_(second)
    assert vm_locked() == before + 4096
    lt.unlock_(first)
    assert lt.is_locked(second) and not lt.is_locked(first) and vm_locked() == before + 4096
    del second
    gc.collect()
    assert vm_locked() == before


def test_numpy_and_mapped_files_can_be_locked(disk_folder):
    array = numpy.arange(100_000)
    tensor = lt.lock_(torch.from_numpy(array))
    assert lt.is_locked(tensor) and lt.is_locked(torch.from_numpy(array))
    lt.unlock_(tensor)
    path = disk_folder / "saved"
    torch.save(torch.arange(100_000), path)
    loaded = torch.load(path, mmap=True)
    lt.lock_(loaded)
    assert lt.is_locked(loaded) and torch.equal(loaded, torch.arange(100_000))
    with lt.aio_handle() as handle:
        handle.sync_pwrite(loaded, disk_folder / "copy")
    assert (disk_folder / "copy").read_bytes() == torch.arange(100_000).numpy().tobytes()
    del loaded
    gc.collect()
    file = open(disk_folder / "copy", "r+b")
    shared = mmap.mmap(file.fileno(), 0)
    mapped = torch.frombuffer(shared, dtype=torch.uint8)
    lt.lock_(mapped)
    with lt.aio_handle() as handle:
        handle.sync_pwrite(mapped, disk_folder / "again")
    assert (disk_folder / "again").read_bytes() == bytes(shared)
    lt.unlock_(mapped)
    del mapped


def test_shared_memory_is_refused_and_stays_shared():
    tensor = torch.ones(1000).share_memory_()
    with pytest.raises(ValueError, match="shared memory"):
        lt.lock_(tensor)
    assert tensor.is_shared()


def test_locked_allocations_are_not_unlocked():
    with lt.locked_memory():
        tensor = torch.ones(10)
    with pytest.raises(ValueError, match="there is none: this memory was allocated locked"):
        lt.unlock_(tensor)
    for wrong in (torch.empty(0), torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(ValueError):
            lt.lock_(wrong)


def test_lock_in_place_nests_on_memory_that_was_allocated_locked():
    before = vm_locked()
    with lt.locked_memory():
        tensor = torch.ones(10_000)
    array_of_it = torch.from_numpy(tensor[5000:].numpy())  # another storage, in the middle of it
    for target in (tensor, tensor[10:], array_of_it):
        assert lt.lock_(lt.lock_(target)) is target
        assert lt.unlock_(lt.unlock_(target)) is target
        assert lt.is_locked(tensor) and lt.is_locked(target) and vm_locked() > before
        with pytest.raises(ValueError, match="there is none"):
            lt.unlock_(target)
    lt.lock_(tensor)
    address = tensor.data_ptr()
    del tensor, target, array_of_it
    with lt.locked_memory():
        again = torch.ones(10_000)
    assert again.data_ptr() == address  # what was counted is gone with the tensor
    with pytest.raises(ValueError, match="there is none"):
        lt.unlock_(again)


def test_a_storage_that_reaches_beyond_locked_memory_is_refused():
    with lt.locked_memory():
        pool = torch.zeros(8192, dtype=torch.uint8)
    beyond = torch.frombuffer((ctypes.c_uint8 * (1 << 20)).from_address(pool.data_ptr()), dtype=torch.uint8)
    for work in (lt.lock_, lt.unlock_):
        with pytest.raises(ValueError, match="ends outside of it"):
            work(beyond)
    assert pool.is_locked()


# --- what is no tensor with bytes ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_a_locked_copy_without_elements_is_an_empty_view_of_locked_memory(shape):
    for tensor in (torch.zeros(shape, dtype=torch.int16), torch.zeros(5)[2:2].view(shape)):
        locked = lt.lock(tensor)
        assert type(locked) is lt.LockedTensor and locked.is_locked() and lt.is_locked(locked)
        assert (locked.shape, locked.dtype, locked.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert lt.lock(locked) is locked
    parameter = lt.lock(torch.nn.Parameter(torch.zeros(shape)))
    assert isinstance(parameter, torch.nn.Parameter) and lt.is_locked(parameter) and parameter.requires_grad
    locked.resize_(1000)
    assert locked.is_locked() and locked.numel() == 1000


def test_a_null_tensor_is_plain_and_not_locked():
    with lt.locked_memory():
        tensor = torch.zeros(0)
    assert type(tensor) is torch.Tensor and not lt.is_locked(tensor)


def test_a_claimed_tensor_without_elements_is_locked_and_can_be_given_up():
    allocated = lt.memory_allocated()
    with lt.aio_handle() as handle:
        tensor = handle.new_cpu_locked_tensor(0, torch.zeros(1, dtype=torch.float64))
        assert type(tensor) is lt.LockedTensor and tensor.is_locked()
        assert tensor.shape == (0,) and tensor.dtype is torch.float64
        assert handle.free_cpu_locked_tensor(tensor) and not handle.free_cpu_locked_tensor(tensor)
    assert lt.memory_allocated() == allocated


def tensors_without_bytes():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        yield torch.ones(4)
        yield torch.ones(0)
    yield torch.empty(4, device="meta")
    yield torch.eye(3).to_sparse()
    yield torch.eye(3).to_sparse_csr()
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    yield torch.nn.UninitializedParameter()


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_bytes_of_its_own_cannot_be_locked_and_is_not():
    for tensor in tensors_without_bytes():
        assert not lt.is_locked(tensor)
        with pytest.raises(TypeError, match=r"lock\(\) copies"):
            lt.lock(tensor)
        for work in (lt.lock_, lt.unlock_):
            with pytest.raises((TypeError, ValueError), match="only a|has no bytes"):
                work(tensor)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_may_be_made_inside():
    with lt.locked_memory():
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert not lt.is_locked(nested) and [each.sum() for each in nested.unbind()] == [2, 3]


def test_a_zero_tensor_has_no_bytes_and_its_locked_copy_has():
    zeros = torch._efficientzerotensor((4,))
    assert not lt.is_locked(zeros)
    with pytest.raises(ValueError, match="no bytes"):
        lt.lock_(zeros)
    locked = lt.lock(zeros)
    assert type(locked) is lt.LockedTensor and locked.is_locked() and torch.equal(locked, torch.zeros(4))


def test_a_python_subclass_is_copied_as_a_locked_tensor():
    class Sub(torch.Tensor):
        pass

    locked = lt.lock(torch.arange(3.0).as_subclass(Sub))
    assert type(locked) is lt.LockedTensor and locked.tolist() == [0, 1, 2]


def test_what_is_no_tensor_and_no_number_is_told_by_the_right_name():
    for work in (lt.lock, lt.lock_, lt.unlock_, lt.is_locked):
        for wrong in (None, [1.0], numpy.ones(3)):
            with pytest.raises(TypeError, match=rf"^{work.__name__}\(\) takes a torch.Tensor, got {type(wrong).__name__}$"):
                work(wrong)
    for work in (lt.set_cache_limit, lt.set_log_milestone):
        for wrong in (None, "1", 1.5):
            with pytest.raises(TypeError, match=rf"^{work.__name__}\(\) takes a whole number of bytes, got "):
                work(wrong)
        with pytest.raises(ValueError, match=rf"^{work.__name__}\(\) takes . bytes or more, got -1$"):
            work(-1)
    limit = lt.memory_stats()["cached_bytes.limit"]
    lt.set_cache_limit(numpy.int64(limit))
    lt.set_cache_limit(2**70)
    lt.set_cache_limit(limit)
    assert lt.memory_stats()["cached_bytes.limit"] == limit


# --- limits -------------------------------------------------------------------------------------


def test_memlock_limit_is_what_the_kernel_says():
    import resource

    limit = lt.memlock_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    assert limit.soft == (None if soft == unlimited else soft)
    assert limit.hard == (None if hard == unlimited else hard)
    assert limit.locked == vm_locked()


@pytest.mark.parametrize("limit", [64 << 10, 8 << 20])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give privileges up")
def test_a_refused_lock_is_a_lock_limit_error_and_changes_nothing(limit):
    program = WITHOUT_PRIVILEGE.format(limit=limit) + f"""
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def locked():
    return [int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmLck:")][0] * 1024
limit = {limit}
with lt.locked_memory():
    torch.empty(10)
lt.empty_cache()
rss_before, locked_before = rss(), locked()
for attempt in range(3):
    try:
        with lt.locked_memory():
            torch.empty(256 << 20, dtype=torch.uint8)
    except lt.LockLimitError as error:
        assert isinstance(error, MemoryError)
        assert error.bytes_asked == 256 << 20 and error.soft_limit == limit, vars(error)
        assert "ulimit -l" in str(error) and "LimitMEMLOCK" in str(error) and "memlock=-1" in str(error)
    else:
        raise SystemExit("it was not refused")
assert locked() == locked_before
assert rss() < rss_before + (8 << 20)
with lt.locked_memory():
    small = torch.ones(limit // 16)
assert small.is_locked()
try:
    lt.lock_(torch.zeros(64 << 20, dtype=torch.uint8))
except lt.LockLimitError as error:
    assert error.bytes_asked >= 64 << 20
else:
    raise SystemExit("lock_ was not refused")
del small
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with lt.locked_memory(on_limit="fall_back"):
        large = torch.ones(64 << 20)
        more = torch.ones(64 << 20)
assert type(large) is torch.Tensor and not lt.is_locked(large) and large[5] == 1
assert [w.category for w in caught] == [RuntimeWarning] and "ulimit -l" in str(caught[0].message)
with lt.aio_handle() as handle:
    handle.sync_pwrite(large, "/dev/shm/locked_tensor_unprivileged_%d" % os.getpid())
    os.unlink("/dev/shm/locked_tensor_unprivileged_%d" % os.getpid())
print("right")
"""
    assert run_python(program) == "right"


def test_fall_back_without_refusal_warns_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lt.locked_memory(on_limit="fall_back"):
            assert lt.is_locked(torch.ones(10))


# --- rule 1: the registry is the proof ----------------------------------------------------------


def test_resize_re_allocates_locked_wherever_it_is_called():
    with lt.locked_memory():
        tensor = torch.ones(10)
    tensor.resize_(1 << 20)
    assert tensor.is_locked() and lt.is_locked(tensor)
    tensor.untyped_storage().resize_(0)
    assert not tensor.is_locked()
    tensor.untyped_storage().resize_(4 << 20)
    assert tensor.is_locked()


def test_set_data_and_share_memory_stay_truthful():
    with lt.locked_memory():
        tensor, other = torch.ones(10), torch.ones(10)
    tensor.set_(torch.zeros(5))
    assert not tensor.is_locked()
    other.data = torch.zeros(7)
    assert not other.is_locked()
    with lt.locked_memory():
        shared = torch.ones(10)
    shared.share_memory_()
    assert shared.is_shared() and not shared.is_locked() and shared.sum() == 10


def test_addresses_reused_by_ordinary_tensors_are_not_locked():
    with lt.locked_memory():
        pool = torch.empty(32 << 20, dtype=torch.uint8)
    del pool
    lt.empty_cache()
    others = [torch.empty(32 << 20, dtype=torch.uint8) for _ in range(20)]
    assert not any(lt.is_locked(other) for other in others)


def test_tensors_that_leave_a_range_are_not_locked():
    with lt.locked_memory():
        pool = torch.zeros(8192, dtype=torch.uint8)
    inside = torch.frombuffer(lt.as_plain(pool).numpy(), dtype=torch.uint8)
    assert lt.is_locked(inside)
    beyond = torch.frombuffer((ctypes.c_uint8 * (64 << 20)).from_address(pool.data_ptr()), dtype=torch.uint8)
    assert not lt.is_locked(beyond)
    assert lt.is_locked(beyond[:8192])
    assert not lt.is_locked(torch.empty(0))
    assert lt.is_locked(pool[5:5])


def test_a_child_inherits_no_lock():
    with lt.locked_memory():
        tensor = torch.ones(1000)
    child = os.fork()
    if child == 0:
        is_right = not lt.is_locked(tensor) and float(tensor.sum()) == 1000
        with lt.locked_memory():
            is_right = is_right and lt.is_locked(torch.ones(10))
        del tensor
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lt.is_locked(tensor)


def test_more_memory_than_there_is_is_refused_before_the_kernel_looks_for_it():
    with lt.locked_memory():
        with pytest.raises(lt.LockLimitError, match=r"cannot lock, where .* of memory are available, 1\.0 TiB"):
            torch.empty(1 << 40, dtype=torch.uint8)
        assert torch.empty(1 << 20, dtype=torch.uint8).is_locked()
