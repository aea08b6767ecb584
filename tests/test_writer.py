"""open_writer: a binary file whose bytes leave by direct I/O."""

import os
import pickle

import pytest
import torch

import locked_tensor as lt


@pytest.fixture
def handle():
    with lt.aio_handle() as made:
        yield made


@pytest.mark.parametrize("sizes", [[], [0], [1], [4096], [4095, 2], [10_000_003], [7] * 3000, [8 << 20, 8 << 20, 1]])
def test_the_file_has_exactly_what_was_written(folder, handle, sizes):
    parts = [os.urandom(size) for size in sizes]
    with lt.open_writer(handle, folder / "file", buffer_bytes=1 << 20) as writer:
        for part in parts:
            assert writer.write(part) == len(part)
        assert writer.tell() == sum(sizes) and writer.writable()
    assert (folder / "file").read_bytes() == b"".join(parts)
    assert writer.closed
    assert handle.wait() >= 0


def test_torch_save_and_pickle_write_through_it(disk_folder, handle):
    state = {"weight": torch.randn(1000, 1000), "step": 3}
    with lt.open_writer(handle, disk_folder / "file") as writer:
        torch.save(state, writer)
    found = torch.load(disk_folder / "file")
    assert torch.equal(found["weight"], state["weight"]) and found["step"] == 3
    with lt.open_writer(handle, disk_folder / "pickled") as writer:
        pickle.dump({"a": 1}, writer)
    assert pickle.loads((disk_folder / "pickled").read_bytes()) == {"a": 1}


def test_flush_and_fsync_make_it_visible_and_writing_goes_on(folder, handle):
    writer = lt.open_writer(handle, folder / "file", buffer_bytes=4096)
    expected = b""
    for size in (10, 4086, 1, 5000, 0, 4096):
        part = os.urandom(size)
        writer.write(memoryview(part))
        expected += part
        writer.fsync() if size % 2 else writer.flush()
        assert (folder / "file").read_bytes() == expected
    writer.close()
    writer.close()
    for use in (writer.tell, writer.flush, lambda: writer.write(b"x")):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_longer_file_is_emptied_first_and_wrong_arguments_are_refused(disk_folder, handle):
    (disk_folder / "file").write_bytes(b"x" * 100_000)
    with lt.open_writer(handle, disk_folder / "file") as writer:
        writer.write(b"short")
        with pytest.raises(TypeError):
            writer.write("text")
    assert (disk_folder / "file").read_bytes() == b"short"
    with pytest.raises(ValueError, match="multiple of 4096"):
        lt.open_writer(handle, disk_folder / "file", buffer_bytes=100)
    with pytest.raises(IsADirectoryError):
        lt.open_writer(handle, disk_folder)
    with pytest.raises(FileNotFoundError):
        lt.open_writer(handle, disk_folder / "missing" / "file")


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
