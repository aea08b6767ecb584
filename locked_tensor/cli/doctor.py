"""`locked-tensor doctor`: what this machine grants, and the command that cures each problem."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from rich.console import Console

import locked_tensor as lt


class Finding(NamedTuple):
    """One fact. `cure` is the command that mends it when it is a problem, else empty."""

    subject: str
    found: str
    is_problem: bool = False  #: the main job would not work
    cure: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="explain what this machine grants",
        description="Lists kernel, torch, engines, lock limits and huge pages, and for FOLDER its file "
        "system, device and direct I/O. Exit status 1 when the main job would not work.",
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="facts as JSON")
    parser.set_defaults(run=lambda chosen: run(chosen.folder, chosen.json))


def run(folder: Optional[Path], as_json: bool, console: Optional[Console] = None) -> int:
    console = console or Console(highlight=False, soft_wrap=True)
    findings = examine_machine() + (examine_folder(folder) if folder else [])
    if as_json:
        console.print_json(json.dumps([finding._asdict() for finding in findings]))
    else:
        console.print(render(findings), markup=False)
    return 1 if any(finding.is_problem for finding in findings) else 0


def render(findings: list[Finding]) -> str:
    """The findings as text: a line each, cures below their problem."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        mark = "!!" if finding.is_problem else "  "
        lines.append(f"{mark} {finding.subject:<{width}}  {finding.found}")
        if finding.cure:
            lines.append(f"   {'':<{width}}  -> {finding.cure}")
    return "\n".join(lines)


def examine_machine() -> list[Finding]:
    """Facts about the machine that hold for every folder."""
    findings = [
        Finding("kernel", platform.release()),
        Finding("torch", torch.__version__),
    ]
    engines = lt.engines()
    for info in engines:
        found = "works" if info.usable else f"refused: {info.reason}"
        findings.append(Finding(f"engine {info.name}", found))
    findings.append(_examine_limit(lt.memlock_limit()))
    findings.append(_examine_huge_pages())
    findings.append(Finding("hugetlb pool", f"{_read('/proc/sys/vm/nr_hugepages')} pages"))
    findings.append(Finding("NUMA nodes", _read("/sys/devices/system/node/online")))
    return findings


def _examine_limit(limit: lt.MemlockLimit) -> Finding:
    soft = "unlimited" if limit.soft is None else f"{limit.soft >> 10:,} KiB"
    found = f"RLIMIT_MEMLOCK {soft}, {limit.locked >> 10:,} KiB locked by this process"
    try:
        with lt.locked_memory():
            torch.empty(1 << 20, dtype=torch.uint8)
    except lt.LockLimitError as error:
        return Finding("locked memory", found, True, str(error).split("; ")[-1])
    if limit.soft is not None and not _has_cap_ipc_lock():
        return Finding("locked memory", found, False, 'more: "ulimit -l unlimited", or CAP_IPC_LOCK')
    note = "" if limit.soft is None else " (not binding: CAP_IPC_LOCK)"
    return Finding("locked memory", found + note)


def _has_cap_ipc_lock() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)
    return False


def _examine_huge_pages() -> Finding:
    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = setting[setting.find("[") + 1 : setting.find("]")] if "[" in setting else setting
    if chosen == "never":
        cure = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("transparent huge pages", "never: half the bandwidth, ten times the CPU", False, cure)
    return Finding("transparent huge pages", chosen)


def examine_folder(folder: Path) -> list[Finding]:
    """Facts about one folder, found by writing a small file into it."""
    if not folder.is_dir():
        return [Finding(str(folder), "no such folder", True, f"mkdir -p {folder}")]
    kind = _command("stat", "-f", "-c", "%T", str(folder))
    free = os.statvfs(folder)
    findings = [
        Finding("file system", f"{kind} at {_command('df', '--output=target', str(folder)).splitlines()[-1]}"),
        Finding("device", _command("df", "--output=source", str(folder)).splitlines()[-1]),
        Finding("free space", f"{free.f_bavail * free.f_frsize / 2**30:.1f} GiB"),
    ]
    path = folder / f".locked-tensor-doctor-{os.getpid()}"
    try:
        with lt.locked_memory():
            block = torch.zeros(1 << 20, dtype=torch.uint8)
        with lt.aio_handle() as handle:
            handle.sync_pwrite(block, path)
            is_direct = handle.stats().bytes_direct == block.nbytes
    except OSError as error:
        return findings + [Finding("writing", str(error), True, "choose a folder that can be written to")]
    finally:
        path.unlink(missing_ok=True)
    if is_direct:
        findings.append(Finding("direct I/O", "granted"))
    else:
        findings.append(
            Finding("direct I/O", "not granted: bytes go through the page cache", False,
                    "choose a folder on a disk file system (ext4, xfs)")
        )
    return findings


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
