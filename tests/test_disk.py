"""What a measurement owes the disk: room left over, and a word before it wears a drive."""

import importlib
import io
import os
import shutil
import sys
from pathlib import Path

import pytest

from locked_tensor.cli import main
from locked_tensor.cli.disk import WEARING_BYTES, check_space, may_wear, work_folder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_check_space_leaves_a_twentieth_free(disk_folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1000, 700, 300))
    check_space(disk_folder, 250)
    with pytest.raises(ValueError, match="too little free space: this writes files of 251 bytes in all, 300"):
        check_space(disk_folder, 251)


def test_an_interrupt_while_the_work_folder_is_made_leaves_nothing(disk_folder, monkeypatch):
    def make_and_interrupt(path, mode):
        os.mkdir(path, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", make_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        with work_folder(disk_folder, "test"):
            pytest.fail("there is no folder to work in")
    assert os.listdir(disk_folder) == []


def test_wear_is_not_mentioned_for_little_or_with_yes(disk_folder, capsys):
    assert may_wear([disk_folder], WEARING_BYTES - 1, is_agreed=False)
    assert may_wear([disk_folder], 1 << 50, is_agreed=True)
    assert capsys.readouterr() == ("", "")


def test_wear_is_warned_of_where_nobody_can_answer(disk_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert may_wear([disk_folder], 100 * 10**9, is_agreed=False)
    assert "up to about 100 GB" in capsys.readouterr().err


@pytest.mark.parametrize("answer, goes_on", [("y", True), ("Yes", True), ("", False), ("n", False)])
def test_wear_is_asked_about_where_somebody_can_answer(disk_folder, capsys, monkeypatch, answer, goes_on):
    monkeypatch.setattr(sys, "stdin", Terminal(answer + "\n"))
    assert may_wear([disk_folder], WEARING_BYTES, is_agreed=False) is goes_on
    assert "wears a flash drive" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["io", "tune", "swap", "checkpoint", "dcp", "deepspeed"])
def test_what_may_wear_a_drive_asks_before(disk_folder, monkeypatch, group):
    if group == "deepspeed":
        pytest.importorskip("deepspeed")
    module = importlib.import_module(f"locked_tensor.cli.bench_{group}")
    asked = []
    monkeypatch.setattr(module, "may_wear", lambda *arguments: asked.append(arguments) or False)
    monkeypatch.setattr(module, "check_space", lambda *arguments: None)
    assert main(["bench", group, "--folder", str(disk_folder)]) == 1
    assert main(["bench", group, "--folder", str(disk_folder), "--yes"]) == 1
    (folders, nbytes, is_agreed), (_, _, is_agreed_too) = asked
    assert folders == [disk_folder] and nbytes >= WEARING_BYTES
    assert (is_agreed, is_agreed_too) == (False, True)
    assert os.listdir(disk_folder) == []
