"""Every command and example of the pages runs, and the documentation builds without a broken link."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, missing

PAGES = sorted((ROOT / "docs").glob("*.md"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def named(kind: str) -> list:
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, kind))
    ]


def run(words: list[str], folder: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([path, str(ROOT)]).strip(os.pathsep))
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def without_deepspeed(tmp_path) -> str:
    """A folder that hides DeepSpeed, which compiles for minutes where it is used for the first time."""
    (tmp_path / "deepspeed.py").write_text("raise ImportError\n")
    return str(tmp_path)


@pytest.mark.parametrize("example", named("python"))
def test_examples_run_and_leave_nothing(example, disk_folder):
    done = run([sys.executable, "-c", example], disk_folder)
    assert done.returncode == 0, done.stderr
    assert os.listdir(disk_folder) == []


def examples_of_help() -> list[str]:
    found = []
    for command in ("doctor", "demo", "bench", "tune"):
        text = run([sys.executable, "-m", "locked_tensor", command, "--help"], ROOT).stdout
        found += re.findall(r"example: (locked-tensor .*)", text)
    return found


def test_examples_of_help_run(disk_folder, without_deepspeed):
    examples = examples_of_help()
    assert examples
    for example in examples:
        test_commands_run(example, disk_folder, without_deepspeed)


@pytest.mark.parametrize("commands", named("bash"))
def test_commands_run(commands, disk_folder, without_deepspeed):
    """As they stand, but on less: a small tensor, one round, half a second."""
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "pip":
            assert words[1] == "install"
            continue
        assert words[0] == "locked-tensor"
        less = {"tune": ["--seconds", "0.5", "--bytes", str(8 << 20)], "bench": ["--bytes", str(16 << 20), "--rounds", "1"]}
        words += less.get(words[1], [])
        done = run([sys.executable, "-m", "locked_tensor", *words[1:]], disk_folder, without_deepspeed)
        assert done.returncode == 0, done.stderr
    made = {word for word in shlex.split(commands, comments=True) if word.endswith((".json", ".png"))}
    assert set(os.listdir(disk_folder)) == made


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(make [^`]+)`", CONTRIBUTING))))
def test_targets_of_contributing_are_there(command):
    done = run(["make", "-n", *shlex.split(command)[1:]], ROOT)
    assert done.returncode == 0, done.stderr


def test_the_single_test_of_contributing_is_there():
    (arguments,) = re.findall(r"`\.venv/bin/python (-m pytest [^`]+)`", CONTRIBUTING)
    done = run([sys.executable, *shlex.split(arguments), "--collect-only", "-q"], ROOT)
    assert done.returncode == 0 and "test_" in done.stdout, done.stdout


def test_documentation_builds_and_every_link_leads_somewhere(disk_folder):
    if run([sys.executable, "-c", "import pdoc"], disk_folder).returncode != 0:
        missing("pdoc")
    done = run([sys.executable, str(ROOT / "docs/build.py"), str(disk_folder)], ROOT)
    assert done.returncode == 0, done.stderr
    reference = (disk_folder / "locked_tensor.html").read_text()
    for name in ("aio_handle", "AioHandle.from_file", "AioHandle.async_pread", "AioHandle.wait", "LockedTensor"):
        assert f'id="{name}"' in reference, name
    pages = sorted(path.name for path in disk_folder.glob("*.html"))
    assert {"index.html", "CONTRIBUTING.html", *(f"{page.stem}.html" for page in PAGES)} <= set(pages)


def test_a_broken_link_is_found(disk_folder):
    pytest.importorskip("pdoc")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from build import broken_links
    finally:
        sys.path.remove(str(ROOT / "docs"))
    (disk_folder / "a.html").write_text('<p id="here"><a href="#here"/><a href="#gone"/><a href="b.html"/><a href="x:y"/>')
    assert broken_links(disk_folder) == ["a.html: #gone", "a.html: b.html"]
