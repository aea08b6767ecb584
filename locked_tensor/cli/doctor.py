"""`locked-tensor doctor`: what this machine grants, and the command that cures each problem."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple, Optional

from rich.console import Console

import locked_tensor as lt
from locked_tensor.cli import examine

LEAST_FREE_BYTES = 128 << 20  # what `locked-tensor demo` writes, twice over


class Finding(NamedTuple):
    """One fact, judged. `cure` is what mends it, or betters it when it is no problem; else empty."""

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
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.set_defaults(run=lambda chosen: run(chosen.folder, chosen.json))


def run(folder: Optional[Path], as_json: bool, console: Optional[Console] = None) -> int:
    console = console or Console(highlight=False, soft_wrap=True)
    findings = judge_machine(examine.examine_machine())
    if folder is not None:
        findings += _examined_folder(folder)
    if as_json:
        console.out(json.dumps([finding._asdict() for finding in findings], indent=2), highlight=False)
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


def judge_machine(facts: examine.MachineFacts) -> list[Finding]:
    findings = [Finding("kernel", facts.kernel), Finding("torch", facts.torch)]
    is_any_usable = any(info.usable for info in facts.engines)
    for info in facts.engines:
        what, _, cure = info.reason.partition("; ")
        findings.append(
            Finding(f"engine {info.name}", "works")
            if info.usable
            else Finding(f"engine {info.name}", f"refused: {what}", not is_any_usable, cure)
        )
    findings.append(_judge_limit(facts))
    findings.append(_judge_huge_pages(facts.huge_pages))
    findings.append(Finding("hugetlb pool", f"{facts.hugetlb_pages} pages"))
    findings.append(Finding("NUMA nodes", _nodes(facts.numa_nodes)))
    findings.append(_judge_cufile(facts.cufile_refusal))
    return findings


def _judge_cufile(refusal: str) -> Finding:
    if not refusal:
        return Finding("GPUDirect Storage", "works: gds_handle moves GPU tensors by cuFile")
    what, _, cure = refusal.partition("; ")
    return Finding("GPUDirect Storage", f"not usable: {what}; GPU tensors are staged", False, cure)


def _nodes(listed: str) -> str:
    """The kernel's list of ranges, such as "0-1,3", with its count in front."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
        return listed
    ends = [part.partition("-")[::2] for part in listed.split(",")]
    count = sum(int(last or first) - int(first) + 1 for first, last in ends)
    return f"{count} ({'node' if count == 1 else 'nodes'} {listed})"


def _judge_limit(facts: examine.MachineFacts) -> Finding:
    limit = facts.memlock
    found = f"RLIMIT_MEMLOCK {_kib(limit.soft)} (hard limit {_kib(limit.hard)}), {_kib(limit.locked)} locked"
    if facts.lock_error:
        return Finding("locked memory", f"{found}: {facts.lock_error.split('; ')[0]}", True, _raise(limit))
    if facts.is_limit_binding:
        return Finding("locked memory", found, False, f"for more: {_raise(limit)}")
    return Finding("locked memory", found if limit.soft is None else f"{found}; not binding: CAP_IPC_LOCK")


def _raise(limit: lt.MemlockLimit) -> str:
    """What raises the lock limit: the shell may, up to the hard limit; above it only root."""
    if limit.hard is None:
        return "ulimit -l unlimited"
    if limit.soft is not None and limit.soft < limit.hard:
        return f"ulimit -l {limit.hard >> 10}"
    return (
        "echo \"$USER - memlock unlimited\" | sudo tee -a /etc/security/limits.conf, and log in again "
        "(systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1)"
    )


def _judge_huge_pages(chosen: str) -> Finding:
    if chosen == "never":
        cure = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("transparent huge pages", "never: locking takes longer and I/O more CPU", False, cure)
    return Finding("transparent huge pages", chosen)


def _examined_folder(folder: Path) -> list[Finding]:
    try:
        return judge_folder(examine.examine_folder(folder))
    except FileNotFoundError:
        return [Finding("folder", f"{folder} is not there", True, f"mkdir -p {shlex.quote(str(folder))}")]
    except NotADirectoryError:
        return [Finding("folder", f"{folder} is not a folder", True, "name the folder that it lies in")]
    except PermissionError as error:
        return [Finding("folder", str(error), True, "choose a folder that you may read and write")]


def judge_folder(facts: examine.FolderFacts) -> list[Finding]:
    findings = [
        Finding("file system", f"{facts.file_system} at {facts.mount_point}"),
        _judge_device(facts),
        _judge_space(facts),
    ]
    if facts.write_error:
        cure = "choose a folder that can be written to"
        findings.append(Finding("writing", facts.write_error, True, cure))
    elif facts.is_direct:
        findings.append(Finding("direct I/O", "granted"))
    else:
        found = "not granted: bytes go through the page cache"
        cure = "choose a folder on a disk file system (ext4, xfs, btrfs, f2fs)"
        findings.append(Finding("direct I/O", found, False, cure))
    return findings


def _judge_device(facts: examine.FolderFacts) -> Finding:
    if facts.device is None:
        return Finding("device", f"{facts.source}: no disk of this machine")
    device = facts.device
    return Finding(
        "device", f"{facts.source}: {device.kind}, blocks of {device.logical_block_bytes:,} bytes"
    )


def _judge_space(facts: examine.FolderFacts) -> Finding:
    found = f"{facts.free_bytes / 2**30:.1f} GiB"
    if facts.free_bytes < LEAST_FREE_BYTES:
        return Finding("free space", found, True, "df -h; choose a folder with room")
    return Finding("free space", found)


def _kib(nbytes: Optional[int]) -> str:
    return "unlimited" if nbytes is None else f"{nbytes >> 10:,} KiB"
