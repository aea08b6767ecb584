"""What the caller gets wrong: short errors that name the argument, what it takes and what it got."""

import asyncio
import json
import os
import re

import numpy
import pytest
import torch

import locked_tensor as lt

HUGE = (2**63, 2**64 + 5, -(2**70), 10**5000)
NO_WHOLE_NUMBERS = (True, False, 1.0, "1", None, numpy.float64(1), torch.tensor(1.5))


@pytest.fixture
def handle():
    with lt.aio_handle() as made:
        yield made


def data(nbytes: int = 8) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


def refused(kind: type[Exception], match: str):
    """Is raised with a message of one line that begins so."""
    return pytest.raises(kind, match=rf"\A{match}[^\n]*\Z")


# Every method that takes a buffer, a file and an offset.
CALLS = {
    "read": lambda h, buffer, file, *offset: h.read(buffer, file, False, *offset),
    "write": lambda h, buffer, file, *offset: h.write(buffer, file, False, *offset),
    "pread": lambda h, buffer, file, *offset: h.pread(buffer, file, False, True, *offset),
    "pwrite": lambda h, buffer, file, *offset: h.pwrite(buffer, file, False, False, *offset),
    "sync_pread": lambda h, *arguments: h.sync_pread(*arguments),
    "sync_pwrite": lambda h, *arguments: h.sync_pwrite(*arguments),
    "async_pread": lambda h, *arguments: h.async_pread(*arguments),
    "async_pwrite": lambda h, *arguments: h.async_pwrite(*arguments),
    "submit_pread": lambda h, *arguments: h.submit_pread(*arguments),
    "submit_pwrite": lambda h, *arguments: h.submit_pwrite(*arguments),
    "submit_batch": lambda h, *arguments: h.submit_batch([lt.IoRequest("write", *arguments)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_of_each_method_is_named(handle, tmp_path, name):
    call, path = CALLS[name], tmp_path / "file"
    file = "a request's file" if name == "submit_batch" else "file(name)?"
    for wrong, shown in [(None, "None"), (5, "int 5"), ("x", "str 'x'"), ([1], "list"), (b"12", "bytes")]:
        with refused(TypeError, rf"(a request's )?buffer must be a torch.Tensor, got {re.escape(shown)}\Z"):
            call(handle, wrong, path)
    with refused(TypeError, r"(a request's )?buffer must be a torch.Tensor \(torch.from_numpy\(\) makes one\), got numpy.ndarray"):
        call(handle, numpy.ones(3), path)
    with refused(TypeError, "(a request's )?buffer has no bytes yet: an UninitializedParameter"):
        call(handle, torch.nn.UninitializedParameter(), path)
    for wrong in (1.5, [path], True):
        with refused(TypeError, rf"{file} must be a path or an open descriptor \(int\), got {type(wrong).__name__}"):
            call(handle, data(), wrong)
    for wrong in (2**63, 2**70, 2**31, -1):
        with refused(ValueError, rf"{file}.* must .*got {wrong}"):
            call(handle, data(), wrong)
    for wrong in HUGE:
        with refused(ValueError, r"(a request's )?file_offset must be from 0 to 2\*\*63 - 1, got "):
            call(handle, data(), path, wrong)
    for wrong in NO_WHOLE_NUMBERS:
        with refused(TypeError, "(a request's )?file_offset must be a whole number, got "):
            call(handle, data(), path, wrong)
    assert handle.wait() == 0 and os.listdir(tmp_path) == []
    path.write_bytes(bytes(100))
    call(handle, data(), path, numpy.int64(5))
    call(handle, data(), path, torch.tensor(5))
    handle.wait()


def test_lists_name_the_place(handle, tmp_path):
    for call in (handle.preadv, handle.pwritev):
        with refused(TypeError, r"buffers\[1\] must be a torch.Tensor, got None"):
            call([data(), None], tmp_path / "file")
        for wrong, shown in [(None, "None"), (data(), "Tensor"), ("x", "str 'x'"), (5, "int 5")]:
            with refused(TypeError, f"buffers must be a list of torch.Tensor, got {shown}"):
                call(wrong, tmp_path / "file")
    handle.pwritev((data() for _ in range(3)), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"\x01" * 24
    with refused(TypeError, "a request must be an IoRequest, got int 1"):
        handle.submit_batch([1])
    with refused(TypeError, "a request's operation must be a str, got int 1"):
        handle.submit_batch([(1, data(), tmp_path)])


def test_flags_descriptors_and_timeouts_are_named(handle, tmp_path):
    path = tmp_path / "file"
    handle.sync_pwrite(data(), path)
    for call, name in [
        (lambda: handle.read(data(), path, "yes"), "validate"),
        (lambda: handle.pread(data(), path, False, "yes"), "async"),
        (lambda: handle.sync_pwrite(data(), path, durable="yes"), "durable"),
        (lambda: handle.fsync(path, data_only="yes"), "data_only"),
        (lambda: lt.aio_handle(single_submit="yes"), "single_submit"),
    ]:
        with refused(TypeError, f"{name} must be a bool, got str 'yes'"):
            call()
    for wrong in (2**63, 2**70):
        with refused(ValueError, rf"fd must be from 0 to 2\*\*63 - 1, got {wrong}"):
            handle.async_pread(data(), fd=wrong)
    with refused(ValueError, "fd: a file descriptor must not be negative or huge, got -1"):
        handle.async_pread(data(), fd=-1)
    with refused(TypeError, "fd must be a path or an open descriptor"):
        handle.async_pread(data(), fd=True)
    ticket = handle.submit_pread(data(), path)
    with refused(TypeError, "timeout must be a number of seconds or None, got str 'x'"):
        ticket.wait("x")
    with refused(ValueError, "timeout must not be negative"):
        ticket.wait(-1)
    assert ticket.wait(numpy.float32(5)) == ticket.wait(5) == 8
    assert asyncio.run(_awaited(handle, path)) == 8


async def _awaited(handle, path):
    return await handle.submit_pread(data(), path)


def test_settings_are_named():
    for name in ("block_size", "queue_depth", "intra_op_parallelism", "staging_bytes", "vector_run_bytes", "max_pending"):
        for wrong in HUGE:
            with refused(ValueError, rf"{name} must be from 0 to 2\*\*63 - 1, got "):
                lt.aio_handle(**{name: wrong})
        with refused(ValueError, f"{name} must be in .*, got {2**62}"):
            lt.aio_handle(**{name: 2**62})
        with refused(ValueError, f"{name} must not be negative, got -1"):
            lt.aio_handle(**{name: -1})
        for wrong in NO_WHOLE_NUMBERS:
            with refused(TypeError, f"{name} must be a whole number, got "):
                lt.aio_handle(**{name: wrong})
    for name in ("engine", "direct"):
        with refused(TypeError, f"{name} must be a str, got None"):
            lt.aio_handle(**{name: None})


def test_memory_arguments_are_named(handle):
    for wrong in HUGE:
        with refused(ValueError, r"num_elem must be from 0 to 2\*\*63 - 1, got "):
            handle.new_cpu_locked_tensor(wrong, data())
        with refused(ValueError, r"numa_node must be from 0 to 2\*\*63 - 1, got "):
            lt.locked_memory(numa_node=wrong)
    for wrong in (2**40, -1):
        with refused(ValueError, f"numa_node {wrong} does not exist; this machine has 0"):
            lt.locked_memory(numa_node=wrong)
    for wrong in (True, 1.0, "1"):
        with refused(TypeError, "num_elem must be a whole number, got "):
            handle.new_cpu_locked_tensor(wrong, data())
        with refused(TypeError, "numa_node must be a whole number, got "):
            lt.locked_memory(numa_node=wrong)
    with refused(TypeError, r"new_cpu_locked_tensor\(\) needs example_tensor"):
        handle.new_cpu_locked_tensor(5, numpy.ones(3))
    for call in (handle.free_cpu_locked_tensor, lt.as_plain):
        for wrong in (None, 5, numpy.ones(3)):
            with refused(TypeError, rf"{call.__name__}\(\) takes a torch.Tensor, got {type(wrong).__name__}"):
                call(wrong)


def test_save_refuses_metadata_and_tensors_that_it_cannot_write(tmp_path):
    for wrong in (5, "a", [("a", "b")], {1: "a"}, {"a": 1}):
        with refused(TypeError, "metadata must be a dict of str to str, got "):
            lt.save({"a": data()}, tmp_path / "file", metadata=wrong)
    with refused(TypeError, "'a' is an UninitializedParameter, which has no bytes yet"):
        lt.save({"a": torch.nn.UninitializedParameter()}, tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_a_writers_buffer_is_a_whole_number_that_there_is_memory_for(handle, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for wrong in (None, 4096.0, True, "4096"):
        with refused(TypeError, f"buffer_bytes must be a whole number, got {type(wrong).__name__}"):
            lt.open_writer(handle, path, buffer_bytes=wrong)
    for wrong in (0, -4096, 5, 2**70):
        with refused(ValueError, "buffer_bytes must be a positive multiple of 4096"):
            lt.open_writer(handle, path, buffer_bytes=wrong)
    with pytest.raises(lt.LockLimitError):
        lt.open_writer(handle, path, buffer_bytes=2**50)
    assert path.read_bytes() == b"old"
    with lt.open_writer(handle, path, buffer_bytes=numpy.int64(4096)) as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"new"


def test_settings_nested_too_deeply_are_no_json(tmp_path):
    path = tmp_path / "aio.json"
    path.write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(ValueError, match="aio.json is not JSON"):
        lt.AioHandle.from_file(path)
    path.write_text(json.dumps({"aio": {"block_size": 2**63}}))
    with pytest.raises(ValueError, match="block_size"):
        lt.AioHandle.from_file(path)


def test_the_kernels_refusals_are_sentences(handle, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError) as raised:
            handle.sync_pwrite(data(), fd)
    finally:
        os.close(fd)
    assert str(raised.value) == f"[Errno 9] cannot write 8 bytes at offset 0: Bad file descriptor: '<file descriptor {fd}>'"
    with lt.aio_handle(direct="require") as strict, pytest.raises(OSError) as raised:
        strict.sync_pread(data(), "/proc/self/status")
    assert str(raised.value) == (
        "[Errno 95] cannot do direct I/O, which this file system does not grant: Operation not supported: "
        "'/proc/self/status'"
    )


@pytest.mark.parametrize("name", [*CALLS, "preadv", "pwritev", "wait", "fsync", "close", "stats", "engine", "closed"])
def test_help_says_what_is_taken_and_returned(name):
    doc = getattr(lt.AioHandle, name).__doc__
    assert "torch.Tensor" in doc or not name.startswith(("p", "read", "write", "sync", "async"))
    for word in ("buffer: object", "at::Tensor", "arg0"):
        assert word not in doc
