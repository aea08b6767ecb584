"""What `doctor` asks of the machine and of a folder: facts, no judgement."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

import locked_tensor as lt
from locked_tensor.integrations import cufile

PROBE_BYTES = 1 << 20
CAP_IPC_LOCK = 14  # its bit in CapEff, capabilities(7)


@dataclass(frozen=True)
class MachineFacts:
    """What holds for every folder."""

    kernel: str
    torch: str
    engines: list[lt.EngineInfo]
    memlock: lt.MemlockLimit
    is_limit_binding: bool  #: False with CAP_IPC_LOCK, mlock(2)
    lock_error: str  #: of locking PROBE_BYTES; empty when it worked
    huge_pages: str  #: transparent_hugepage/enabled: "always", "madvise", "never" or "unknown"
    hugetlb_pages: str
    numa_nodes: str
    cufile_refusal: str  #: why cuFile (GPUDirect Storage) is not usable, and the remedy; empty where it is


@dataclass(frozen=True)
class BlockDevice:
    """The disk below a file system, by /sys/dev/block."""

    kind: str
    logical_block_bytes: int


@dataclass(frozen=True)
class FolderFacts:
    """What a file in one folder meets."""

    folder: str
    file_system: str
    mount_point: str
    source: str  #: what is mounted there
    device: Optional[BlockDevice]  #: None where no disk is behind it
    free_bytes: int
    is_direct: bool  #: PROBE_BYTES went to a file without the page cache
    write_error: str  #: of writing them; empty when it worked


def examine_machine() -> MachineFacts:
    memlock = lt.memlock_limit()  # before the probe, which locks some
    lock_error = ""
    try:
        with lt.locked_memory():
            torch.empty(PROBE_BYTES, dtype=torch.uint8)
    except lt.LockLimitError as error:
        lock_error = str(error)
    return MachineFacts(
        kernel=platform.release(),
        torch=torch.__version__,
        engines=lt.engines(),
        memlock=memlock,
        is_limit_binding=memlock.soft is not None and not _has_cap_ipc_lock(),
        lock_error=lock_error,
        huge_pages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        hugetlb_pages=_read("/proc/sys/vm/nr_hugepages"),
        numa_nodes=_read("/sys/devices/system/node/online"),
        cufile_refusal=cufile.why_unusable(),
    )


def examine_folder(folder: Path) -> FolderFacts:
    """Writes a small file into the folder, and removes it.

    Raises:
        NotADirectoryError, FileNotFoundError: it is not a folder that is there.
    """
    with os.scandir(folder):
        pass
    mounted = _command("df", "--output=fstype,source,target", str(folder)).splitlines()
    file_system, source, mount_point = (mounted[-1].split(None, 2) if mounted else []) or ["unknown"] * 3
    free = os.statvfs(folder)
    is_direct, write_error = _try_writing(folder)
    return FolderFacts(
        folder=str(folder),
        file_system=file_system,
        mount_point=mount_point,
        source=source,
        device=_block_device(folder, source),
        free_bytes=free.f_bavail * free.f_frsize,
        is_direct=is_direct,
        write_error=write_error,
    )


def _try_writing(folder: Path) -> tuple[bool, str]:
    # Ordinary memory on purpose: the folder's answer must not depend on the lock limit.
    block = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    path = folder / f".locked-tensor-doctor-{os.getpid()}"
    try:
        with lt.aio_handle() as handle:
            try:
                handle.sync_pwrite(block, path)
            finally:
                path.unlink(missing_ok=True)
            return handle.stats().bytes_buffered == 0, ""
    except OSError as error:
        return False, str(error)


def _block_device(folder: Path, source: str) -> Optional[BlockDevice]:
    """The device of what is mounted, or of the folder itself where that has no node of its own."""
    number = os.stat(folder).st_dev
    try:
        node = os.stat(source)
        if stat.S_ISBLK(node.st_mode):
            number = node.st_rdev  # btrfs gives its folders numbers that no device has
    except OSError:
        pass  # "tmpfs", "proc" or a server's name is no path: the folder's own number decides
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    logical_block = _read(str(disk / "queue/logical_block_size"))
    if not logical_block.isdecimal():
        return None
    return BlockDevice(_kind(disk), int(logical_block))


def _kind(disk: Path) -> str:
    if disk.name.startswith("nvme"):
        return "NVMe disk"
    if disk.name.startswith(("vd", "xvd")):
        return "virtual disk"  # says it rotates whatever is below it
    return "rotating disk" if _read(str(disk / "queue/rotational")) == "1" else "solid-state disk"


def _has_cap_ipc_lock() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def _chosen(setting: str) -> str:
    """The word in brackets of a kernel setting such as "always [madvise] never"."""
    return setting[setting.find("[") + 1 : setting.find("]")] if "[" in setting else setting


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
