"""The aio handle as its users see it: every size, offset, engine and file system; errors; manners."""

import errno
import gc
import hashlib
import os
import random
import re
import stat
import threading

import numpy
import pytest
import torch

import locked_tensor as lt

SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, (1 << 20) - 1, (1 << 20) + 1, 2 * 14_412_000]
FILE_OFFSETS = [0, 1, 511, 4096, 8192 + 1]
MEMORY_OFFSETS = [0, 1, 64, 512]
GUARD = 64


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def locked_bytes(nbytes: int) -> torch.Tensor:
    with lt.locked_memory():
        return torch.empty(nbytes, dtype=torch.uint8)


def cases():
    """Every size with a pairwise choice of offsets, the same ones on every run."""
    choose = random.Random(8212)
    for size in SIZES:
        for file_offset in FILE_OFFSETS:
            yield size, file_offset, choose.choice(MEMORY_OFFSETS)
        for memory_offset in MEMORY_OFFSETS:
            yield size, choose.choice(FILE_OFFSETS), memory_offset


@pytest.fixture
def handle(engine):
    with lt.aio_handle(engine=engine) as handle:
        yield handle


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
def test_any_size_and_offset_round_trips_and_leaves_the_rest_alone(handle, folder, is_locked):
    path = folder / "file"
    for number, (size, file_offset, memory_offset) in enumerate(cases()):
        before = pattern(file_offset + size + 5000, seed=number).numpy().tobytes()
        path.write_bytes(before)
        total = memory_offset + size + GUARD
        buffer = locked_bytes(total) if is_locked else torch.empty(total, dtype=torch.uint8)
        buffer.copy_(pattern(total, seed=number + 1000))
        view = buffer[memory_offset : memory_offset + size]
        assert handle.sync_pwrite(view, str(path), file_offset) == 1
        written = view.numpy().tobytes()
        expected = before[:file_offset] + written + before[file_offset + size :]
        case = (size, file_offset, memory_offset)
        assert path.read_bytes() == expected, case

        guarded = buffer.clone()
        view.zero_()
        assert handle.sync_pread(view, path, file_offset) == 1
        assert torch.equal(buffer, guarded), case


@pytest.mark.parametrize("size", [s for s in SIZES if s])
@pytest.mark.parametrize("file_offset", FILE_OFFSETS)
def test_a_new_file_ends_where_the_write_ended(handle, folder, size, file_offset):
    path = folder / "new"
    handle.sync_pwrite(pattern(size), path, file_offset)
    assert path.stat().st_size == file_offset + size
    assert path.read_bytes() == bytes(file_offset) + pattern(size).numpy().tobytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.slow
def test_more_than_two_gib_moves_in_one_call(engine, disk_folder):
    nbytes = (2 << 30) + 8192
    path = disk_folder / "large"
    with lt.aio_handle(block_size=4 << 30, engine=engine) as handle:
        large = locked_bytes(nbytes)
        large.view(torch.int64).copy_(torch.arange(nbytes // 8))
        assert handle.sync_pwrite(large, path) == 1
        assert path.stat().st_size == nbytes
        large.zero_()
        assert handle.sync_pread(large, path) == 1
        assert torch.equal(large.view(torch.int64), torch.arange(nbytes // 8))
        assert handle.stats().bytes_direct == 2 * nbytes


def test_offsets_beyond_32_bits_make_a_sparse_file(handle, disk_folder):
    path = disk_folder / "sparse"
    page = locked_bytes(4096)
    page.copy_(pattern(4096))
    handle.sync_pwrite(page, path, 3 << 30)
    handle.sync_pwrite(page, path, 5 << 30)
    assert path.stat().st_size == (5 << 30) + 4096
    assert path.stat().st_blocks * 512 < 1 << 20
    page.zero_()
    handle.sync_pread(page, path, 3 << 30)
    assert torch.equal(page, pattern(4096))


def test_writing_into_the_middle_keeps_head_and_tail(handle, folder):
    path = folder / "patterned"
    before = pattern(65536, seed=1).numpy().tobytes()
    path.write_bytes(before)
    data = pattern(4096 * 3 + 100, seed=2)
    handle.sync_pwrite(data, path, 8192)
    assert path.read_bytes() == before[:8192] + data.numpy().tobytes() + before[8192 + len(data) :]


def test_contiguous_aligned_views_of_locked_memory_never_bounce(handle, disk_folder):
    pool = locked_bytes(8 << 20)
    pool.copy_(pattern(8 << 20))
    views = [pool, pool.narrow(0, 4096, 1 << 20), pool[512 : 512 + 8192], pool.view(-1, 4096)[3]]
    for number, view in enumerate(views):
        path = disk_folder / f"view{number}"
        handle.sync_pwrite(view, path)
        handle.sync_pread(view, path)
    stats = handle.stats()
    assert stats.bytes_bounced == 0
    assert stats.bytes_direct == 2 * sum(view.nbytes for view in views)
    assert torch.equal(pool, pattern(8 << 20))


def test_ordinary_memory_bounces_and_tmpfs_counts_as_buffered(handle, disk_folder, tmpfs_folder):
    handle.sync_pwrite(torch.zeros(1 << 20, dtype=torch.uint8), disk_folder / "file")
    assert handle.stats().bytes_bounced == 1 << 20
    handle.sync_pwrite(locked_bytes(1 << 20), tmpfs_folder / "file")
    assert handle.stats().bytes_buffered == 1 << 20


STRIDED = {
    "transposed": lambda t: t.view(512, 2048).t(),
    "columns": lambda t: t.view(512, 2048)[:, 100:1300],
    "every third": lambda t: t[::3],
    "channels last": lambda t: t.view(4, 16, 128, 128).to(memory_format=torch.channels_last),
    "permuted": lambda t: t.view(16, 64, 32, 32).permute(3, 1, 0, 2),
    "flipped in strides": lambda t: t.view(1024, 1024)[:, ::2].t(),
    "float16 columns": lambda t: t.view(torch.float16).view(512, 1024)[:, 1:700],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
def test_strided_views_are_stored_in_logical_order(handle, folder, name, is_locked):
    base = locked_bytes(1 << 20) if is_locked else torch.empty(1 << 20, dtype=torch.uint8)
    base.copy_(pattern(1 << 20) % 60)
    view = STRIDED[name](base)
    path = folder / "strided"
    handle.sync_pwrite(view, path, 13)
    logical = lt.as_plain(view).contiguous().view(torch.uint8).numpy().tobytes()
    assert path.read_bytes()[13:] == logical

    original = base.clone()
    into = STRIDED[name](base) if name != "channels last" else view
    into.zero_()
    handle.sync_pread(into, path, 13)
    assert lt.as_plain(into).contiguous().view(torch.uint8).numpy().tobytes() == logical
    assert torch.equal(base, original)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_every_dtype_round_trips(handle, disk_folder, dtype):
    data = (pattern(6000) % 2).view(dtype) if dtype == torch.bool else pattern(6000).view(dtype)
    path = disk_folder / "typed"
    handle.sync_pwrite(data, path)
    back = torch.empty_like(data)
    handle.sync_pread(back, path)
    assert torch.equal(back.view(torch.uint8), data.view(torch.uint8))


def test_a_lazily_conjugated_view_is_stored_as_its_values(handle, disk_folder):
    data = torch.randn(100, dtype=torch.complex64)
    handle.sync_pwrite(data.conj(), disk_folder / "conj")
    back = torch.empty_like(data)
    handle.sync_pread(back, disk_folder / "conj")
    assert torch.equal(back, data.conj().resolve_conj())
    with pytest.raises(ValueError, match="conj"):
        handle.sync_pread(back.conj(), disk_folder / "conj")


def test_reading_counts_as_an_in_place_change(handle, disk_folder):
    data = locked_bytes(4096)
    handle.sync_pwrite(data, disk_folder / "file")
    version = data._version
    handle.sync_pread(data, disk_folder / "file")
    assert data._version == version + 1


# --- DeepSpeed's manners ------------------------------------------------------------------------


def test_every_method_of_deepspeed_exists_with_its_return_values(disk_folder):
    handle = lt.aio_handle(1 << 20, 32, False, True, 2)
    assert handle.get_block_size() == 1 << 20
    assert handle.get_queue_depth() == 32
    assert handle.get_single_submit() is False
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == 2
    assert handle.get_alignment() % 512 == 0
    path = str(disk_folder / "file")
    data = handle.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.float16))
    data.copy_(torch.arange(5000) % 99)
    assert handle.write(data, path, False) == 0
    assert handle.read(data, path, True) == 0
    assert handle.pwrite(data, path, True, False) == 1
    assert handle.pread(data, path, validate=False, **{"async": True}) == 0
    assert handle.wait() == 1
    assert handle.pwrite(buffer=data, filename=path, validate=True, file_offset=7, **{"async": True}) == 0
    assert handle.wait() == 1
    assert handle.sync_pread(data, path, file_offset=7) == 1
    assert handle.sync_pwrite(buffer=data, filename=path) == 1
    assert handle.async_pread(data, path, 0) == 0
    assert handle.async_pwrite(data, path + "2", file_offset=0) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    assert torch.equal(data, (torch.arange(5000) % 99).to(torch.float16))
    assert handle.free_cpu_locked_tensor(data) is True
    handle.close()


def test_wait_on_a_fresh_handle_is_zero(handle):
    assert handle.wait() == 0


def test_descriptors_are_used_and_left_open(handle, disk_folder):
    path = disk_folder / "by_fd"
    data = locked_bytes(10000)
    data.copy_(pattern(10000))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        handle.async_pwrite(data, fd=fd)
        handle.wait()
        data.zero_()
        handle.async_pread(data, fd)
        assert handle.wait() == 1
        assert torch.equal(data, pattern(10000))
        assert os.fstat(fd).st_size == 10000
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match="filename or fd"):
        handle.async_pread(data)


def test_a_descriptor_may_be_closed_while_the_write_is_pending(handle, disk_folder):
    data = locked_bytes(4 << 20)
    data.copy_(pattern(4 << 20))
    fd = os.open(disk_folder / "closed", os.O_WRONLY | os.O_CREAT)
    handle.async_pwrite(data, fd)
    os.close(fd)
    assert handle.wait() == 1
    assert (disk_folder / "closed").read_bytes() == data.numpy().tobytes()


def test_an_appending_descriptor_is_refused(handle, disk_folder):
    fd = os.open(disk_folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with pytest.raises(ValueError, match="O_APPEND"):
            handle.async_pwrite(torch.zeros(8), fd)
    finally:
        os.close(fd)


def test_free_gives_back_once_and_only_what_a_handle_made():
    example = torch.empty(0, dtype=torch.float32)
    first, second = lt.aio_handle(), lt.aio_handle()
    mine = first.new_cpu_locked_tensor(1000, example_tenosr=example)
    assert type(mine) is lt.LockedTensor and mine.dtype == torch.float32 and mine.shape == (1000,)
    first.close()
    assert second.is_pinned(mine)
    before = lt.memory_allocated()
    assert second.free_cpu_locked_tensor(mine) is True
    assert mine.numel() == 0
    assert lt.memory_allocated() < before
    assert second.free_cpu_locked_tensor(mine) is False
    with lt.locked_memory():
        others = torch.empty(1000)
    assert second.free_cpu_locked_tensor(others) is False
    assert second.free_cpu_locked_tensor(torch.empty(10)) is False
    second.close()


def test_free_under_a_live_view_waits_for_it():
    with lt.aio_handle() as handle:
        tensor = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
        view = tensor[100:200]
        assert handle.free_cpu_locked_tensor(tensor) is True
        view.fill_(1)
        assert view.sum() == 100
        assert handle.is_pinned(view)
        assert handle.free_cpu_locked_tensor(tensor) is False
        before = lt.memory_allocated()
        del tensor, view
        gc.collect()
        assert lt.memory_allocated() <= before - (1 << 20)


def test_free_with_an_export_or_an_operation_in_flight_defers(disk_folder):
    with lt.aio_handle() as handle:
        tensor = handle.new_cpu_locked_tensor(4 << 20, torch.empty(0, dtype=torch.uint8))
        tensor.copy_(pattern(4 << 20))
        exported = torch.from_dlpack(tensor)
        assert handle.free_cpu_locked_tensor(tensor) is True
        assert torch.equal(exported, pattern(4 << 20))
        another = handle.new_cpu_locked_tensor(4 << 20, torch.empty(0, dtype=torch.uint8))
        another.copy_(pattern(4 << 20))
        handle.async_pwrite(another, disk_folder / "file")
        assert handle.free_cpu_locked_tensor(another) is True
        handle.wait()
        assert (disk_folder / "file").read_bytes() == pattern(4 << 20).numpy().tobytes()


# --- errors -------------------------------------------------------------------------------------


def test_errors_say_what_was_wrong_and_leave_the_handle_usable(handle, folder):
    data = pattern(8192)
    good = folder / "good"
    with pytest.raises(FileNotFoundError) as missing:
        handle.sync_pread(data, folder / "missing")
    assert missing.value.filename == str(folder / "missing")
    with pytest.raises(IsADirectoryError) as directory:
        handle.sync_pwrite(data, folder)
    assert directory.value.filename == str(folder)
    with pytest.raises(ValueError, match="-1"):
        handle.sync_pwrite(data, good, -1)
    with pytest.raises(ValueError, match="beyond"):
        handle.sync_pwrite(data, good, (1 << 63) - 100)
    with pytest.raises(TypeError, match="[Ss]parse"):
        handle.sync_pwrite(torch.eye(3).to_sparse(), good)
    with pytest.raises(ValueError, match="meta"):
        handle.sync_pwrite(torch.empty(3, device="meta"), good)
    with pytest.raises(ValueError, match="clone"):
        handle.sync_pread(torch.zeros(1).expand(5), good)
    with pytest.raises(ValueError):
        handle.sync_pwrite(data, "nul\0byte")
    os.mkfifo(folder / "fifo")
    with pytest.raises(OSError) as fifo:
        handle.sync_pread(data, folder / "fifo")
    assert fifo.value.filename == str(folder / "fifo")
    assert not good.exists()
    handle.sync_pwrite(data, good)
    assert good.read_bytes() == data.numpy().tobytes()


def test_reading_past_the_end_says_what_was_found(handle, folder):
    path = folder / "short"
    path.write_bytes(bytes(1050))
    data = pattern(8192)
    with pytest.raises(lt.ShortReadError) as short:
        handle.sync_pread(data, path)
    assert (short.value.wanted, short.value.found) == (8192, 1050)
    assert isinstance(short.value, EOFError)
    assert torch.equal(data, pattern(8192))
    with pytest.raises(lt.ShortReadError) as beyond:
        handle.sync_pread(data, path, 5000)
    assert beyond.value.found == 0


def test_a_closed_handle_says_so(engine, disk_folder):
    handle = lt.aio_handle(engine=engine)
    handle.close()
    handle.close()
    for call in [
        lambda: handle.sync_pread(torch.zeros(4), disk_folder / "x"),
        lambda: handle.async_pwrite(torch.zeros(4), disk_folder / "x"),
        handle.wait,
        handle.stats,
    ]:
        with pytest.raises(ValueError, match="closed"):
            call()


def test_settings_out_of_bounds_are_refused():
    for wrong in [{"queue_depth": 0}, {"queue_depth": -1}, {"queue_depth": 65536}, {"block_size": 0}]:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            lt.aio_handle(**wrong)
    with pytest.raises(ValueError, match="direct"):
        lt.aio_handle(direct="sometimes")
    with pytest.raises(ValueError, match="engine"):
        lt.aio_handle(engine="steam")


def test_direct_require_and_never(engine, disk_folder, tmpfs_folder):
    data = locked_bytes(1 << 20)
    with lt.aio_handle(engine=engine, direct="require") as handle:
        handle.sync_pwrite(data, disk_folder / "file")
        with pytest.raises(OSError) as refused:
            handle.sync_pwrite(data, tmpfs_folder / "file")
        assert refused.value.filename == str(tmpfs_folder / "file")
    with lt.aio_handle(engine=engine, direct="never") as handle:
        handle.sync_pwrite(data, disk_folder / "file")
        assert handle.stats().bytes_buffered == 1 << 20


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_failure_among_eight_is_raised_and_the_others_are_done(handle, folder):
    handle.sync_pwrite(pattern(100_000), folder / "warm")  # the file is cached, the chunks registered
    before = open_descriptors()
    data = [pattern(100_000, seed=i) for i in range(8)]
    for i, tensor in enumerate(data):
        path = folder / f"file{i}" if i != 2 else folder / "no such folder" / "file"
        assert handle.async_pwrite(tensor, path) == 0
    with pytest.raises(FileNotFoundError) as failed:
        handle.wait()
    assert failed.value.filename.endswith("no such folder/file")
    assert failed.value.others == []
    for i in (0, 1, 3, 4, 5, 6, 7):
        assert (folder / f"file{i}").read_bytes() == data[i].numpy().tobytes()
        (folder / f"file{i}").unlink()
    assert handle.wait() == 0
    assert open_descriptors() <= before
    handle.sync_pwrite(data[0], folder / "again")


def test_several_failures_come_in_order_of_submission(handle, folder):
    for name in ["b", "a", "c"]:
        handle.async_pread(torch.empty(10), folder / name)
    with pytest.raises(FileNotFoundError) as failed:
        handle.wait()
    names = [failed.value.filename] + [other.filename for other in failed.value.others]
    assert names == [str(folder / name) for name in ["b", "a", "c"]]


def test_a_failed_write_leaves_the_size_as_it_was(handle, disk_folder):
    path = disk_folder / "grown"
    path.write_bytes(b"before")
    with pytest.raises(OSError):
        handle.sync_pwrite(locked_bytes(4096), path, 1 << 61)
    assert path.read_bytes() == b"before"


def test_validate_reads_back(handle, disk_folder):
    data = pattern(3 << 20)
    path = str(disk_folder / "file")
    assert handle.pwrite(data, path, True, False) == 1
    assert handle.pread(torch.empty_like(data), path, True, False) == 1


# --- waiting, threads, lifetimes ----------------------------------------------------------------


def test_dropping_a_handle_finishes_what_is_in_flight(engine, disk_folder):
    data = pattern(16 << 20)
    handle = lt.aio_handle(engine=engine, queue_depth=2)
    handle.async_pwrite(data, disk_folder / "dropped")
    del handle
    gc.collect()
    assert (disk_folder / "dropped").read_bytes() == data.numpy().tobytes()


def test_another_python_thread_runs_while_one_waits(handle, disk_folder):
    data = locked_bytes(256 << 20)
    count, is_stopping = 0, threading.Event()

    def counting():
        nonlocal count
        while not is_stopping.is_set():
            count += 1

    thread = threading.Thread(target=counting)
    handle.async_pwrite(data, disk_folder / "file")
    thread.start()
    before = count
    handle.wait()
    assert count - before > 1000
    is_stopping.set()
    thread.join()


def test_threads_sharing_a_handle_get_their_own_bytes(handle, folder):
    failures = []

    def work(number):
        try:
            own = locked_bytes(300_000) if number % 2 else torch.empty(300_000, dtype=torch.uint8)
            for turn in range(20):
                expected = pattern(300_000, seed=100 * number + turn)
                own.copy_(expected)
                handle.sync_pwrite(own, folder / f"thread{number}", turn * 7)
                own.zero_()
                handle.sync_pread(own, folder / f"thread{number}", turn * 7)
                assert torch.equal(own, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_thread_may_end_before_what_it_started(handle, folder):
    data = pattern(8 << 20)

    def start(number):
        for i in range(10):
            handle.async_pwrite(data[i : (1 << 20) + i], folder / f"file{number}", i << 20)

    for number in range(8):
        thread = threading.Thread(target=start, args=(number,))
        thread.start()
        thread.join()
    assert handle.wait() == 80
    expected = b"".join(data[i : (1 << 20) + i].numpy().tobytes() for i in range(10))
    assert all((folder / f"file{number}").read_bytes() == expected for number in range(8))


def test_threads_writing_neighbours_in_one_page_keep_each_others_bytes(engine, disk_folder):
    path = disk_folder / "adjacent"
    data = [pattern(1000, seed=i) for i in range(64)]

    def work(first):
        with lt.aio_handle(engine=engine) as handle:
            for i in range(first, 64, 8):
                handle.async_pwrite(data[i], path, 1000 * i)
            handle.wait()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == b"".join(tensor.numpy().tobytes() for tensor in data)


@pytest.mark.parametrize("disturb", ["del", "resize_", "empty storage", "set_", "share_memory_"])
@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
def test_a_tensor_may_change_or_go_while_its_write_is_pending(engine, disk_folder, disturb, is_locked):
    nbytes = 8 << 20
    expected = pattern(nbytes)
    with lt.aio_handle(engine=engine, queue_depth=1, block_size=65536) as handle:
        tensors = []
        for i in range(4):
            tensor = locked_bytes(nbytes) if is_locked else torch.empty(nbytes, dtype=torch.uint8)
            tensor.copy_(expected)
            tensors.append(tensor)
            handle.async_pwrite(tensor, disk_folder / f"file{i}")
        del tensor
        for tensor in tensors:
            if disturb == "resize_":
                tensor.resize_(nbytes * 2)
            elif disturb == "empty storage":
                tensor.untyped_storage().resize_(0)
            elif disturb == "set_":
                tensor.set_(torch.zeros(1, dtype=torch.uint8))
            elif disturb == "share_memory_":
                tensor.share_memory_()
        tensors.clear()
        del tensor
        gc.collect()
        fill = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(4)]  # takes freed memory
        assert handle.wait() == 4
        del fill
        for i in range(4):
            digest = hashlib.sha256((disk_folder / f"file{i}").read_bytes()).hexdigest()
            assert digest == hashlib.sha256(expected.numpy().tobytes()).hexdigest()


def test_a_pending_read_never_writes_to_freed_memory(handle, disk_folder):
    nbytes = 16 << 20
    handle.sync_pwrite(pattern(nbytes), disk_folder / "file")
    for is_locked in (True, False):
        tensor = locked_bytes(nbytes) if is_locked else torch.empty(nbytes, dtype=torch.uint8)
        handle.async_pread(tensor, disk_folder / "file")
        tensor.untyped_storage().resize_(0)
        others = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
        with lt.locked_memory():
            others.append(torch.zeros(nbytes, dtype=torch.uint8))
        assert handle.wait() == 1
        assert all(int(other.max()) == 0 for other in others)


def test_many_operations_leak_no_descriptor(handle, disk_folder):
    data = locked_bytes(4096)
    for i in range(50):
        handle.async_pwrite(data, disk_folder / f"file{i}")
    handle.wait()
    before = open_descriptors()
    for i in range(500):
        handle.async_pwrite(data, disk_folder / f"file{i % 50}", 4096 * (i // 50))
    handle.wait()
    assert open_descriptors() <= before
    for i in range(50):
        (disk_folder / f"file{i}").unlink()
    assert handle.wait() == 0


def test_a_replaced_file_is_never_served_stale(handle, folder):
    path = folder / "file"
    data = torch.empty(5000, dtype=torch.uint8)
    for turn in range(3):
        (folder / "next").write_bytes(pattern(5000, seed=turn).numpy().tobytes())
        os.replace(folder / "next", path)
        handle.sync_pread(data, path)
        assert torch.equal(data, pattern(5000, seed=turn))


def test_a_forked_child_may_not_use_the_handle(handle, disk_folder):
    data = locked_bytes(1 << 20)
    handle.async_pwrite(data, disk_folder / "file")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            handle.wait()
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert handle.wait() == 1


# --- beyond DeepSpeed ---------------------------------------------------------------------------


def test_tickets_wait_ask_and_raise_once(handle, disk_folder):
    data = pattern(1 << 20)
    ticket = handle.submit_pwrite(data, disk_folder / "file")
    assert ticket.wait() == 1 << 20
    assert ticket.done() and ticket.exception() is None
    failing = handle.submit_pread(data, disk_folder / "missing")
    with pytest.raises(FileNotFoundError):
        failing.wait()
    assert handle.wait() == 2
    untaken = handle.submit_pread(data, disk_folder / "missing")
    with pytest.raises(FileNotFoundError):
        handle.wait()
    assert isinstance(untaken.exception(), FileNotFoundError)


def test_vectored_lists_fill_consecutive_bytes(handle, folder):
    parts = [pattern(size, seed=size) for size in (5, 4096, 100_000, 0, 77)]
    path = folder / "parts"
    assert handle.pwritev(parts, path, 11) == sum(part.nbytes for part in parts)
    assert path.read_bytes()[11:] == b"".join(part.numpy().tobytes() for part in parts)
    back = [torch.empty_like(part) for part in parts]
    assert handle.preadv(back, path, 11) == sum(part.nbytes for part in parts)
    assert all(torch.equal(a, b) for a, b in zip(back, parts))


def test_a_batch_gives_a_ticket_for_each_request(handle, disk_folder):
    pool = locked_bytes(64 * 4096)
    pool.copy_(pattern(64 * 4096))
    path = disk_folder / "batch"
    blocks = pool.view(64, 4096)
    tickets = handle.submit_batch([lt.IoRequest("write", blocks[i], path, 4096 * i) for i in range(64)])
    assert [ticket.wait() for ticket in tickets] == [4096] * 64
    assert path.read_bytes() == pattern(64 * 4096).numpy().tobytes()
    with pytest.raises(ValueError, match="read"):
        handle.submit_batch([("erase", blocks[0], path)])


def test_a_ticket_can_be_awaited(handle, disk_folder):
    import asyncio

    data = [pattern(1 << 20, seed=i) for i in range(8)]

    async def copy(i):
        assert await handle.submit_pwrite(data[i], disk_folder / f"file{i}") == 1 << 20
        back = torch.empty_like(data[i])
        await handle.submit_pread(back, disk_folder / f"file{i}")
        return torch.equal(back, data[i])

    async def main():
        return await asyncio.gather(*(copy(i) for i in range(8)))

    assert asyncio.run(main()) == [True] * 8

    async def missing():
        await handle.submit_pread(data[0], disk_folder / "missing")

    with pytest.raises(FileNotFoundError):
        asyncio.run(missing())


def test_fsync_of_a_fifo_is_an_error_at_once(handle, disk_folder):
    os.mkfifo(disk_folder / "fifo")
    with pytest.raises(OSError) as caught:
        handle.fsync(disk_folder / "fifo")
    assert caught.value.errno == errno.EINVAL and caught.value.filename == str(disk_folder / "fifo")


@pytest.mark.parametrize("offset", [1.5, numpy.float32(3.7), torch.tensor(4.5), "1", None])
def test_an_offset_that_is_no_whole_number_is_refused(handle, disk_folder, offset):
    path = disk_folder / "file"
    data = torch.ones(16, dtype=torch.uint8)
    for call in (handle.sync_pwrite, handle.async_pwrite, handle.submit_pwrite):
        with pytest.raises(TypeError):
            call(data, path, offset)
    with pytest.raises(TypeError, match="a request's file_offset must be a whole number, got "):
        handle.submit_batch([("write", data, path, offset)])
    assert not path.exists()
    handle.sync_pwrite(data, path, numpy.int64(3))
    handle.sync_pwrite(data, path, torch.tensor(4))
    assert path.read_bytes() == bytes(3) + bytes([1]) * 17


@pytest.mark.parametrize("number", [4096.5, numpy.float32(4096), torch.tensor(4096.0)])
def test_settings_that_are_no_whole_numbers_are_refused(number):
    for setting in ("block_size", "queue_depth", "intra_op_parallelism", "max_pending"):
        with pytest.raises(TypeError):
            lt.aio_handle(**{setting: number})
    with lt.aio_handle() as handle, pytest.raises(TypeError):
        handle.new_cpu_locked_tensor(number, torch.empty(0))


def test_fsync_takes_paths_and_descriptors(handle, disk_folder):
    path = disk_folder / "file"
    handle.async_pwrite(pattern(100_000), path)
    handle.fsync(path)
    assert path.read_bytes() == pattern(100_000).numpy().tobytes()
    with open(path) as file:
        handle.fsync(file.fileno(), data_only=True)
    with pytest.raises(FileNotFoundError):
        handle.fsync(disk_folder / "missing")


@pytest.mark.needs_cuda
def test_device_tensors_are_staged_both_ways(handle, disk_folder):
    for nbytes in (1, 4097, (9 << 20) + 13):
        data = pattern(nbytes).cuda()
        handle.sync_pwrite(data, disk_folder / "file", 5)
        back = torch.zeros_like(data)
        handle.async_pread(back, disk_folder / "file", 5)
        handle.wait()
        assert torch.equal(back, data)
    columns = pattern(1 << 20).cuda().view(1024, 1024)[:, :100]
    handle.sync_pwrite(columns, disk_folder / "columns")
    assert (disk_folder / "columns").read_bytes() == columns.cpu().contiguous().numpy().tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        handle.sync_pread(columns, disk_folder / "columns")


NOT_BUFFERS = {
    "fake": lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.zeros(4)),
    "zero": lambda: torch._efficientzerotensor(4),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "none": lambda: None,
}


@pytest.mark.parametrize("what", NOT_BUFFERS)
def test_what_has_no_strided_memory_is_a_type_error_at_once(disk_folder, what):
    buffer = NOT_BUFFERS[what]()
    path = disk_folder / "file"
    path.write_bytes(bytes(64))
    with lt.aio_handle() as handle:
        for use in (handle.sync_pread, handle.sync_pwrite, handle.async_pwrite, handle.submit_pread):
            with pytest.raises(TypeError):
                use(buffer, path)
        with pytest.raises(TypeError):
            handle.submit_batch([("read", buffer, path)])
        assert handle.wait() == 0
    assert path.read_bytes() == bytes(64)


def test_requests_that_are_none_say_what_is_wanted(disk_folder):
    path = disk_folder / "file"
    tensor = torch.zeros(4)
    wrong = {
        "a request must be an IoRequest, got int 1": 1,
        "a request's buffer must be a torch.Tensor, got None": lt.IoRequest("read", None, path),
        "a request's operation must be a str, got int 1": (1, tensor, path),
        "a request's file_offset must be a whole number, got str 'x'": ("read", tensor, path, "x"),
        "a request's durable must be a bool, got str 'x'": ("write", tensor, path, 0, "x"),
        "a request's file must be a path or an open descriptor (int), got None": ("read", tensor, None),
    }
    with lt.aio_handle() as handle:
        for message, request in wrong.items():
            with pytest.raises(TypeError, match=re.escape(message)):
                handle.submit_batch([lt.IoRequest("write", tensor, path), request])
        with pytest.raises(TypeError, match="not iterable"):
            handle.submit_batch(None)
        with pytest.raises(ValueError, match='"read" or "write"'):
            handle.submit_batch(["read"])
        assert handle.wait() == 0
    assert not path.exists()


def test_an_empty_path_is_a_missing_file_with_its_name():
    tensor = torch.zeros(4)
    with lt.aio_handle() as handle:
        for use in (handle.sync_pread, handle.sync_pwrite, handle.async_pread, handle.submit_pwrite):
            with pytest.raises(FileNotFoundError) as missing:
                use(tensor, "")
            assert missing.value.filename == ""
        with pytest.raises(FileNotFoundError):
            handle.fsync("")
        assert handle.wait() == 0


def test_reading_into_elements_that_share_memory_is_refused(disk_folder):
    path = disk_folder / "file"
    path.write_bytes(bytes(1000))
    base = torch.arange(100, dtype=torch.uint8)
    with lt.aio_handle() as handle:
        for shared in (base[:1].expand(10), base.as_strided((10, 10), (2, 1)), base.unfold(0, 4, 1)):
            with pytest.raises(ValueError, match="share memory"):
                handle.sync_pread(shared, path)
        for apart in (base[::3], base.view(10, 10).t(), base.view(4, 25)[:, 1:9:2], base.view(1, 100)):
            handle.sync_pread(apart, path)
            assert bool((apart == 0).all())


def test_messages_of_refused_files_are_sentences(disk_folder, tmpfs_folder):
    tensor = torch.zeros(4096, dtype=torch.uint8)
    os.mkfifo(disk_folder / "fifo")
    with lt.aio_handle() as handle, lt.aio_handle(direct="require") as direct:
        with pytest.raises(OSError, match=r"cannot open for reading \(it is no regular file or block device\)"):
            handle.sync_pread(tensor, "/dev/zero")
        with pytest.raises(OSError, match=r"cannot open for writing \(it is no regular file or block device\)"):
            handle.sync_pwrite(tensor, disk_folder / "fifo")
        with pytest.raises(OSError, match="cannot do direct I/O, which this file system does not grant: Operation not supported: "):
            direct.sync_pwrite(tensor, tmpfs_folder / "file")
    with pytest.raises(ValueError, match="closed"):
        with handle:
            pass


class WithoutInit(lt.AioHandle):
    def __init__(self):
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: lt.AioHandle.__new__(lt.AioHandle),
        lambda: WithoutInit.__new__(WithoutInit),
        lambda: WithoutInit(),
    ],
    ids=["__new__", "subclass", "subclass without __init__"],
)
def test_a_handle_that_was_never_initialized_is_a_type_error(make, disk_folder):
    tensor = torch.zeros(4)
    for use in (
        lambda handle: handle.closed,
        lambda handle: handle.engine,
        repr,
        lambda handle: handle.get_block_size(),
        lambda handle: handle.sync_pread(tensor, disk_folder / "file"),
        lambda handle: handle.submit_pwrite(tensor, disk_folder / "file"),
        lambda handle: handle.submit_batch([]),
        lambda handle: handle.preadv([tensor], disk_folder / "file"),
        lambda handle: handle.wait(),
        lambda handle: handle.stats(),
        lambda handle: handle.close(),
        lambda handle: handle.__enter__(),
    ):
        with pytest.raises(TypeError, match="__init__"):
            use(make())
    assert not (disk_folder / "file").exists()


def test_other_compiled_objects_that_were_never_initialized_are_type_errors():
    from locked_tensor import _C

    ticket = _C.IoTicketBase.__new__(_C.IoTicketBase)
    for use in (ticket.wait, ticket.done, ticket.exception, lambda: ticket.bytes):
        with pytest.raises(TypeError, match="__init__"):
            use()


def test_help_tells_what_each_method_returns():
    returns = {
        "read": "Returns 0",
        "write": "Returns 0",
        "pread": "Returns 0 when asynchronous, else the count of completed operations, 1",
        "pwrite": "Returns 0 when asynchronous, else the count of completed operations, 1",
        "sync_pread": "returns 1",
        "sync_pwrite": "returns 1",
        "async_pread": "returns 0",
        "async_pwrite": "returns 0",
        "preadv": "Returns the bytes moved",
        "pwritev": "Returns the bytes moved",
        "wait": "returns how many operations have ended",
        "fsync": "Returns None",
    }
    for name, sentence in returns.items():
        assert sentence in getattr(lt.AioHandle, name).__doc__, name
    for name in ("async_pread", "async_pwrite"):
        assert "fd= is another way to give the descriptor" in getattr(lt.AioHandle, name).__doc__
    for name in ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism"):
        assert len(getattr(lt.AioHandle, f"get_{name}").__doc__.splitlines()[-1]) > 10
