"""How cuFile is called, on a stand-in of its library over ordinary memory; and gds_handle where there is a GPU."""

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import missing

import locked_tensor as lt
from locked_tensor.integrations import cufile
from locked_tensor.integrations.deepspeed import gds


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or missing("a C compiler")
    made = tmp_path_factory.mktemp("cufile") / "libcufile.so"
    source = Path(__file__).parent / "stand_in_cufile.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return ctypes.CDLL(str(made), use_errno=True)


def test_transfers_go_on_until_all_is_moved_and_files_are_given_back(library, disk_folder):
    library_face = cufile.CuFile(library)
    data = torch.arange(300_000, dtype=torch.int32)
    nbytes = data.nbytes
    fd = os.open(disk_folder / "file", os.O_RDWR | os.O_CREAT)
    assert library_face.register_buffer(data.data_ptr(), nbytes) is True
    assert library_face.register_buffer(data.data_ptr(), nbytes) is False
    with library_face.registered_file(fd) as handle:
        assert library.open_files() == 1
        library_face.transfer("write", handle, data.data_ptr(), (4096, nbytes - 4096), 100, "file")
        fresh = torch.zeros_like(data)
        library_face.transfer("read", handle, fresh.data_ptr(), (4096, nbytes - 4096), 100, "file")
    assert library.open_files() == 0
    assert library_face.deregister_buffer(data.data_ptr()) is True
    assert library_face.deregister_buffer(data.data_ptr()) is False
    os.close(fd)
    assert torch.equal(fresh[1024:], data[1024:]) and not fresh[:1024].any()
    assert (disk_folder / "file").read_bytes()[100:] == data[1024:].numpy().tobytes()


def test_failures_say_what_cufile_said(library, disk_folder):
    library_face = cufile.CuFile(library)
    (disk_folder / "file").write_bytes(bytes(1000))
    fd = os.open(disk_folder / "file", os.O_RDONLY)
    room = torch.zeros(2000, dtype=torch.uint8)
    with library_face.registered_file(fd) as handle:
        with pytest.raises(lt.ShortReadError) as short:
            library_face.transfer("read", handle, room.data_ptr(), (0, 2000), 0, "file")
        assert (short.value.wanted, short.value.found) == (2000, 1000)
        with pytest.raises(OSError, match="5030") as refused:
            library_face.transfer("read", handle, room.data_ptr(), (0, 10), 77, "file")
        assert refused.value.errno == errno.EIO
        with pytest.raises(OSError) as refused:
            library_face.transfer("write", handle, room.data_ptr(), (0, 10), 0, "file")
        assert refused.value.errno == errno.EBADF and refused.value.filename == "file"
    os.close(fd)
    with pytest.raises(OSError, match="5027"):
        with library_face.registered_file(fd):
            pass


def test_a_driver_that_does_not_open_is_named_with_the_remedy(library, monkeypatch):
    monkeypatch.setenv("STAND_IN_REFUSES", "yes")
    with pytest.raises(cufile.CuFileUnusable, match="cuFile error 5001, CUDA 3.*GPUDirect"):
        cufile.CuFile(library)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gds_handle_without_a_gpu_says_why_and_what_to_do():
    with pytest.raises(OSError, match="no GPU.*GPUDirect Storage") as refused:
        gds.gds_handle(1 << 20, 32, False, True, 1)
    assert refused.value.errno == errno.ENODEV
    assert gds.why_unusable() == refused.value.strerror != ""


def test_gds_handle_has_deepspeeds_names():
    names = """get_block_size get_queue_depth get_single_submit get_overlap_events get_intra_op_parallelism get_alignment
        read write pread pwrite sync_pread sync_pwrite async_pread async_pwrite new_cpu_locked_tensor
        free_cpu_locked_tensor is_pinned new_pinned_device_tensor free_pinned_device_tensor pin_device_tensor
        unpin_device_tensor wait""".split()
    assert all(callable(getattr(gds.gds_handle, name)) for name in names)


@pytest.mark.needs_cuda
def test_gpu_tensors_move_by_cufile(disk_folder):
    if gds.why_unusable():
        missing(gds.why_unusable())
    handle = gds.gds_handle(1 << 20, 32, False, True, 2)
    data = handle.new_pinned_device_tensor(1 << 20, torch.empty(0, dtype=torch.float32, device="cuda"))
    data.copy_(torch.arange(1 << 20))
    path = str(disk_folder / "file")
    assert handle.async_pwrite(data, path, 0) == 0
    assert handle.wait() == 1
    fresh = torch.zeros_like(data)
    assert handle.sync_pread(fresh, path) == 1
    assert torch.equal(fresh, data)
    on_cpu = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.float32))
    assert handle.pread(on_cpu, path, True, True, 0) == 0
    assert handle.async_pread(fresh, path) == 0
    assert handle.wait() == 2
    with pytest.raises(FileNotFoundError):
        handle.async_pread(fresh, str(disk_folder / "none"))
    assert torch.equal(on_cpu, data.cpu())
    assert handle.free_pinned_device_tensor(data) is True
    handle.close()
