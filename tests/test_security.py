"""What must never happen: foreign bytes on disk, inherited descriptors, overflows, paths that end early."""

import os
import subprocess

import pytest
import torch
from conftest import missing

import locked_tensor as lt

SECRET = b"the bytes of another tensor"
HUGE = [(1 << 63) - 1, 1 << 63, 1 << 64, -1, -(1 << 63), -(1 << 64)]


def secret_tensor(nbytes):
    return torch.frombuffer(bytearray((SECRET * (nbytes // len(SECRET) + 1))[:nbytes]), dtype=torch.uint8)


@pytest.fixture
def image(disk_folder):
    """A small ext4 of its own: (its folder, a function that returns every byte of the device)."""
    if os.geteuid() != 0:
        missing("root, for a loop device")
    path, point = disk_folder / "image", disk_folder / "mount"
    with open(path, "wb") as file:
        file.truncate(32 << 20)
    point.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(path)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(path), str(point)], capture_output=True, text=True)
    if mounted.returncode != 0:
        missing(f"a loop device: {mounted.stderr}")

    def device_bytes():
        subprocess.run(["umount", str(point)], check=True)
        return path.read_bytes()

    yield point, device_bytes
    if os.path.ismount(point):
        subprocess.run(["umount", str(point)], check=False)


def test_staging_and_padding_carry_no_bytes_of_other_tensors_to_the_disk(engine, image, tmpfs_folder):
    folder, device_bytes = image
    with lt.aio_handle(engine=engine, staging_bytes=1 << 20) as handle, lt.aio_handle(engine=engine) as locked:
        with lt.locked_memory():
            pool = torch.empty(4 << 20, dtype=torch.uint8).copy_(secret_tensor(4 << 20))
        for number, size in enumerate([1, 511, 513, 4095, 4097, 100_001, (1 << 20) + 7]):
            # Every chunk holds the secret now, and so does the memory around what is written.
            for _ in range(4):
                handle.sync_pwrite(secret_tensor(2 << 20), tmpfs_folder / "secret")
            handle.sync_pwrite(torch.full((size,), 7, dtype=torch.uint8), folder / f"file{number}", number)
            pool[100 : 100 + size] = 9
            locked.sync_pwrite(pool[100 : 100 + size], folder / f"locked{number}", 100)
            pool[100 : 100 + size] = secret_tensor(size)
            with pytest.raises(OSError):
                handle.sync_pwrite(secret_tensor(64 << 20), folder / f"too much{number}")
            os.truncate(folder / f"file{number}", number + size + 8192)
            assert (folder / f"file{number}").read_bytes() == bytes(number) + bytes([7]) * size + bytes(8192)
            handle.fsync(folder / f"file{number}")
    assert SECRET not in device_bytes()


def test_no_descriptor_reaches_another_program(engine, disk_folder):
    import asyncio

    before = set(os.listdir("/proc/self/fd"))
    own = os.open(disk_folder / "own", os.O_RDWR | os.O_CREAT)
    with lt.aio_handle(engine=engine) as handle:
        for number in range(3):
            handle.sync_pwrite(torch.ones(5000), disk_folder / f"file{number}", durable=True)
            handle.sync_pread(torch.ones(5000), disk_folder / f"file{number}")
        handle.async_pwrite(torch.ones(1 << 20), fd=own)

        async def main():
            await handle.submit_pwrite(torch.ones(5000), disk_folder / "file")

        asyncio.run(main())
        opened = set(os.listdir("/proc/self/fd")) - before
        inherited = []
        for number in opened:
            try:
                flags = next(line for line in open(f"/proc/self/fdinfo/{number}") if line.startswith("flags:"))
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
            if not int(flags.split()[1], 8) & os.O_CLOEXEC:
                inherited.append(os.readlink(f"/proc/self/fd/{number}"))
    os.close(own)
    assert len(opened) > 6
    assert inherited == []


@pytest.mark.parametrize("value", HUGE)
def test_a_huge_or_negative_offset_is_refused_and_nothing_is_written(disk_folder, value):
    path, data = disk_folder / "file", torch.zeros(10, dtype=torch.uint8)
    path.write_bytes(b"as it was")
    with lt.aio_handle() as handle:
        for call in (handle.sync_pwrite, handle.sync_pread, handle.async_pwrite, handle.submit_pread):
            with pytest.raises((ValueError, TypeError)):
                call(data, path, value)
        for call in (handle.pwritev, handle.preadv):
            with pytest.raises((ValueError, TypeError)):
                call([data, data], path, value)
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            handle.submit_batch([("write", data, path, value)])
        assert handle.wait() == 0
    assert path.read_bytes() == b"as it was"


@pytest.mark.parametrize("value", HUGE)
def test_huge_or_negative_sizes_are_refused_by_name(value):
    for name in ("block_size", "queue_depth", "intra_op_parallelism", "staging_bytes", "vector_run_bytes", "max_pending"):
        with pytest.raises((ValueError, TypeError)) as refused:
            lt.aio_handle(**{name: value})
        assert name in str(refused.value)
    with lt.aio_handle() as handle:
        with pytest.raises((ValueError, TypeError, MemoryError)):
            handle.new_cpu_locked_tensor(value, torch.empty(0))
    if value < 0:
        with pytest.raises((ValueError, TypeError)):
            lt.set_cache_limit(value)


def test_the_largest_settings_together_do_not_overflow(disk_folder):
    data = torch.arange(100_000)
    with lt.aio_handle(1 << 40, 32768, engine="threads", staging_bytes=1 << 34, vector_run_bytes=1 << 40) as handle:
        handle.sync_pwrite(data, disk_folder / "file")
        back = torch.empty_like(data)
        handle.sync_pread(back, disk_folder / "file")
        assert lt.memlock_limit().locked < 1 << 30  # no chunk of the size of such a block
    assert torch.equal(back, data)


def test_a_path_with_a_nul_is_refused_and_any_other_name_is_a_file(disk_folder):
    data = torch.zeros(10, dtype=torch.uint8)
    with lt.aio_handle() as handle:
        for path in ("a\0b", b"a\0b", f"{disk_folder}/file\0.safe"):
            for call in (handle.sync_pwrite, handle.async_pread, handle.submit_pwrite):
                with pytest.raises(ValueError, match="null"):
                    call(data, path)
            with pytest.raises(ValueError, match="null"):
                handle.fsync(path)
        name = os.fsencode(disk_folder) + b"/\xff\n' \xe2\x82"
        handle.sync_pwrite(data, name)
        handle.sync_pread(data, name)
        assert os.listdir(os.fsencode(disk_folder)) == [os.path.basename(name)]
        with pytest.raises(FileNotFoundError) as refused:
            handle.sync_pread(data, name + b"2")
        assert os.fsencode(refused.value.filename) == name + b"2"
        with pytest.raises(OSError) as refused:
            handle.sync_pwrite(data, disk_folder / ("x" * 300))
        assert refused.value.errno == 36
        with pytest.raises(FileNotFoundError):
            handle.sync_pwrite(data, "")


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 40, 1 << 70, 999_999])
def test_a_descriptor_that_is_none_is_refused(number):
    with lt.aio_handle() as handle:
        with pytest.raises((ValueError, OverflowError, OSError)):
            handle.async_pwrite(torch.zeros(3), fd=number)
            handle.wait()
        assert handle.wait() == 0
