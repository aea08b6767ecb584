"""Buffers that are not what they seem: memory that cannot be touched, moves away, or overlaps."""

import errno
import mmap
import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch

import locked_tensor as lt

NBYTES = 256 << 10


def pattern(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def locked_bytes(nbytes):
    with lt.locked_memory():
        return torch.zeros(nbytes, dtype=torch.uint8)


def map_without_writing(path, nbytes):
    """A tensor over a map that may be read only."""
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it is not writable
        return torch.frombuffer(
            mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ), dtype=torch.uint8, count=nbytes
        )


def views_of(tensor):
    """Whole, in part, strided, and in such small runs that every page has many."""
    half = tensor.numel() // 2
    rows = tensor.view(-1, 4096)
    return {"whole": tensor, "odd": tensor[half + 5 :], "columns": rows[:, 1:3000], "transposed": rows.t()}


# --- memory that cannot be touched --------------------------------------------------------------


@pytest.mark.parametrize("view", ["whole", "odd", "columns", "transposed"])
@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
def test_reading_into_memory_that_may_not_be_written_is_a_bad_address(engine, folder, view, is_locked):
    pattern(NBYTES).numpy().tofile(folder / "mapped")
    tensor = map_without_writing(folder / "mapped", NBYTES)
    if is_locked:
        lt.lock_(tensor)
    path = folder / "file"
    pattern(NBYTES, 1).numpy().tofile(path)
    with lt.aio_handle(engine=engine) as handle:
        with pytest.raises(OSError) as refused:
            handle.sync_pread(views_of(tensor)[view], path)
        assert (refused.value.errno, refused.value.filename) == (errno.EFAULT, str(path))
        handle.async_pread(views_of(tensor)[view], path)
        with pytest.raises(OSError, match="Bad address"):
            handle.wait()
        handle.sync_pwrite(views_of(tensor)[view], folder / "out")  # it may be read
    assert (folder / "out").read_bytes() == views_of(pattern(NBYTES))[view].contiguous().numpy().tobytes()
    assert (folder / "mapped").read_bytes() == pattern(NBYTES).numpy().tobytes()
    if is_locked:
        lt.unlock_(tensor)


@pytest.mark.parametrize("view", ["whole", "odd", "columns", "transposed"])
def test_a_map_of_a_file_that_was_cut_is_a_bad_address_both_ways(engine, folder, view):
    mapped = folder / "mapped"
    pattern(NBYTES).numpy().tofile(mapped)
    tensor = torch.from_file(str(mapped), shared=True, size=NBYTES, dtype=torch.uint8)
    path = folder / "file"
    with lt.aio_handle(engine=engine) as handle:
        handle.sync_pwrite(views_of(tensor)[view], path)
        assert path.read_bytes() == views_of(pattern(NBYTES))[view].contiguous().numpy().tobytes()
        os.truncate(mapped, 8192)
        for use in (handle.sync_pwrite, handle.sync_pread):
            with pytest.raises(OSError) as refused:
                use(views_of(tensor)[view], path)
            assert (refused.value.errno, refused.value.filename) == (errno.EFAULT, str(path))
        handle.sync_pwrite(tensor[:8192], path)  # what is left
        assert path.read_bytes()[:8192] == pattern(NBYTES)[:8192].numpy().tobytes()


@pytest.mark.parametrize("view", ["whole", "odd", "columns", "transposed"])
def test_memory_of_others_that_can_be_touched_moves_as_any(engine, folder, view):
    array = pattern(NBYTES, 2).numpy().copy()
    (folder / "mapped").write_bytes(bytes(NBYTES))
    kinds = {
        "numpy": torch.from_numpy(array),
        "shared": pattern(NBYTES, 2).share_memory_(),
        "file map": torch.from_file(str(folder / "mapped"), shared=True, size=NBYTES, dtype=torch.uint8),
        "memmap": torch.from_numpy(np.memmap(folder / "mapped", np.uint8, "r+", shape=NBYTES)),
    }
    with lt.aio_handle(engine=engine) as handle:
        for kind, tensor in kinds.items():
            tensor.copy_(pattern(NBYTES, 2))
            handle.sync_pwrite(views_of(tensor)[view], folder / "file", 3)
            expected = views_of(pattern(NBYTES, 2))[view]
            assert (folder / "file").read_bytes()[3:] == expected.contiguous().numpy().tobytes(), kind
            tensor.zero_()
            handle.sync_pread(views_of(tensor)[view], folder / "file", 3)
            assert torch.equal(views_of(tensor)[view], expected), kind


# --- storages that change under a read ----------------------------------------------------------


def wide(tensor):
    tensor.resize_(2 * tensor.numel())


def shared(tensor):
    tensor.share_memory_()


def grown_storage(tensor):
    tensor.untyped_storage().resize_(2 * tensor.nbytes)


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
@pytest.mark.parametrize("change", [wide, shared, grown_storage])
def test_a_storage_that_moves_under_a_read_makes_it_fail(engine, disk_folder, change, is_locked):
    nbytes = 32 << 20
    expected = pattern(nbytes)
    path = disk_folder / "file"
    with lt.aio_handle(engine=engine, queue_depth=1, block_size=65536) as handle:
        handle.sync_pwrite(expected, path)
        tensor = locked_bytes(nbytes) if is_locked else torch.zeros(nbytes, dtype=torch.uint8)
        ticket = handle.submit_pread(tensor, path)
        change(tensor)
        with pytest.raises(RuntimeError, match="resized or moved.*wait for a read"):
            ticket.wait()
        handle.async_pread(tensor[: 4 << 10], path)  # the handle and the tensor are as good as before
        handle.async_pread(tensor[4 << 10 :][: nbytes - (4 << 10)], path, 4 << 10)
        assert handle.wait() == 3
        assert torch.equal(lt.as_plain(tensor)[:nbytes], expected)
        handle.async_pread(tensor[:nbytes], path)
        if change is wide:
            change(tensor)
            with pytest.raises(RuntimeError, match="resized or moved"):
                handle.wait()
        assert handle.wait() in (0, 1)


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
def test_what_leaves_the_read_bytes_in_their_storage_stays_silent(engine, disk_folder, is_locked):
    nbytes = 16 << 20
    expected = pattern(nbytes)
    path = disk_folder / "file"

    def redirect(tensor):
        tensor.data = torch.zeros(10, dtype=torch.uint8)

    def set_elsewhere(tensor):
        tensor.set_(torch.zeros(10, dtype=torch.uint8))

    def smaller(tensor):
        tensor.resize_(10)

    with lt.aio_handle(engine=engine, queue_depth=1, block_size=65536) as handle:
        handle.sync_pwrite(expected, path)
        for change in (redirect, set_elsewhere, smaller):
            tensor = locked_bytes(nbytes) if is_locked else torch.zeros(nbytes, dtype=torch.uint8)
            kept = tensor.view(-1)
            ticket = handle.submit_pread(tensor, path)
            change(tensor)
            assert ticket.wait() == nbytes
            assert torch.equal(lt.as_plain(kept), expected), change.__name__
        tensor = locked_bytes(nbytes) if is_locked else torch.zeros(nbytes, dtype=torch.uint8)
        ticket = handle.submit_pread(tensor, path)
        tensor.untyped_storage().resize_(0)
        assert ticket.wait() == nbytes
        tensor = locked_bytes(nbytes) if is_locked else torch.zeros(nbytes, dtype=torch.uint8)
        handle.async_pread(tensor, path)
        del tensor
        assert handle.wait() == len(("redirect", "set", "smaller", "empty", "del"))


def test_a_storage_may_change_after_its_read_has_ended(handle_of_one, disk_folder):
    path = disk_folder / "file"
    handle_of_one.sync_pwrite(pattern(4096), path)
    first, second = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    ticket = handle_of_one.submit_pread(first, path)
    while not ticket.done():
        pass
    first.resize_(1 << 20)
    handle_of_one.async_pread(second, path)
    assert handle_of_one.wait() == 2
    assert ticket.wait() == 4096
    assert torch.equal(first[:4096], pattern(4096))


@pytest.fixture
def handle_of_one(engine):
    with lt.aio_handle(engine=engine) as handle:
        yield handle


# --- tensors that share memory ------------------------------------------------------------------


def test_a_list_that_shares_memory_is_refused_to_be_read_into(handle_of_one, folder):
    path = folder / "file"
    pattern(4000).numpy().tofile(path)
    base = torch.zeros(1000, dtype=torch.uint8)
    rows = torch.zeros(40, 100, dtype=torch.uint8)
    for together in (
        [base, base],
        [base[:500], base[499:]],
        [rows[:, :50], rows[:, 49:]],
        [rows[:, :50], rows[3]],
        [base[::2], base[::3]],
        [base[900:], base[:10], base[5:20]],
    ):
        with pytest.raises(ValueError, match="share memory"):
            handle_of_one.preadv(together, path)
        assert handle_of_one.pwritev(together, folder / "out") == sum(each.nbytes for each in together)
    assert bool((base == 0).all()) and bool((rows == 0).all())
    for apart in (
        [base[500:], base[:500]],
        [base[::2], base[1::2]],
        [rows[:, :50], rows[:, 50:]],
        [rows[::2], rows[1::2]],
        [base[:0], base, base[5:5]],
        [base],
        [],
    ):
        assert handle_of_one.preadv(apart, path) == sum(each.nbytes for each in apart)
        if apart:
            together = torch.cat([each.flatten() for each in apart])
            assert torch.equal(together, pattern(4000)[: together.numel()])


# --- direct="require" ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
def test_direct_required_moves_whole_sectors_direct_and_refuses_the_rest(engine, disk_folder, is_locked):
    data = pattern(64 << 10)
    tensor = lt.lock(data) if is_locked else data.clone()
    path = disk_folder / "file"
    with lt.aio_handle(engine=engine, direct="require") as handle:
        handle.sync_pwrite(tensor, path)
        handle.sync_pwrite(tensor[4096:8192], path, 4096)
        for use in (handle.sync_pwrite, handle.async_pwrite, handle.submit_pread, handle.sync_pread):
            for wrong, offset in ((tensor[:1001], 0), (tensor[:4096], 3), (tensor[:4095], 1)):
                with pytest.raises(ValueError, match=r'"require" moves whole sectors.*multiples of \d+'):
                    use(wrong, path, offset)
        with pytest.raises(ValueError, match="1001 bytes at offset 0"):
            handle.preadv([tensor[:1001], tensor[1001:4096]], path)
        assert handle.wait() == 0
        assert handle.stats().bytes_buffered == 0
        back = torch.zeros_like(tensor)
        handle.sync_pread(back, path)
        assert torch.equal(lt.as_plain(back), data)
        assert handle.stats().bytes_buffered == 0
    assert path.read_bytes() == data.numpy().tobytes()


def test_a_batch_with_a_refused_request_leaves_the_other_files_as_they_were(engine, disk_folder):
    path = disk_folder / "file"
    path.write_bytes(b"as it was")
    with lt.aio_handle(engine=engine) as handle:
        with pytest.raises(ValueError, match="-1"):
            handle.submit_batch(
                [lt.IoRequest("write", pattern(1 << 20), path), lt.IoRequest("write", pattern(9), path, -1)]
            )
        assert handle.wait() == 0
        assert path.read_bytes() == b"as it was"
        handle.sync_pwrite(pattern(20_000), path)
    assert path.read_bytes() == pattern(20_000).numpy().tobytes()


def test_a_file_map_that_dies_under_a_read_kills_nobody(disk_folder):
    program = """
    import os, sys, torch, locked_tensor as lt
    mapped, path = sys.argv[1:]
    open(mapped, "wb").write(bytes(1 << 20))
    tensor = torch.from_file(mapped, shared=True, size=1 << 20, dtype=torch.uint8)
    os.truncate(mapped, 0)
    with lt.aio_handle() as handle:
        for use in (handle.sync_pwrite, handle.sync_pread):
            try:
                use(tensor, path)
            except (OSError, EOFError) as error:
                print(type(error).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(disk_folder / "mapped"), str(disk_folder / "file")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["OSError", "ShortReadError"], "")
