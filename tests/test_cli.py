"""The command line: the demo's main job, the doctor's text, errors and exit statuses."""

import json
import os

import pytest
from expecttest import assert_expected_inline
from rich.console import Console

from locked_tensor.cli import doctor, main


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
