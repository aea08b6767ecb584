"""The command line: the demo's main job, the doctor's text, errors and exit statuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from rich.console import Console

import locked_tensor as lt
from locked_tensor.cli import doctor, main

ROOT = Path(__file__).parent.parent


def run_with_memlock(kib: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that may lock so much and no more, as an ordinary user's."""
    if os.geteuid() != 0:
        drop = []
    elif shutil.which("capsh"):
        drop = ["capsh", "--drop=cap_ipc_lock", "--"]
    else:
        pytest.skip("capsh (Debian: libcap2-bin) is missing, and root locks without a limit")
    command = [*(drop or ["bash"]), "-c", f'ulimit -l {kib} && exec "$@"', "bash"]
    command += [sys.executable, "-m", "locked_tensor", *words]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="120")
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def shown(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("nbytes", [1, 4097, 5_000_003])
def test_demo_compares_every_byte_and_leaves_nothing(folder, capsys, nbytes):
    source = folder / "input"
    source.write_bytes(os.urandom(nbytes))
    assert main(["demo", "--input", str(source), "--folder", str(folder)]) == 0
    assert "every byte came back" in shown(capsys)
    assert os.listdir(folder) == ["input"]


def test_demo_makes_its_own_input(disk_folder, capsys):
    assert main(["demo", "--folder", str(disk_folder)]) == 0
    text = shown(capsys)
    assert "67,108,877 bytes of made" in text
    assert "narrow: write" in text and "transposed: read" in text
    assert os.listdir(disk_folder) == []


def test_demo_under_an_ordinary_lock_limit_makes_a_smaller_file(disk_folder):
    done = run_with_memlock(8192, "demo", "--folder", str(disk_folder))
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_MEMLOCK is 8,388,608 bytes" in done.stdout
    assert "4,194,317 bytes of made" in done.stdout
    assert "every byte came back" in done.stdout
    assert os.listdir(disk_folder) == []


def test_demo_where_nothing_can_be_locked_says_so(disk_folder):
    done = run_with_memlock(0, "demo", "--folder", str(disk_folder))
    assert done.returncode == 2
    assert "RLIMIT_MEMLOCK" in done.stderr and "ulimit -l" in done.stderr
    assert os.listdir(disk_folder) == []


def test_demo_names_the_engine_that_moved_the_bytes(disk_folder, capsys, monkeypatch):
    aio_handle = lt.aio_handle
    monkeypatch.setattr(lt, "aio_handle", lambda: aio_handle(engine="threads"))
    assert main(["demo", "--folder", str(disk_folder)]) == 0
    assert "engine threads" in shown(capsys)


def test_demo_with_a_missing_input_says_so(disk_folder, capsys):
    assert main(["demo", "--input", str(disk_folder / "missing"), "--folder", str(disk_folder)]) == 2
    assert "missing" in capsys.readouterr().err
    assert os.listdir(disk_folder) == []


def test_demo_in_a_folder_that_is_not_there_says_so(disk_folder, capsys):
    assert main(["demo", "--folder", str(disk_folder / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_doctor_text():
    findings = [
        doctor.Finding("kernel", "6.1"),
        doctor.Finding("engine io_uring", "refused: EPERM", False),
        doctor.Finding("locked memory", "RLIMIT_MEMLOCK 0 KiB", True, "ulimit -l unlimited"),
    ]
    assert_expected_inline(
        doctor.render(findings),
        """\
   kernel           6.1
   engine io_uring  refused: EPERM
!! locked memory    RLIMIT_MEMLOCK 0 KiB
                    -> ulimit -l unlimited""",
    )


def test_doctor_examines_a_folder_and_leaves_nothing(disk_folder, tmpfs_folder, capsys):
    assert main(["doctor", str(disk_folder)]) == 0
    assert "direct I/O granted" in shown(capsys)
    assert main(["doctor", str(tmpfs_folder), "--json"]) == 0
    facts = {fact["subject"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert facts["direct I/O"]["found"].startswith("not granted")
    assert os.listdir(disk_folder) == [] and os.listdir(tmpfs_folder) == []


def test_doctor_finds_a_missing_folder_to_be_a_problem(disk_folder):
    console = Console(file=open(os.devnull, "w"))
    assert doctor.run(disk_folder / "nowhere", False, console) == 1
