"""Forks, signals, processes and cancelled tasks by the hundred, on every engine: right bytes throughout."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import threading
import warnings

import pytest
import torch

import locked_tensor as lt


def pattern(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def locked_bytes(nbytes):
    with lt.locked_memory():
        return torch.empty(nbytes, dtype=torch.uint8)


def fork_and_end(check=lambda: True):
    """Forks a child that ends at once; returns its exit status: 0 if `check` held there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads are running
        child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitpid(child, 0)[1]


def test_two_hundred_forks_during_continuous_reads(engine, disk_folder):
    """The pages of requests in flight at a fork stay the parent's, as the kernel copies them for the child."""
    nbytes, path = 4 << 20, disk_folder / "file"
    data, stopping, wrong, turns = pattern(nbytes, 1), threading.Event(), [], 0
    with lt.aio_handle(65536, 8, engine=engine) as handle:
        handle.sync_pwrite(data, path)

        def read(buffer):
            nonlocal turns
            while not stopping.is_set() or turns < 2:
                buffer.zero_()
                handle.sync_pread(buffer, path)
                turns += 1
                if not torch.equal(lt.as_plain(buffer), data):
                    wrong.append(turns)

        buffers = [locked_bytes(nbytes), torch.empty(nbytes, dtype=torch.uint8)]
        threads = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
        for thread in threads:
            thread.start()
        try:
            statuses = [fork_and_end(lambda: not lt.is_locked(buffers[0])) for _ in range(200)]
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        assert statuses == [0] * 200
        assert wrong == [] and turns >= 2
        assert lt.is_locked(buffers[0])


@pytest.mark.parametrize("handler", ["python", "c"])
def test_a_signal_each_millisecond_loses_nothing_of_a_gibibyte(engine, disk_folder, handler):
    """A handler in C (SA_RESTART not set) interrupts system calls too, and Python does not hear of it."""
    nbytes, caught = 256 << 20, []
    data = locked_bytes(nbytes)
    data.view(torch.int64).copy_(torch.arange(nbytes // 8))
    back, path = locked_bytes(nbytes), disk_folder / "file"
    c_library = ctypes.CDLL(None)
    before = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    if handler == "c":
        c_library.signal.restype = ctypes.c_void_p
        c_library.signal(signal.SIGALRM, ctypes.cast(c_library.abs, ctypes.c_void_p))
        c_library.siginterrupt(signal.SIGALRM, 1)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with lt.aio_handle(engine=engine) as handle:
            for _ in range(2):
                handle.sync_pwrite(data, path)
                back.zero_()
                handle.async_pread(back, path)
                assert handle.wait() == 1
                assert torch.equal(lt.as_plain(back), lt.as_plain(data))
            ordinary = pattern(8 << 20)
            assert handle.pwrite(ordinary, disk_folder / "ordinary", True, False, durable=True) == 1
            assert lt.is_locked(data) and handle.wait() == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert bool(caught) == (handler == "python")


def _copy_in_child(path, engine, number):
    torch.set_num_threads(1)  # OpenMP's threads are the parent's, and torch would wait for them for ever
    with lt.locked_memory():
        data = torch.full((300_000,), number, dtype=torch.uint8)
    with lt.aio_handle(engine=engine) as handle:
        handle.sync_pwrite(data, f"{path}{number}")
        back = torch.empty_like(data)
        handle.async_pread(back, f"{path}{number}")
        handle.wait()
        ok = torch.equal(back, lt.as_plain(data)) and lt.is_locked(data)
    raise SystemExit(0 if ok else 1)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_every_kind_make_handles_of_their_own(engine, disk_folder, method):
    context = multiprocessing.get_context(method)
    data = locked_bytes(8 << 20)
    data.fill_(77)
    with lt.aio_handle(engine=engine) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        handle.async_pwrite(data, disk_folder / "parent")
        children = [
            context.Process(target=_copy_in_child, args=(str(disk_folder / "child"), engine, number))
            for number in range(2)
        ]
        for child in children:
            child.start()
        assert handle.wait() == 1
        for child in children:
            child.join(100)
        assert [child.exitcode for child in children] == [0, 0]
    assert (disk_folder / "parent").read_bytes() == bytes([77]) * (8 << 20)
    for number in range(2):
        assert (disk_folder / f"child{number}").read_bytes() == bytes([number]) * 300_000


def test_cancelled_tasks_by_the_hundred_leave_right_files_and_nothing_behind(engine, disk_folder):
    with lt.aio_handle(4096, 2, engine=engine) as handle:
        handle.sync_pwrite(pattern(100), disk_folder / "warm")
        descriptors = None

        async def one(number):
            await handle.submit_pwrite(pattern(200_000, number), disk_folder / f"{number}")

        async def main():
            nonlocal descriptors
            tasks = [asyncio.ensure_future(one(number)) for number in range(100)]
            await asyncio.sleep(0.002)
            for task in tasks[::2]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(each is None or isinstance(each, asyncio.CancelledError) for each in ended)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(one("late"), 0)
            with pytest.raises(FileNotFoundError):
                await handle.submit_pread(pattern(10), disk_folder / "missing")
            return [number for number, each in enumerate(ended) if each is None]

        done = asyncio.run(main())
        again = asyncio.run(main())  # another loop
        handle.wait()
        descriptors = len(os.listdir("/proc/self/fd"))
        asyncio.run(main())
        handle.wait()
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(done) >= 50 and len(again) >= 50
    for number in range(100):
        path = disk_folder / f"{number}"
        # A task that was cancelled before its first step has started nothing; what started is whole.
        if number in done or path.exists():
            assert path.read_bytes() == pattern(200_000, number).numpy().tobytes()


def test_an_exception_thrown_into_an_await_leaves_the_operation_to_wait(engine, disk_folder):
    class Stop(Exception):
        pass

    with lt.aio_handle(engine=engine, queue_depth=1) as handle:

        async def main():
            awaiting = handle.submit_pwrite(pattern(16 << 20, 5), disk_folder / "file").__await__()
            awaiting.send(None)
            with pytest.raises(Stop):
                awaiting.throw(Stop())

        asyncio.run(main())
        assert handle.wait() == 1
    assert (disk_folder / "file").read_bytes() == pattern(16 << 20, 5).numpy().tobytes()


def test_the_first_await_of_a_handle_hears_of_what_was_in_flight_before(engine, disk_folder):
    """Kernel AIO tells an eventfd only of requests that were submitted with it."""
    data = locked_bytes(1 << 20)

    async def write(handle):
        return await asyncio.wait_for(handle.submit_pwrite(data, disk_folder / "file", durable=True), 60)

    for _ in range(40):
        with lt.aio_handle(engine=engine) as handle:
            assert asyncio.run(write(handle)) == 1 << 20
