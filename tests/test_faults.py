"""What goes wrong on real machines: full disks, odd sectors, limits, signals, forks, ends in mid-flight."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest
import torch

import locked_tensor as lt

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for loop devices")


def pattern(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def locked_bytes(nbytes, seed=None):
    with lt.locked_memory():
        tensor = torch.empty(nbytes, dtype=torch.uint8)
    return tensor if seed is None else tensor.copy_(pattern(nbytes, seed))


def run_python(program, *arguments, **more):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, **more,
    )


def shell(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def mount(disk_folder):
    """Makes small ext4 file systems on loop devices: mount(mebibytes, sector_bytes)."""
    mounted = []

    def make(mebibytes, sector_bytes=512):
        image, point = disk_folder / f"image{len(mounted)}", disk_folder / f"mount{len(mounted)}"
        with open(image, "wb") as file:
            file.truncate(mebibytes << 20)
        try:
            device = shell("losetup", "-b", str(sector_bytes), "-f", "--show", str(image))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device here: {error}")
        mounted.append((device, point))
        shell("mkfs.ext4", "-q", "-m", "0", "-b", "4096", device)
        point.mkdir()
        shell("mount", device, str(point))
        return point

    yield make
    for device, point in mounted:
        subprocess.run(["umount", str(point)], check=False, capture_output=True)
        subprocess.run(["losetup", "-d", device], check=False, capture_output=True)


@needs_root
@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "ordinary"])
def test_a_full_disk_is_an_error_with_its_file_and_room_helps(engine, mount, is_locked):
    folder = mount(16)
    filler = folder / "filler"
    free = os.statvfs(folder)
    room = free.f_bavail * free.f_frsize
    with open(filler, "wb") as file:
        file.write(bytes(room - (5 << 20)))
        os.fsync(file.fileno())
    data = locked_bytes(8 << 20, 1) if is_locked else pattern(8 << 20, 1)
    with lt.aio_handle(engine=engine) as handle:
        with pytest.raises(OSError) as full:
            handle.sync_pwrite(data, folder / "file")
        assert full.value.errno == 28 and full.value.filename == str(folder / "file")
        assert (folder / "file").stat().st_size == 0
        for number in range(4):
            handle.async_pwrite(data[: 2 << 20], folder / f"part{number}")
        with pytest.raises(OSError) as full:
            handle.wait()
        assert full.value.errno == 28 and len(full.value.others) >= 1
        for number in range(4):
            (folder / f"part{number}").unlink(missing_ok=True)
        filler.unlink()
        handle.wait()
        handle.sync_pwrite(data, folder / "file")
        assert (folder / "file").read_bytes() == pattern(8 << 20, 1).numpy().tobytes()


@needs_root
def test_sectors_of_4096_bytes_are_asked_of_the_device(engine, mount):
    folder = mount(64, sector_bytes=4096)
    data = locked_bytes(1 << 20, 2)
    with lt.aio_handle(engine=engine) as handle:
        for start, offset, size in [(0, 0, 1 << 20), (0, 512, 8192), (512, 0, 8192), (7, 3, 100_000), (512, 4096, 512)]:
            view = data[start : start + size]
            handle.sync_pwrite(view, folder / "file", offset)
            back = locked_bytes(size)
            handle.sync_pread(back, folder / "file", offset)
            assert torch.equal(back, view), (start, offset, size)
        assert handle.stats().bytes_direct >= 2 << 20


@needs_root
def test_a_read_only_mount_says_so(mount):
    folder = mount(16)
    shell("mount", "-o", "remount,ro", str(folder))
    with lt.aio_handle() as handle:
        with pytest.raises(OSError) as refused:
            handle.sync_pwrite(pattern(10), folder / "file")
        assert refused.value.errno == 30 and refused.value.filename == str(folder / "file")


def test_a_file_size_limit_is_an_error_not_a_death(engine, disk_folder):
    program = """
    import resource, signal, sys, torch, locked_tensor as lt
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with lt.aio_handle(engine=sys.argv[2]) as handle:
        handle.sync_pwrite(torch.ones(1 << 18, dtype=torch.uint8), sys.argv[1])
        try:
            handle.sync_pwrite(torch.ones(4 << 20, dtype=torch.uint8), sys.argv[1])
        except OSError as error:
            assert error.errno == 27 and error.filename == sys.argv[1], error
        else:
            raise SystemExit("it was not refused")
        handle.sync_pwrite(torch.zeros(100, dtype=torch.uint8), sys.argv[1])
    """
    done = run_python(program, disk_folder / "file", engine)
    assert done.returncode == 0, done.stderr
    assert (disk_folder / "file").stat().st_size == 1 << 18


def test_few_descriptors_are_enough_for_thousands_of_files(engine, disk_folder):
    program = """
    import os, resource, sys, torch, locked_tensor as lt
    handle = lt.aio_handle(engine=sys.argv[2])
    data = torch.arange(1000)
    handle.sync_pwrite(data, sys.argv[1] + "/warm")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for turn in range(5):
        for number in range(200):
            handle.async_pwrite(data + number, f"{sys.argv[1]}/{number}")
        assert handle.wait() == 200
    for number in range(200):
        handle.async_pread(data, f"{sys.argv[1]}/{number}")
        handle.wait()
        assert int(data[5]) == 5 + number
    """
    done = run_python(program, disk_folder, engine)
    assert done.returncode == 0, done.stderr


def test_a_signal_storm_loses_nothing(engine, disk_folder):
    data, caught = locked_bytes(128 << 20, 3), []
    ordinary = pattern(16 << 20, 4)
    old = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with lt.aio_handle(engine=engine) as handle:
            for _ in range(2):
                handle.sync_pwrite(data, disk_folder / "file")
                handle.async_pwrite(ordinary, disk_folder / "ordinary")
                assert handle.wait() == 1
                back, other = locked_bytes(128 << 20), torch.empty_like(ordinary)
                handle.sync_pread(back, disk_folder / "file")
                handle.sync_pread(other, disk_folder / "ordinary")
                assert torch.equal(back, data) and torch.equal(other, ordinary)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert caught


def test_an_exception_of_a_signal_handler_leaves_the_wait_and_loses_nothing(disk_folder):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    data = locked_bytes(512 << 20)
    data.fill_(5)
    old = signal.signal(signal.SIGALRM, stop)
    with lt.aio_handle(queue_depth=1) as handle:
        handle.async_pwrite(data, disk_folder / "file")
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            handle.wait()
        except Stop:
            assert handle.wait() in (0, 1)  # 0 where the write ended just before the signal was heard
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert os.path.getsize(disk_folder / "file") == data.nbytes


@pytest.mark.parametrize("is_write", [False, True])
def test_wait_waits_for_a_call_that_a_signal_handler_left(engine, disk_folder, is_write):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    path = disk_folder / "file"
    data = locked_bytes(256 << 20)
    old = signal.signal(signal.SIGALRM, stop)
    try:
        with lt.aio_handle(65536, 2, engine=engine) as handle:
            data.fill_(5)
            handle.sync_pwrite(data, path)
            data.fill_(6)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            try:
                (handle.sync_pwrite if is_write else handle.sync_pread)(data, path)
            except Stop:
                assert handle.wait() in (0, 1)  # 0 where it ended just before the signal was heard
            signal.setitimer(signal.ITIMER_REAL, 0)
            expected = 6 if is_write else 5
            assert bool((data == expected).all())
            assert set(path.read_bytes()) == {expected}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_a_close_that_a_signal_handler_left_is_done_again(disk_folder, is_interrupted):
    data = locked_bytes(512 << 20)
    data.fill_(7)
    handle = lt.aio_handle(65536, 1)
    handle.async_pwrite(data, disk_folder / "file")
    assert is_interrupted(handle.close, 0.02) or handle.closed
    handle.close()
    assert handle.closed
    assert set((disk_folder / "file").read_bytes()) == {7}


def test_a_signal_handler_may_close_the_handle_that_is_waited_on(disk_folder):
    data = locked_bytes(512 << 20)
    data.fill_(6)
    handle = lt.aio_handle(queue_depth=1)
    old = signal.signal(signal.SIGALRM, lambda *_: handle.close())
    try:
        handle.async_pwrite(data, disk_folder / "file")
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert handle.wait() in (0, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    handle.close()
    assert os.path.getsize(disk_folder / "file") == data.nbytes


def test_a_file_truncated_before_the_read_is_short(engine, disk_folder):
    path = disk_folder / "file"
    data = locked_bytes(1 << 20, 5)
    with lt.aio_handle(engine=engine, queue_depth=1, block_size=4096) as handle:
        handle.sync_pwrite(data, path)
        handle.async_pread(data, path)
        os.truncate(path, 100_000)
        try:
            assert handle.wait() == 1
        except lt.ShortReadError as short:
            assert short.wanted == 1 << 20 and short.found < 1 << 20 and short.filename == str(path)
        assert handle.wait() == 0


def test_forks_during_reads_leave_the_parents_bytes_right(engine, disk_folder):
    data = locked_bytes(8 << 20, 6)
    back = locked_bytes(8 << 20)
    with lt.aio_handle(engine=engine) as handle:
        handle.sync_pwrite(data, disk_folder / "file")
        for _ in range(30):
            back.zero_()
            handle.async_pread(back, disk_folder / "file")
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert handle.wait() == 1
            assert os.waitpid(child, 0)[1] == 0
            assert torch.equal(back, data)


def test_a_fork_copies_no_registered_memory(disk_folder):
    data = locked_bytes(256 << 20, 7)
    with lt.aio_handle() as handle:
        handle.sync_pwrite(data, disk_folder / "file")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            lines = open("/proc/self/smaps_rollup").read().splitlines()
            private = sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
            os.write(writer, str(private).encode())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert int(os.read(reader, 100)) < 64 << 10
        os.close(reader), os.close(writer)
        handle.sync_pread(data, disk_folder / "file")
    assert torch.equal(data, pattern(256 << 20, 7))


@pytest.mark.parametrize("end", ["return", "os._exit(0)", "sys.exit(0)"])
def test_the_interpreter_may_end_with_work_in_flight(engine, disk_folder, end):
    program = f"""
    import os, sys, torch, locked_tensor as lt
    def main():
        handle = lt.aio_handle(engine=sys.argv[2], queue_depth=1)
        for number in range(4):
            handle.async_pwrite(torch.ones(4 << 20, dtype=torch.uint8), sys.argv[1] + str(number))
        {end}
    main()
    """
    done = run_python(program, disk_folder / "file", engine)
    assert (done.returncode, done.stderr) == (0, "")
    if end != "os._exit(0)":
        for number in range(4):
            assert (disk_folder / f"file{number}").read_bytes() == bytes([1]) * (4 << 20)


def test_a_dropped_handle_with_a_failure_shows_it(disk_folder):
    program = """
    import sys, torch, locked_tensor as lt
    handle = lt.AioHandle(1 << 20, 4, False, False, 1, engine="auto", direct="auto",
                          staging_bytes=1 << 20, vector_run_bytes=1, max_pending=10)
    handle.async_pread(torch.empty(10), sys.argv[1])
    del handle
    """
    done = run_python(program, disk_folder / "missing")
    assert done.returncode == 0 and "FileNotFoundError" in done.stderr


def test_cancelled_awaits_keep_the_buffer_until_the_kernel_is_done(disk_folder):
    import asyncio

    with lt.aio_handle(queue_depth=1) as handle:

        async def main():
            data = pattern(32 << 20, 8)
            task = asyncio.ensure_future(wait(handle.submit_pwrite(data, disk_folder / "file")))
            await asyncio.sleep(0)
            task.cancel()
            del data
            with pytest.raises(asyncio.CancelledError):
                await task

        async def wait(ticket):
            return await ticket

        asyncio.run(main())
        assert handle.wait() == 1
    assert (disk_folder / "file").read_bytes() == pattern(32 << 20, 8).numpy().tobytes()


def test_many_handles_in_many_threads(disk_folder):
    failures = []

    def work(number):
        try:
            for turn in range(5):
                with lt.aio_handle(queue_depth=4) as handle:
                    data = pattern(200_000 + number, seed=turn)
                    handle.async_pwrite(data, disk_folder / f"{number}")
                    handle.wait()
                    back = torch.empty_like(data)
                    handle.sync_pread(back, disk_folder / f"{number}")
                    assert torch.equal(back, data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_small_lock_limits_leave_many_handles_usable(disk_folder):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give privileges up")
    program = """
    import ctypes, os, resource, sys, torch, locked_tensor as lt
    ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    os.setgid(65534); os.setuid(65534)
    handles = [lt.aio_handle() for _ in range(20)]
    data = torch.arange(1 << 20)
    for number, handle in enumerate(handles):
        handle.sync_pwrite(data, sys.argv[1])
        back = torch.empty_like(data)
        handle.sync_pread(back, sys.argv[1])
        assert torch.equal(back, data)
    """
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:  # where another user may go
        os.chmod(file.name, 0o666)
        done = run_python(program, file.name)
    assert done.returncode == 0, done.stderr


def test_what_fails_or_ends_at_once_keeps_nobody_waiting(engine, disk_folder):
    with lt.aio_handle(engine=engine) as handle:
        handle.sync_pwrite(pattern(10), disk_folder / "file")
        begin = time.monotonic()
        for _ in range(100):
            with pytest.raises(FileNotFoundError):
                handle.sync_pread(pattern(10), disk_folder / "missing")
            with pytest.raises(lt.ShortReadError):
                handle.sync_pread(pattern(11), disk_folder / "file")
            assert handle.sync_pread(torch.empty(0), disk_folder / "file") == 1
        # A thread with nothing to do looks up every tenth of a second: 30 s, were it to wait for that.
        assert time.monotonic() - begin < 15
