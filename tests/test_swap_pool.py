"""The buffer pool, the store, and tensors by name."""

import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import locked_tensor as lt
from locked_tensor.swap import (
    BufferState,
    PoolExhaustedError,
    SwapBufferPool,
    SwappedOptimizer,
    SwappedParameters,
    TensorSwapper,
    save_on_disk,
)
from locked_tensor.swap.folder import SwapFolder
from locked_tensor.swap.store import SwapStore
from locked_tensor.tensor import as_bytes

PAGE = 4096


@pytest.fixture
def handle():
    with lt.aio_handle() as made:
        yield made


def test_a_pool_locks_what_it_was_asked_for_and_gives_it_back(handle):
    lt.empty_cache()
    before = lt.memlock_limit().locked
    for _ in range(20):
        pool = SwapBufferPool(handle, 4, 16 << 20)
        assert pool.nbytes == lt.memlock_limit().locked - before == 64 << 20
        assert pool.available() == 4
        del pool
        lt.empty_cache()
        assert lt.memlock_limit().locked == before


def test_leases_are_locked_aligned_zero_and_pack(handle):
    pool = SwapBufferPool(handle, 1, 4 * PAGE)
    first = pool.lease(100, torch.float32, (5, 5))
    second = pool.lease(2 * PAGE, torch.int16)
    assert (first.nbytes, second.nbytes) == (PAGE, 2 * PAGE)
    assert first.tensor.shape == (5, 5) and second.tensor.shape == (PAGE,)
    assert isinstance(first.tensor, lt.LockedTensor) and handle.is_pinned(second.tensor)
    assert first.tensor.data_ptr() % PAGE == second.tensor.data_ptr() % PAGE == 0
    assert bool((first.tensor == 0).all())
    first.tensor.fill_(7)
    address = first.tensor.data_ptr()
    first.release()
    again = pool.lease(100, torch.uint8)
    assert again.tensor.data_ptr() == address and bool((again.tensor == 0).all())
    again.tensor.fill_(9)
    again.release()
    assert bool((pool.lease(100, zero=False).tensor == 9).all())


def test_asking_for_more_than_there_is_says_needed_and_available_and_works_after(handle):
    pool = SwapBufferPool(handle, 5, PAGE)
    leases = [pool.lease(PAGE) for _ in range(5)]
    assert pool.available() == 0 and pool.states() == [BufferState.LEASED] * 5
    with pytest.raises(PoolExhaustedError, match="4,096 bytes are needed and at most 0 are free") as refused:
        pool.lease(PAGE)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (PAGE, 0)
    leases.pop().release()
    assert pool.available() == 1
    pool.lease(PAGE)
    with pytest.raises(ValueError, match="exceed a buffer"):
        pool.lease(PAGE + 1)
    with pytest.raises(ValueError, match="too few"):
        pool.lease(10, torch.float32, (3,))
    with pytest.raises(ValueError, match="must be positive"):
        SwapBufferPool(handle, 0, PAGE)


def test_a_lease_is_waited_for(handle):
    pool = SwapBufferPool(handle, 1, PAGE)
    lease = pool.lease(PAGE)
    with pytest.raises(PoolExhaustedError):
        pool.lease(PAGE, timeout=0.05)
    threading.Timer(0.1, lease.release).start()
    assert pool.lease(PAGE, timeout=30).nbytes == PAGE


def test_memory_goes_back_with_the_last_view_and_outlives_the_pool(handle):
    pool = SwapBufferPool(handle, 1, PAGE)
    with pool.lease(PAGE, torch.float32) as tensor:
        view = tensor[3:9]
    assert tensor.numel() == 0
    assert pool.available() == 0
    view.fill_(3.0)
    states = pool.states
    assert states() == [BufferState.LEASED]
    del pool, states
    gc.collect()
    assert bool((view == 3.0).all()) and view.is_locked()


def test_eight_threads_share_a_pool(handle):
    pool = SwapBufferPool(handle, 3, 8 * PAGE)
    wrong = []

    def work(number):
        for turn in range(200):
            with pool.lease((1 + (number + turn) % 8) * PAGE, timeout=60) as tensor:
                tensor.fill_(number)
                if not bool((tensor == number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and pool.available() == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE)), max_size=60))
def test_extents_never_overlap_and_all_room_is_used_again(actions):
    store = SwapStore("/dev/shm")
    try:
        live = []
        for is_free, value in actions:
            if is_free and live:
                store.free(live.pop(value % len(live)))
            else:
                live.append(store.allocate(value))
            spans = sorted((extent.offset, extent.nbytes) for extent in live)
            assert all(sum(one) <= other[0] for one, other in zip(spans, spans[1:]))
            assert store.used_bytes == sum(extent.nbytes for extent in live)
        for extent in live:
            store.free(extent)
        size = os.path.getsize(store.folders[0] / "data")
        if size:
            assert store.allocate(size).offset == 0
    finally:
        store.close()


def test_a_store_spreads_over_folders_and_refuses_what_no_disk_has(disk_folder):
    folders = [disk_folder / "a", disk_folder / "b"]
    for folder in folders:
        folder.mkdir()
    store = SwapStore(folders)
    assert {store.allocate(PAGE).path.parent.parent for _ in range(2)} == set(folders)
    with pytest.raises(OSError, match="more bytes of swap space are needed") as refused:
        store.allocate(1 << 55)
    assert refused.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert store.used_bytes == 2 * PAGE
    store.close()
    with pytest.raises(ValueError, match="empty list"):
        SwapStore([])
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_swap_files_are_private_and_links_are_not_followed(disk_folder):
    victim = disk_folder / "victim"
    victim.mkdir()
    (victim / "keep").write_bytes(b"x")
    os.symlink(victim, disk_folder / "locked_tensor-swap-1-link")
    folder = SwapFolder(disk_folder)
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    fd = folder.create("data")
    assert os.fstat(fd).st_mode & 0o777 == 0o600 and not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(FileExistsError):
        folder.create("data")
    folder.close()
    folder.close()
    assert (victim / "keep").read_bytes() == b"x"


def test_a_forked_child_removes_nothing(disk_folder):
    script = """
        import os, sys
        from locked_tensor.swap.folder import SwapFolder
        folder = SwapFolder(sys.argv[1])
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        if not folder.path.is_dir():
            sys.exit(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(disk_folder)]
    subprocess.run(command, check=True, timeout=60)
    assert os.listdir(disk_folder) == []


@pytest.fixture
def swapper(handle, folder):
    with TensorSwapper(handle, folder, SwapBufferPool(handle, 3, 1 << 20)) as made:
        yield made


TENSORS = {
    "float": torch.randn(100, 100),
    "transposed": torch.randn(30, 50).t(),
    "strided": torch.randn(64, 64)[:, ::2],
    "bool": torch.randn(77) > 0,
    "complex": torch.randn(10, dtype=torch.complex64).conj(),
    "bfloat16": torch.randn(3, 4, 5).bfloat16(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "large": torch.arange(300_000),
}


def test_tensors_go_out_and_come_back(swapper):
    for name, tensor in TENSORS.items():
        swapper.swap_out(name, tensor)
    swapper.flush()
    assert swapper.names() == list(TENSORS) and len(swapper) == len(TENSORS)
    for name, tensor in TENSORS.items():
        if tensor.nbytes <= 1 << 20:
            found = swapper.swap_in(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
            assert found.numel() == 0 or lt.is_locked(found)
        out = torch.empty_like(tensor)
        assert swapper.swap_in(name, out=out) is out and torch.equal(out, tensor)


def test_a_single_element_with_a_stride_goes_out_and_comes_back(swapper):
    one = torch.full((1, 3), 3, dtype=torch.bfloat16)[:, 1]
    swapper.swap_out("one", one)
    assert torch.equal(swapper.swap_in("one"), torch.full((1,), 3, dtype=torch.bfloat16))


def test_a_pooled_tensor_is_its_callers_at_once_and_a_locked_one_moves_without_a_copy(handle, disk_folder):
    with TensorSwapper(handle, disk_folder, SwapBufferPool(handle, 3, 1 << 20)) as swapper:
        tensor = torch.ones(1000)
        swapper.swap_out("a", tensor)
        tensor.zero_()
        assert bool((swapper.swap_in("a") == 1).all())
        with lt.locked_memory():
            locked = torch.full((4096,), 2.0)
        swapper.swap_out("b", locked)
        swapper.flush()
        assert handle.stats().bytes_bounced == 0
        assert bool((swapper.swap_in("b") == 2).all())


def test_prefetch_swap_in_and_replacing_are_idempotent(swapper):
    swapper.swap_out("a", torch.ones(1 << 18))
    assert swapper.prefetch("a") and swapper.prefetch("a")
    first, second = swapper.swap_in("a"), swapper.swap_in("a")
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    third = swapper.swap_in("a")
    assert swapper.prefetch("a") is False
    with pytest.raises(PoolExhaustedError):
        swapper.swap_in("a")
    del first, second, third
    swapper.swap_out("a", torch.full((1 << 18,), 5.0))
    assert bool((swapper.swap_in("a") == 5).all())


def test_what_was_discarded_is_gone_and_its_room_is_used_again(handle, disk_folder):
    swapper = TensorSwapper(handle, disk_folder, SwapBufferPool(handle, 3, 1 << 20))
    (private,) = os.listdir(disk_folder)
    for turn in range(50):
        swapper.swap_out("x" * 5000, torch.full((10_000,), float(turn)))
        assert swapper.swap_in("x" * 5000)[7] == turn
        if turn % 2:
            swapper.discard("x" * 5000)
    assert os.path.getsize(disk_folder / private / "data") <= 2 * 40960
    with pytest.raises(KeyError, match="nothing was swapped out as 'y'"):
        swapper.swap_in("y")
    with pytest.raises(ValueError, match="strided CPU"):
        swapper.swap_out("s", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="out must be"):
        swapper.swap_out("z", torch.zeros(3))
        swapper.swap_in("z", out=torch.zeros(4))
    swapper.close()
    swapper.close()
    with pytest.raises(ValueError, match="closed"):
        swapper.swap_out("a", torch.zeros(1))
    assert os.listdir(disk_folder) == []


def test_a_pool_larger_than_the_machine_is_refused_at_once():
    lt.empty_cache()
    reserved = lt.memory_reserved()
    with lt.aio_handle() as handle:
        for count, buffer_bytes in ((1 << 62, 4096), (1 << 34, 4096), (1, 1 << 61)):
            with pytest.raises(lt.LockLimitError, match="memory are available"):
                SwapBufferPool(handle, count, buffer_bytes)
    assert lt.memory_reserved() == reserved


def test_what_an_interrupt_leaves_in_doubt_is_made_anew_of_what_is_lent(handle):
    pool = SwapBufferPool(handle, 2, 4 * PAGE)
    kept = [pool.lease(PAGE) for _ in range(3)]
    kept.pop(1)
    pool._buffers._free[0].take(2 * PAGE)  # taken, and then the interrupt
    pool._buffers._is_certain = False
    assert pool.available_bytes() == 4 * PAGE
    kept += [pool.lease(PAGE) for _ in range(6)]
    assert len({lease.tensor.data_ptr() for lease in kept}) == 8
    assert pool.available_bytes() == 0
    kept.clear()
    assert pool.available() == 2


def test_leases_interrupted_anywhere_leak_no_room(handle, is_interrupted):
    pool = SwapBufferPool(handle, 1, 8 * PAGE)
    for step in range(2000):
        is_interrupted(lambda: [pool.lease(PAGE, zero=False) for _ in range(8)], 1e-6 + 1e-7 * step)
    assert pool.available_bytes() == 8 * PAGE


class Wrapper(torch.Tensor):
    """A tensor without bytes of its own, as those of torch's own extensions."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func}")


def emptied():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(3)


IMMOVABLE = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "on meta": lambda: torch.ones(3, device="meta"),
    "FakeTensor": fake,
    "Wrapper": lambda: Wrapper((3,)),
    "UninitializedParameter": torch.nn.UninitializedParameter,
    "without bytes": emptied,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", IMMOVABLE)
def test_tensors_without_bytes_to_move_are_refused_by_name(handle, swapper, disk_folder, kind):
    swapper.swap_out("x", torch.ones(3))
    made = IMMOVABLE[kind]()
    with pytest.raises(ValueError, match=f"tensor must be a strided CPU tensor.*{kind}"):
        swapper.swap_out("x", made)
    with pytest.raises(ValueError, match=f"out must be a strided CPU tensor.*{kind}"):
        swapper.swap_in("x", out=made)
    assert torch.equal(swapper.swap_in("x"), torch.ones(3))


@pytest.mark.parametrize("given, told", [(None, "got None"), (5, "got a int"), ([1.0], "got a list")])
def test_what_is_no_tensor_is_a_type_error(swapper, given, told):
    swapper.swap_out("x", torch.ones(3))
    with pytest.raises(TypeError, match=f"tensor must be .*{told}"):
        swapper.swap_out("a", given)
    if given is not None:
        with pytest.raises(TypeError, match=f"out must be .*{told}"):
            swapper.swap_in("x", out=given)


@pytest.mark.filterwarnings("ignore")
def test_locked_memory_of_a_quantized_dtype_is_refused_and_a_locked_copy_has_its_values(handle):
    quantized = IMMOVABLE["quantized"]()
    with pytest.raises(TypeError, match="torch.qint8 is quantized"):
        handle.new_cpu_locked_tensor(4, quantized)
    with pytest.raises(TypeError, match="needs example_tensor.*got int"):
        handle.new_cpu_locked_tensor(4, 5)
    pool = SwapBufferPool(handle, 1, 4096)
    with pytest.raises(TypeError, match="torch.qint8 is quantized"):
        pool.lease(8, torch.qint8)
    with pytest.raises(TypeError, match="dtype must be a torch.dtype, got int"):
        pool.lease(8, 5)
    with pytest.raises(ValueError, match="no negative sizes"):
        pool.lease(8, torch.float32, (-1,))
    copy = lt.lock(quantized)
    assert lt.is_locked(copy) and torch.equal(copy.dequantize(), quantized.dequantize())
    with pytest.raises(TypeError, match="torch.qint8 is quantized"):
        as_bytes(copy)


def test_conjugated_and_negated_views_come_back_with_their_values(handle, swapper):
    values = torch.tensor([1 + 2j, 3 - 1j])
    for each in (values.conj(), values.conj().imag, lt.lock(values).conj()):
        swapper.swap_out("x", each)
        assert torch.equal(swapper.swap_in("x"), each.clone())


def test_handles_and_folders_of_another_type_are_refused_at_once(handle, disk_folder):
    pool = SwapBufferPool(handle, 1, 4096)
    parameter = torch.nn.Parameter(torch.ones(2))
    closed = lt.aio_handle()
    closed.close()
    for wrong, error, told in ((5, TypeError, "must be an AioHandle.*got int"), (closed, ValueError, "closed")):
        for make in (
            lambda: SwapBufferPool(wrong, 1, 4096),
            lambda: TensorSwapper(wrong, disk_folder, pool),
            lambda: SwappedOptimizer([parameter], torch.optim.SGD, folder=disk_folder, aio_handle=wrong),
            lambda: SwappedParameters(torch.nn.Linear(2, 2), folder=disk_folder, aio_handle=wrong),
            lambda: save_on_disk(disk_folder, aio_handle=wrong),
        ):
            with pytest.raises(error, match=told):
                make()
    for wrong in (5, [5], None):
        with pytest.raises(TypeError, match="folder must be a path or a list of paths, got"):
            TensorSwapper(handle, wrong, pool)
    assert os.listdir(disk_folder) == []
    for path in (os.fsencode(disk_folder), [os.fsencode(disk_folder)], disk_folder):
        with TensorSwapper(handle, path, pool) as swapper:
            swapper.swap_out("x", torch.arange(3))
            assert torch.equal(swapper.swap_in("x"), torch.arange(3))
            assert len(os.listdir(disk_folder)) == 1


def test_a_file_that_may_not_be_so_large_names_the_limit_and_no_free_space(handle, disk_folder, files_of_at_most):
    with TensorSwapper(handle, disk_folder, SwapBufferPool(handle, 1, 1 << 20)) as swapper:
        with files_of_at_most(1 << 20), pytest.raises(OSError, match='"ulimit -f"\\), 1,048,576 bytes') as refused:
            swapper.swap_out("x", torch.zeros(4 << 20, dtype=torch.uint8))
        assert refused.value.errno == errno.EFBIG and "free" not in str(refused.value)


CHILD = """
    import gc, os, sys, torch, locked_tensor as lt
    from locked_tensor.swap import SwapBufferPool, SwappedOptimizer, SwappedParameters, TensorSwapper, save_on_disk
    folder, is_dropped = sys.argv[1], sys.argv[2] == "dropped"
    handle = lt.aio_handle()
    swapper = TensorSwapper(handle, folder, SwapBufferPool(handle, 1, 1 << 20))
    swapper.swap_out("x", torch.arange(1000))
    own = [torch.nn.Parameter(torch.ones(20000))]
    optimizer = SwappedOptimizer(own, torch.optim.Adam, folder=folder, min_bytes=1)
    own[0].grad = torch.ones(20000)
    optimizer.step()
    saved = save_on_disk(folder, min_bytes=1)
    parameters = SwappedParameters(torch.nn.Linear(8, 8), folder=folder, max_locked_bytes=1 << 20)
    before = sorted(os.walk(folder))
    child = os.fork()
    if child == 0:
        if is_dropped:
            del swapper, optimizer, saved, parameters, handle
            gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(os.walk(folder)) == before
    assert torch.equal(swapper.swap_in("x"), torch.arange(1000))
    optimizer.step()
"""


@pytest.mark.parametrize("how", ["dropped", "kept"])
def test_a_forked_child_drops_what_it_inherits_in_silence(disk_folder, how):
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(disk_folder), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert os.listdir(disk_folder) == []
