"""What a handle that does nothing keeps: staging memory, descriptors, files that were deleted."""

import os
import resource
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import locked_tensor as lt

MIB = 1 << 20


def locked_now() -> int:
    return lt.memlock_limit().locked


def open_files(folder) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if path.startswith(str(folder)):
            found.append(path)
    return found


# --- staging ------------------------------------------------------------------------------------

UNPRIVILEGED = """
import sys
import pytest, torch
import locked_tensor as lt
MIB = 1 << 20
def locked_now():
    return lt.memlock_limit().locked
def many():
    return torch.full((20 * MIB,), 7, dtype=torch.uint8)
path = sys.argv[1]
"""


@pytest.mark.parametrize("count", [1, 3])
def test_idle_staging_makes_room_for_tensors(run_with_memlock, disk_folder, count):
    program = UNPRIVILEGED + textwrap.dedent("""
        handles = [lt.aio_handle() for _ in range(int(sys.argv[2]))]
        for handle in handles:
            handle.sync_pwrite(many(), path)
        assert 0 < locked_now() <= 8 * MIB - (8 * MIB >> len(handles)), locked_now()
        with lt.locked_memory():
            most = torch.full((7 * MIB,), 1, dtype=torch.uint8)
        assert most.is_locked() and locked_now() == 7 * MIB
        for handle in handles:  # goes on, through ordinary memory
            handle.sync_pwrite(many(), path)
            back = torch.empty(20 * MIB, dtype=torch.uint8)
            handle.sync_pread(back, path)
            assert torch.equal(back, many())
        del most
        lt.empty_cache()
        assert locked_now() == 0
        handles[0].sync_pwrite(many(), path)
        assert locked_now() == 4 * MIB
        own = torch.ones(7 * MIB, dtype=torch.uint8)
        assert lt.is_locked(lt.lock_(own))  # in place too
        lt.unlock_(own)
        print("right")
    """)
    done = run_with_memlock(8192, "-c", program, str(disk_folder / "file"), str(count))
    assert done.stdout == "right\n", done.stderr


def test_a_refusal_tells_of_staging_that_is_in_use(run_with_memlock, disk_folder):
    program = UNPRIVILEGED + textwrap.dedent("""
        handle = lt.aio_handle(block_size=4096)
        for number in range(16):
            handle.async_pwrite(many(), path, number * 20 * MIB)
        with pytest.raises(lt.LockLimitError, match=(
            r" of it in use as staging of open aio_handles \\(their staging_bytes= bounds it\\); raise it"
        )), lt.locked_memory():
            torch.empty(8 * MIB, dtype=torch.uint8)
        handle.wait()
        with lt.locked_memory():
            assert torch.empty(8 * MIB, dtype=torch.uint8).is_locked()
        with pytest.raises(lt.LockLimitError) as refused, lt.locked_memory():
            torch.empty(9 * MIB, dtype=torch.uint8)
        assert "staging" not in str(refused.value)
        print("right")
    """)
    done = run_with_memlock(8192, "-c", program, str(disk_folder / "file"))
    assert done.stdout == "right\n", done.stderr


def test_empty_cache_takes_idle_staging(disk_folder):
    lt.empty_cache()
    before = locked_now()
    with lt.aio_handle() as handle:
        data = torch.arange(4 * MIB)
        handle.sync_pwrite(data, disk_folder / "file")
        assert locked_now() >= before + 2 * MIB
        lt.empty_cache()
        assert locked_now() == before
        back = torch.empty_like(data)
        handle.sync_pread(back, disk_folder / "file")
        assert torch.equal(back, data)


# --- descriptors and deleted files --------------------------------------------------------------


def test_a_file_deleted_while_an_operation_runs_is_closed_at_its_end(folder, engine):
    with lt.aio_handle(engine=engine) as handle:
        data = torch.ones(64 * MIB, dtype=torch.uint8)
        ticket = handle.submit_pwrite(data, folder / "file")
        (folder / "file").unlink()
        was_over = ticket.done()  # an engine may have done it all before
        assert ticket.wait() == data.nbytes
        assert was_over or open_files(folder) == []


def test_deleted_files_are_closed_by_what_comes_next(folder, engine):
    data = torch.ones(MIB, dtype=torch.uint8)
    with lt.aio_handle(engine=engine) as handle:
        for next_one in (
            handle.wait,
            lambda: handle.fsync(folder / "other"),
            lambda: time.sleep(0.11) or handle.sync_pread(data, folder / "other"),
        ):
            handle.sync_pwrite(data, folder / "other")
            handle.sync_pwrite(data, folder / "file")
            (folder / "file").unlink()
            next_one()
            assert {os.path.basename(path) for path in open_files(folder)} <= {"other"}


def test_a_file_that_stays_stays_open(folder):
    with lt.aio_handle() as handle:
        data = torch.ones(4096, dtype=torch.uint8)
        handle.sync_pwrite(data, folder / "file")
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(5):
            handle.sync_pwrite(data, folder / "file")
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert len(open_files(folder)) >= 1


def test_idle_handles_leave_descriptors_to_others(disk_folder):
    """All together keep an eighth of what the process may open, and a file each."""
    program = """
    import os, resource, sys, torch, locked_tensor as lt
    def files():
        paths = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                paths.append(os.readlink("/proc/self/fd/" + fd))
            except FileNotFoundError:
                pass
        return sum(path.startswith(sys.argv[1]) for path in paths)
    data = torch.arange(1000)  # not whole pages: both descriptors of each file
    for limit, count in ((64, 1), (256, 2), (1024, 1)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        handles = [lt.aio_handle() for _ in range(count)]
        for handle in handles:
            for number in range(100):
                handle.sync_pwrite(data, f"{sys.argv[1]}/{number}")
        assert 0 < files() <= min(limit // 8, 64 * count), (limit, files())
        for handle in handles:
            handle.close()
        assert files() == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(disk_folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_limit_of_descriptors_is_asked_again(disk_folder):
    data = torch.arange(1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with lt.aio_handle() as handle:
        for number in range(40):
            handle.sync_pwrite(data, disk_folder / str(number))
        many = len(open_files(disk_folder))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, 2 * len(os.listdir("/proc/self/fd"))), hard))
        try:
            handle.sync_pwrite(data, disk_folder / "last")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(open_files(disk_folder)) < many
