"""Writes with durable=True: what is on the device when they return, counted in system calls; validate=True."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import missing

import locked_tensor as lt


def syncs_of(program, *arguments):
    """The program's fsync and fdatasync calls in order, as (call, name of the file or folder)."""
    if shutil.which("strace") is None:
        missing("strace")
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync", sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    if "PTRACE" in done.stderr:
        missing("strace may trace nothing here")
    assert done.returncode == 0, done.stderr[-2000:]
    return [(call, os.path.basename(path)) for call, path in re.findall(r"(fsync|fdatasync)\(\d+<(.*?)>", done.stderr)]


def test_each_durable_write_syncs_the_file_and_the_first_its_folder(engine, disk_folder):
    program = """
    import os, sys, torch, locked_tensor as lt
    with lt.locked_memory():
        data = torch.ones(10_000, dtype=torch.uint8)
    name = sys.argv[1] + "/file"
    with lt.aio_handle(engine=sys.argv[2]) as handle:
        handle.sync_pwrite(data, name)
        assert handle.sync_pwrite(data, name, durable=True) == 1
        assert handle.async_pwrite(data, name, 5000, durable=True) == 0
        assert handle.wait() == 1
        assert handle.submit_pwrite(data, name, durable=True).wait() == 10_000
        assert handle.pwritev([data, data], name, durable=True) == 20_000
        assert handle.write(data, name, False, durable=True) == 0
        assert handle.pwrite(data, name, False, False, durable=True) == 1
        assert handle.submit_batch([("write", data, name, 0, True), ("write", data, name)])[0].wait() == 10_000
        handle.sync_pwrite(data[:0], sys.argv[1] + "/empty", durable=True)
        fd = os.open(sys.argv[1] + "/own", os.O_RDWR | os.O_CREAT)
        handle.async_pwrite(data, fd=fd, durable=True)
        handle.wait()
    """
    folder = disk_folder.name
    expected = [("fdatasync", "file"), ("fsync", folder)] + [("fdatasync", "file")] * 6
    expected += [("fdatasync", "empty"), ("fsync", folder), ("fdatasync", "own")]
    assert syncs_of(program, disk_folder, engine) == expected
    assert (disk_folder / "empty").read_bytes() == b""
    assert (disk_folder / "file").read_bytes() == bytes([1]) * 20_000


def test_a_replaced_file_has_its_name_synced_again_and_a_link_the_folder_it_leads_to(disk_folder):
    program = """
    import os, sys, torch, locked_tensor as lt
    name = sys.argv[1] + "/file"
    os.mkdir(sys.argv[1] + "/real")
    os.symlink(sys.argv[1] + "/real/target", sys.argv[1] + "/link")
    with lt.aio_handle() as handle:
        handle.sync_pwrite(torch.ones(9), name, durable=True)
        os.unlink(name)
        handle.sync_pwrite(torch.ones(9), name, durable=True)
        handle.sync_pwrite(torch.ones(9), sys.argv[1] + "/link", durable=True)
    """
    folder = disk_folder.name
    expected = [("fdatasync", "file"), ("fsync", folder)] * 2 + [("fdatasync", "target"), ("fsync", "real")]
    assert syncs_of(program, disk_folder) == expected


def test_nothing_is_synced_unasked_and_not_after_a_failure(disk_folder):
    program = """
    import sys, torch, locked_tensor as lt
    with lt.aio_handle() as handle:
        handle.sync_pwrite(torch.ones(10_000), sys.argv[1] + "/file")
        try:
            handle.sync_pwrite(torch.ones(10_000), sys.argv[1] + "/file", 1 << 61, durable=True)
        except OSError:
            handle.sync_pread(torch.ones(10_000), sys.argv[1] + "/file")
    """
    assert syncs_of(program, disk_folder) == []


def test_durable_is_for_writes_and_by_keyword(disk_folder):
    data = torch.ones(10)
    with lt.aio_handle() as handle:
        handle.sync_pwrite(data, disk_folder / "file", durable=True)
        for call in (handle.sync_pread, handle.async_pread, handle.submit_pread):
            with pytest.raises(TypeError):
                call(data, disk_folder / "file", durable=True)
        with pytest.raises(TypeError):
            handle.sync_pwrite(data, disk_folder / "file", 0, True)
        with pytest.raises(ValueError, match="durable"):
            handle.submit_batch([lt.IoRequest("read", data, disk_folder / "file", 0, True)])


def test_a_folder_that_cannot_be_opened_fails_the_durable_write(tmpfs_folder):
    if os.geteuid() != 0:
        missing("root, to become a user whom a folder forbids to look inside")
    program = """
    import os, sys, torch, locked_tensor as lt
    handle = lt.aio_handle()
    os.setgid(65534); os.setuid(65534)
    handle.sync_pwrite(torch.ones(10), sys.argv[1])
    try:
        handle.sync_pwrite(torch.ones(10), sys.argv[1], durable=True)
    except PermissionError as error:
        assert error.filename == os.path.dirname(sys.argv[1]), error
    else:
        raise SystemExit("it was not refused")
    """
    folder = f"{tmpfs_folder}/dropbox"
    os.chmod(tmpfs_folder, 0o755)
    os.mkdir(folder)
    os.chmod(folder, 0o333)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), folder + "/file"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_few_descriptors_are_enough_for_durable_and_validated_writes_whose_tickets_are_kept(engine, disk_folder):
    program = """
    import os, resource, sys, torch, locked_tensor as lt
    handle = lt.aio_handle(engine=sys.argv[2])
    data = torch.arange(1000)
    handle.sync_pwrite(data, sys.argv[1] + "/warm")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    tickets = [handle.submit_pwrite(data + i, f"{sys.argv[1]}/{i}", durable=i % 4 == 0) for i in range(200)]
    for i in range(100):
        handle.pwrite(data + i, f"{sys.argv[1]}/{i}", True, True, durable=i % 4 == 0)
    assert handle.wait() == 300
    assert [ticket.wait() for ticket in tickets] == [8000] * 200
    handle.close()
    assert len(os.listdir("/proc/self/fd")) < 10, os.listdir("/proc/self/fd")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(disk_folder), engine], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for i in range(200):
        assert (disk_folder / str(i)).read_bytes() == (torch.arange(1000) + i).numpy().tobytes()


def test_validate_reads_back_and_raises_where_the_file_differs(engine, disk_folder):
    path = disk_folder / "file"
    large, seen = torch.arange(4 << 20, dtype=torch.int64), 0
    with lt.aio_handle(engine=engine) as handle:
        assert handle.write(large, path, True) == 0
        assert handle.read(torch.empty_like(large), path, True) == 0
        # Memory that changes while it is written is what a mismatch looks like.
        for _ in range(20):
            handle.pwrite(large, path, True, True)
            large.add_(1)
            try:
                handle.wait()
            except OSError as error:
                assert error.errno == 5 and error.filename == str(path) and "differ at offset" in str(error)
                seen += 1
        assert handle.write(large, path, True) == 0
    assert seen > 0


def test_every_method_says_what_it_returns():
    for name in ["read", "write", "pread", "pwrite", "sync_pread", "sync_pwrite", "async_pread", "async_pwrite"]:
        assert "eturns" in getattr(lt.AioHandle, name).__doc__, name
    for name in ["preadv", "pwritev", "wait"]:
        assert "eturns" in getattr(lt.AioHandle, name).__doc__, name
    assert "fsync(2)" in lt.AioHandle.fsync.__doc__ and "fdatasync(2)" in lt.AioHandle.sync_pwrite.__doc__
