"""The command line's main job: the demo, its errors and exit statuses."""

import json
import os

import pytest

import locked_tensor as lt
from locked_tensor.cli import main

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


def test_demo_under_an_ordinary_lock_limit_makes_a_smaller_file(disk_folder, run_with_memlock):
    done = run_with_memlock(8192, "-m", "locked_tensor", "demo", "--folder", str(disk_folder))
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_MEMLOCK is 8,388,608 bytes" in done.stdout
    assert "4,194,317 bytes of made" in done.stdout
    assert "every byte came back" in done.stdout
    assert os.listdir(disk_folder) == []


def test_demo_where_nothing_can_be_locked_says_so(disk_folder, run_with_memlock):
    done = run_with_memlock(0, "-m", "locked_tensor", "demo", "--folder", str(disk_folder))
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


def test_bench_io_gives_every_figure_and_leaves_nothing(disk_folder, monkeypatch):
    from locked_tensor.cli import bench_io

    monkeypatch.setattr(bench_io, "deepspeed_aio", lambda: None)
    json_file = disk_folder / "figures.json"
    arguments = ["bench", "io", "--folder", str(disk_folder), "--bytes", str(64 << 20), "--rounds", "1"]
    assert main(arguments + ["--json", str(json_file)]) == 0
    figures = {row["what"]: row for row in json.loads(json_file.read_text())}
    assert figures["locked, write"]["unit"] == "GB/s" and figures["locked, write"]["value"] > 0
    assert "one 4 KiB sync_pread / os.preadv, latency" in figures
    assert os.listdir(disk_folder) == ["figures.json"]
    assert all(row["value"] >= 0 for row in figures.values())


def test_bench_checkpoint_gives_every_figure_and_leaves_nothing(disk_folder):
    json_file = disk_folder / "figures.json"
    arguments = ["bench", "checkpoint", "--folder", str(disk_folder), "--bytes", str(16 << 20), "--rounds", "1"]
    assert main(arguments + ["--json", str(json_file)]) == 0
    figures = {row["what"]: row for row in json.loads(json_file.read_text())}
    assert figures["lt.save, locked tensors"]["unit"] == "GB/s"
    ratios = [what for what, row in figures.items() if row["unit"] == "x"]
    assert len(ratios) == 6
    assert "torch.save through open_writer / to a path, both fsynced" in ratios
    assert "cold file: lt.load, memory reused / the fastest of the others" in ratios
    assert os.listdir(disk_folder) == ["figures.json"]
    assert all(row["value"] >= 0 for row in figures.values())


def test_bench_refuses_a_disk_that_it_would_fill(disk_folder, capsys):
    assert main(["bench", "io", "--folder", str(disk_folder), "--bytes", str(1 << 60)]) == 2
    assert "too little free space" in capsys.readouterr().err
