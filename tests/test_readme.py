"""Every command and example of the README runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks("bash")).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def test_the_first_example_has_twelve_lines():
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) == 12


@pytest.mark.parametrize("example", blocks("python"))
def test_examples_run(example, disk_folder):
    done = subprocess.run([sys.executable, "-c", example], cwd=disk_folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.listdir(disk_folder) == []


@pytest.mark.parametrize("example", blocks("python"))
def test_examples_fit_an_ordinary_lock_limit(example, disk_folder, run_with_memlock, monkeypatch):
    monkeypatch.chdir(disk_folder)
    done = run_with_memlock(8192, "-c", example)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, disk_folder):
    words = command.split()
    if words[0] == "make":
        words = ["make", "-n", "-C", str(ROOT)] + words[1:]
    else:
        assert words[0] == "locked-tensor"
        words = [sys.executable, "-m", "locked_tensor"] + words[1:]
    done = subprocess.run(words, cwd=disk_folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.listdir(disk_folder) == []
