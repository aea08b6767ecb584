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

import locked_tensor as lt
from locked_tensor.swap import BufferState, PoolExhaustedError, SwapBufferPool, TensorSwapper
from locked_tensor.swap.folder import SwapFolder
from locked_tensor.swap.store import SwapStore

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
