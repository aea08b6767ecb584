"""`open_writer`: exact bytes whatever the sizes, torch.save through it, errors at the write or the close."""

import errno
import gc
import io
import os
import stat
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import locked_tensor as lt

BUFFER = 8192
SIZES = [0, 1, 4095, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 5 * BUFFER + 123]


@pytest.fixture
def handle(engine):
    with lt.aio_handle(engine=engine) as handle:
        yield handle


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_file_has_the_bytes_that_were_written(handle, folder, nbytes):
    data = os.urandom(nbytes)
    with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer:
        assert writer.write(data) == nbytes
        assert writer.tell() == nbytes
    assert (folder / "file").read_bytes() == data


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3 * BUFFER) | st.sampled_from(["flush", "fsync"]), max_size=12))
def test_any_order_of_writes_and_flushes_gives_the_same_file(tmp_path_factory, steps):
    path = tmp_path_factory.getbasetemp() / "written"
    expected = b""
    with lt.aio_handle() as handle:
        with lt.open_writer(handle, path, buffer_bytes=BUFFER) as writer:
            for step in steps:
                if isinstance(step, int):
                    data = os.urandom(step)
                    writer.write(data)
                    expected += data
                else:
                    getattr(writer, step)()
                    assert path.read_bytes() == expected
                assert writer.tell() == len(expected)
        assert path.read_bytes() == expected


def test_whole_buffers_go_directly(disk_folder):
    with lt.aio_handle() as handle:
        with lt.open_writer(handle, disk_folder / "file") as writer:
            for _ in range(5):
                writer.write(bytes(8 << 20))
            writer.write(b"end")
        stats = handle.stats()
        assert handle.wait() == 6
    assert (stats.bytes_direct, stats.bytes_bounced, stats.bytes_buffered) == (40 << 20, 0, 3)
    assert (disk_folder / "file").stat().st_size == (40 << 20) + 3


def test_torch_saves_through_it_what_torch_loads(handle, folder):
    state = {"weight": torch.randn(700, 900), "step": 3, "half": torch.ones(5, dtype=torch.float16), "locked": lt.lock(torch.arange(7000))}
    state["view"] = state["weight"][3:5]
    with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer:
        torch.save(state, writer)
        writer.fsync()
    loaded = torch.load(folder / "file")
    assert loaded["step"] == 3
    for name in ("weight", "half", "locked", "view"):
        assert torch.equal(loaded[name], lt.as_plain(state[name])), name
    assert loaded["view"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()


def test_whatever_writes_to_a_file_writes_to_it(handle, folder):
    with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer:
        with zipfile.ZipFile(writer, "w") as archive:
            archive.writestr("name", b"x" * 20_000)
    with zipfile.ZipFile(folder / "file") as archive:
        assert archive.read("name") == b"x" * 20_000
    with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer, io.TextIOWrapper(writer) as text:
        text.write("é☃\n")
    assert (folder / "file").read_text() == "é☃\n"


@pytest.mark.parametrize(
    "data",
    [b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), memoryview(bytearray(b"abcd")).cast("I"), torch.tensor([97, 98, 99, 100], dtype=torch.uint8).numpy()],
    ids=["bytes", "bytearray", "memoryview", "integers", "numpy"],
)
def test_anything_with_bytes_is_taken(handle, folder, data):
    with lt.open_writer(handle, folder / "file") as writer:
        assert writer.write(data) == 4
        writer.writelines([data, data])
    assert (folder / "file").read_bytes() == b"abcd" * 3


def test_text_is_refused_and_the_writer_goes_on(handle, folder):
    with lt.open_writer(handle, folder / "file") as writer:
        with pytest.raises(TypeError, match="bytes-like"):
            writer.write("text")
        writer.write(b"bytes")
    assert (folder / "file").read_bytes() == b"bytes"


def test_the_data_may_be_changed_once_it_was_written(handle, folder):
    data = bytearray(b"a" * 3 * BUFFER)
    with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer:
        writer.write(data)
        data[:] = b"b" * len(data)
    assert (folder / "file").read_bytes() == b"a" * len(data)


def test_a_longer_file_that_was_there_is_replaced(handle, folder):
    (folder / "file").write_bytes(b"x" * 100_000)
    (folder / "file").chmod(0o604)
    with lt.open_writer(handle, folder / "file") as writer:
        writer.write(b"short")
    assert (folder / "file").read_bytes() == b"short"
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o604


def test_a_file_that_is_renamed_meanwhile_gets_the_rest(handle, folder):
    with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer:
        writer.write(b"a" * BUFFER)
        (folder / "file").rename(folder / "other")
        writer.write(b"b" * BUFFER)
    assert os.listdir(folder) == ["other"]
    assert (folder / "other").read_bytes() == b"a" * BUFFER + b"b" * BUFFER


def test_it_is_a_binary_file_for_writing_only(handle, folder):
    writer = lt.open_writer(handle, folder / "file")
    assert (writer.name, writer.mode) == (str(folder / "file"), "wb")
    assert (writer.writable(), writer.readable(), writer.seekable(), writer.closed) == (True, False, False, False)
    for call in (writer.read, writer.fileno, lambda: writer.seek(0), writer.truncate):
        with pytest.raises(io.UnsupportedOperation):
            call()
    writer.close()
    writer.close()
    assert writer.closed and "closed" in repr(writer)
    for call in (lambda: writer.write(b"x"), writer.flush, writer.fsync, writer.tell):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_one_that_is_dropped_writes_what_it_has_and_gives_everything_back(handle, folder):
    handle.sync_pwrite(torch.ones(3), folder / "other")
    before, open_files = lt.memory_allocated(), len(os.listdir("/proc/self/fd"))
    writer = lt.open_writer(handle, folder / "file")
    writer.write(b"abc")
    assert lt.memory_allocated() - before == 16 << 20
    del writer
    gc.collect()
    assert (folder / "file").read_bytes() == b"abc"
    assert (lt.memory_allocated(), len(os.listdir("/proc/self/fd"))) == (before, open_files)


def test_where_no_file_can_be_opened_it_says_so_at_once(handle, folder):
    for path, number in [(folder / "none" / "file", errno.ENOENT), (folder, errno.EISDIR), ("/dev/full", errno.ESPIPE)]:
        with pytest.raises(OSError) as raised:
            lt.open_writer(handle, path)
        assert (raised.value.errno, raised.value.filename) == (number, str(path))
    for nbytes in (0, -4096, 5000):
        with pytest.raises(ValueError, match="multiple of 4096"):
            lt.open_writer(handle, folder / "file", buffer_bytes=nbytes)
    assert os.listdir(folder) == []


def test_a_refusal_is_raised_by_a_later_write_once(handle, folder, files_of_at_most):
    path = folder / "file"
    writer = lt.open_writer(handle, path, buffer_bytes=BUFFER)
    with files_of_at_most(1 << 16), pytest.raises(OSError) as raised:
        for _ in range(20):
            writer.write(bytes(BUFFER))
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    for call in (lambda: writer.write(b"x"), writer.flush, writer.fsync):
        with pytest.raises(ValueError, match="has failed before"):
            call()
    writer.close()
    assert writer.closed
    handle.wait()  # raises nothing once more
    assert path.stat().st_size <= 1 << 16


@pytest.mark.parametrize("end", ["close", "flush", "fsync"])
def test_a_refusal_is_raised_by_what_meets_it(handle, folder, files_of_at_most, end):
    writer = lt.open_writer(handle, folder / "file", buffer_bytes=1 << 20)
    writer.write(bytes(100_000))
    with files_of_at_most(1 << 16), pytest.raises(OSError) as raised:
        getattr(writer, end)()
    assert raised.value.errno == errno.EFBIG
    writer.close()
    assert writer.closed
    handle.wait()


def test_in_a_with_block_the_refusal_is_the_error(handle, folder, files_of_at_most):
    with files_of_at_most(1 << 16), pytest.raises(OSError) as raised:
        with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer:
            writer.write(bytes(1 << 20))
    assert raised.value.errno == errno.EFBIG
    assert writer.closed


def test_torch_save_ends_with_the_refusal(handle, folder, files_of_at_most):
    with files_of_at_most(1 << 16), pytest.raises((OSError, RuntimeError)):
        with lt.open_writer(handle, folder / "file", buffer_bytes=BUFFER) as writer:
            torch.save(torch.ones(1 << 20), writer)
    assert writer.closed
    handle.wait()


def test_a_handle_that_is_closed_first_is_an_error_at_close(folder):
    handle = lt.aio_handle()
    writer = lt.open_writer(handle, folder / "file")
    writer.write(b"abc")
    handle.close()
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="closed"):
        writer.close()
    assert writer.closed
    assert len(os.listdir("/proc/self/fd")) == open_files - 1


def test_under_a_small_lock_limit_it_still_writes(disk_folder, run_with_memlock):
    program = (
        "import sys, locked_tensor as lt\n"
        "with lt.aio_handle() as handle, lt.open_writer(handle, sys.argv[1]) as writer:\n"
        "    writer.write(b'abc' * 10_000_000)\n"
    )
    done = run_with_memlock(8192, "-c", program, str(disk_folder / "file"))
    assert done.returncode == 0, done.stderr
    assert (disk_folder / "file").read_bytes() == b"abc" * 10_000_000


def test_a_full_disk_is_raised_where_it_is_met_and_the_handle_goes_on(tmp_path, small_disk, handle):
    descriptors = len(os.listdir("/proc/self/fd"))
    writer = lt.open_writer(handle, small_disk / "file", buffer_bytes=64 << 10)
    with pytest.raises(OSError) as refused:
        for _ in range(100):
            writer.write(bytes(64 << 10))
    assert refused.value.errno == 28 and refused.value.filename == str(small_disk / "file")
    with pytest.raises(ValueError, match="failed before"):
        writer.write(b"x")
    writer.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    handle.wait()
    handle.sync_pwrite(torch.zeros(10), tmp_path / "other")
    handle.sync_pread(torch.zeros(10), tmp_path / "other")
