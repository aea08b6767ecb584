"""Tickets awaited in event loops: the descriptor they are told by, and loops that close early."""

import asyncio
import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import locked_tensor as lt


def eventfds() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # the listing's own
    return links.count("anon_inode:[eventfd]")


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_a_handle_that_was_awaited_on_leaves_no_eventfd(engine, disk_folder, is_closed):
    data = torch.arange(100, dtype=torch.uint8)

    async def use():
        for number in range(20):
            handle = lt.aio_handle(engine=engine)
            assert await handle.submit_pwrite(data, disk_folder / f"{number}") == 100
            if is_closed:
                handle.close()

    before = eventfds()
    asyncio.run(use())
    gc.collect()
    assert eventfds() == before
    assert all((disk_folder / f"{number}").read_bytes() == bytes(range(100)) for number in range(20))


def test_a_dropped_handle_signals_no_descriptor_of_anybody_else(engine, disk_folder):
    data = torch.zeros(16 << 20, dtype=torch.uint8)

    async def one(handle):
        await handle.submit_pwrite(data[:10], disk_folder / "small")

    handle = lt.aio_handle(engine=engine, queue_depth=1)
    asyncio.run(one(handle))
    handle.async_pwrite(data, disk_folder / "large")
    events = handle._completion_events.fd
    handle._completion_events = None  # what dropping the handle does first
    with open(disk_folder / "other", "wb") as other:
        os.dup2(other.fileno(), events)  # its number is another file's now
        del handle
        assert os.fstat(events).st_size == 0
        os.close(events)
    assert (disk_folder / "large").stat().st_size == 16 << 20


def test_closing_a_loop_under_a_pending_await_leaves_the_handle_usable(engine, disk_folder):
    data = torch.full((32 << 20,), 5, dtype=torch.uint8)
    handle = lt.aio_handle(engine=engine, queue_depth=1)
    path = disk_folder / "file"

    async def wait():
        await handle.submit_pwrite(data, path)

    async def leave():
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(leave())
    loop.close()
    assert not task.done()
    assert handle.wait() == 1

    async def again():
        return await handle.submit_pwrite(data[:10], path)

    assert asyncio.run(again()) == 10
    handle.close()
    assert path.read_bytes() == bytes([5]) * (32 << 20)
    task._log_destroy_pending = False  # that it never ended is the point
    with pytest.MonkeyPatch.context() as patch:
        shown = []
        patch.setattr(sys, "unraisablehook", shown.append)
        del task
        gc.collect()
        assert shown == []


def test_exiting_under_an_await_in_a_closed_loop_prints_nothing_of_ours(disk_folder):
    program = """
    import asyncio, sys, torch, locked_tensor as lt
    handle = lt.aio_handle(queue_depth=1)
    data = torch.full((32 << 20,), 5, dtype=torch.uint8)

    async def wait():
        await handle.submit_pwrite(data, sys.argv[1])

    async def leave():
        task = asyncio.ensure_future(wait())
        task._log_destroy_pending = False  # asyncio's own complaint
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    """
    path = disk_folder / "file"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert path.read_bytes() == bytes([5]) * (32 << 20)
