"""`locked-tensor doctor`: its text for facts that are given, and what it finds on this machine."""

import dataclasses
import json
import os

import pytest
from expecttest import assert_expected_inline

import locked_tensor as lt
from locked_tensor.cli import main
from locked_tensor.cli.doctor import judge_folder, judge_machine, render
from locked_tensor.cli.examine import BlockDevice, FolderFacts, MachineFacts, examine_machine

GOOD_MACHINE = MachineFacts(
    kernel="6.1.0",
    torch="2.13.0+cpu",
    engines=[lt.EngineInfo(name, True, "works") for name in ("io_uring", "libaio", "threads")],
    memlock=lt.MemlockLimit(None, None, 0),
    is_limit_binding=False,
    lock_error="",
    huge_pages="madvise",
    hugetlb_pages="0",
    numa_nodes="0-1",
    cufile_refusal="",
)
GOOD_FOLDER = FolderFacts(
    folder="/nvme",
    file_system="xfs",
    mount_point="/nvme",
    source="/dev/nvme0n1p1",
    device=BlockDevice("NVMe disk", 512),
    free_bytes=3 << 40,
    is_direct=True,
    write_error="",
)


def problems(findings):
    return [finding.subject for finding in findings if finding.is_problem]


def test_doctor_text_where_all_is_well():
    findings = judge_machine(GOOD_MACHINE) + judge_folder(GOOD_FOLDER)
    assert problems(findings) == []
    assert_expected_inline(
        render(findings),
        """\
   kernel                  6.1.0
   torch                   2.13.0+cpu
   engine io_uring         works
   engine libaio           works
   engine threads          works
   locked memory           RLIMIT_MEMLOCK unlimited (hard limit unlimited), 0 KiB locked
   transparent huge pages  madvise
   hugetlb pool            0 pages
   NUMA nodes              2 (nodes 0-1)
   GPUDirect Storage       works: gds_handle moves GPU tensors by cuFile
   file system             xfs at /nvme
   device                  /dev/nvme0n1p1: NVMe disk, blocks of 512 bytes
   free space              3072.0 GiB
   direct I/O              granted""",
    )


def test_doctor_text_in_a_container():
    facts = dataclasses.replace(
        GOOD_MACHINE,
        engines=[
            lt.EngineInfo(
                "io_uring", False, "cannot set up: EPERM; docker run --security-opt seccomp=unconfined"
            ),
            *GOOD_MACHINE.engines[1:],
        ],
        memlock=lt.MemlockLimit(64 << 10, 64 << 10, 0),
        is_limit_binding=True,
        lock_error="cannot lock 1.0 MiB: ENOMEM; RLIMIT_MEMLOCK is 64.0 KiB",
        huge_pages="never",
    )
    findings = judge_machine(facts)
    assert problems(findings) == ["locked memory"]
    assert_expected_inline(
        render(findings),
        """\
   kernel                  6.1.0
   torch                   2.13.0+cpu
   engine io_uring         refused: cannot set up: EPERM
                           -> docker run --security-opt seccomp=unconfined
   engine libaio           works
   engine threads          works
!! locked memory           RLIMIT_MEMLOCK 64 KiB (hard limit 64 KiB), 0 KiB locked: cannot lock 1.0 MiB: ENOMEM
                           -> echo "$USER - memlock unlimited" | sudo tee -a /etc/security/limits.conf, and log in again (systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1)
   transparent huge pages  never: locking takes longer and I/O more CPU
                           -> echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled
   hugetlb pool            0 pages
   NUMA nodes              2 (nodes 0-1)
   GPUDirect Storage       works: gds_handle moves GPU tensors by cuFile""",
    )


def test_doctor_text_for_a_folder_in_memory_that_is_full():
    facts = dataclasses.replace(
        GOOD_FOLDER,
        file_system="tmpfs",
        mount_point="/tmp",
        source="tmpfs",
        device=None,
        free_bytes=64 << 20,
        is_direct=False,
    )
    findings = judge_folder(facts)
    assert problems(findings) == ["free space"]
    assert_expected_inline(
        render(findings),
        """\
   file system  tmpfs at /tmp
   device       tmpfs: no disk of this machine
!! free space   0.1 GiB
                -> df -h; choose a folder with room
   direct I/O   not granted: bytes go through the page cache
                -> choose a folder on a disk file system (ext4, xfs, btrfs, f2fs)""",
    )


def test_doctor_without_any_engine_is_a_problem():
    engines = [lt.EngineInfo("io_uring", False, "ENOSYS"), lt.EngineInfo("threads", False, "EAGAIN")]
    facts = dataclasses.replace(GOOD_MACHINE, engines=engines)
    assert problems(judge_machine(facts)) == ["engine io_uring", "engine threads"]


@pytest.mark.parametrize(
    "soft, hard, cure",
    [
        (8 << 20, None, "ulimit -l unlimited"),
        (8 << 20, 1 << 30, "ulimit -l 1048576"),
        (8 << 20, 8 << 20, 'echo "$USER - memlock unlimited" | sudo tee -a /etc/security/limits.conf'),
    ],
)
def test_doctor_cures_a_binding_limit_as_far_as_the_user_may(soft, hard, cure):
    facts = dataclasses.replace(
        GOOD_MACHINE, memlock=lt.MemlockLimit(soft, hard, 0), is_limit_binding=True
    )
    (finding,) = [each for each in judge_machine(facts) if each.subject == "locked memory"]
    assert not finding.is_problem
    assert finding.cure.startswith(f"for more: {cure}")


def test_doctor_names_every_engine_that_engines_names():
    assert [info.name for info in examine_machine().engines] == [info.name for info in lt.engines()]


def test_doctor_examines_a_folder_and_leaves_nothing(disk_folder, tmpfs_folder, capsys):
    assert main(["doctor", str(disk_folder)]) == 0
    assert "direct I/O granted" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", str(tmpfs_folder), "--json"]) == 0
    facts = {fact["subject"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert facts["file system"]["found"] == "tmpfs at /dev/shm"
    assert facts["device"]["found"] == "tmpfs: no disk of this machine"
    assert facts["direct I/O"]["found"].startswith("not granted")
    assert os.listdir(disk_folder) == [] and os.listdir(tmpfs_folder) == []


def test_doctor_where_nothing_can_be_locked_still_reports_all(disk_folder, run_with_memlock):
    done = run_with_memlock(0, "-m", "locked_tensor", "doctor", str(disk_folder))
    assert done.returncode == 1, done.stderr
    assert "!! locked memory" in done.stdout
    assert "RLIMIT_MEMLOCK 0 KiB" in done.stdout
    assert "direct I/O" in done.stdout  # the folder is examined all the same
    assert os.listdir(disk_folder) == []


def test_doctor_finds_a_missing_folder_and_a_file_to_be_problems(disk_folder, capsys):
    assert main(["doctor", str(disk_folder / "no where")]) == 1
    assert f"mkdir -p '{disk_folder / 'no where'}'" in capsys.readouterr().out
    (disk_folder / "file").touch()
    assert main(["doctor", str(disk_folder / "file")]) == 1
    assert "is not a folder" in capsys.readouterr().out


def test_doctor_json_is_for_programs_even_where_colours_are_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["doctor", "--json"]) in (0, 1)
    text = capsys.readouterr().out
    assert "kernel" in {finding["subject"] for finding in json.loads(text)}


@pytest.mark.parametrize(
    "listed, shown",
    [
        ("0", "1 (node 0)"),
        ("0-3", "4 (nodes 0-3)"),
        ("0-1,4", "3 (nodes 0-1,4)"),
        ("unknown", "unknown"),
    ],
)
def test_doctor_tells_how_many_numa_nodes_there_are_and_which(listed, shown):
    findings = judge_machine(dataclasses.replace(GOOD_MACHINE, numa_nodes=listed))
    assert [finding.found for finding in findings if finding.subject == "NUMA nodes"] == [shown]
