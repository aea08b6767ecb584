"""The command line's main job: the demo, its errors and exit statuses."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import locked_tensor as lt
from locked_tensor.cli import main
from locked_tensor.cli.bench import GROUPS, Figure, show
from locked_tensor.cli.measure import interleaved


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
    assert "67,108,877 bytes of noise" in text
    assert "narrow: write" in text and "transposed: read" in text
    assert os.listdir(disk_folder) == []


def test_demo_under_an_ordinary_lock_limit_makes_a_smaller_file(disk_folder, run_with_memlock):
    done = run_with_memlock(8192, "-m", "locked_tensor", "demo", "--folder", str(disk_folder))
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_MEMLOCK is 8,388,608 bytes" in done.stdout
    assert "4,194,317 bytes of noise" in done.stdout
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


def test_demo_of_what_is_no_regular_file_says_so(disk_folder, capsys):
    for source in ("/dev/zero", str(disk_folder)):
        assert main(["demo", "--input", source, "--folder", str(disk_folder)]) == 2
        assert f"{source} is not a regular file" in " ".join(capsys.readouterr().err.split())
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


def test_bench_io_compares_with_the_peers_that_are_installed(disk_folder, monkeypatch):
    from locked_tensor.cli import bench_files

    monkeypatch.setattr(bench_files, "nixl_api", lambda: None)
    with lt.locked_memory():
        tensor = torch.empty(1 << 20, dtype=torch.uint8).fill_(7)
    found = {figure.what: figure for figure in bench_files.compare_files(disk_folder, tensor, rounds=2)}
    for what in ("save and fsync", "load, not cached"):
        figure = found[f"{what}: ours"]
        assert figure.unit == "GB/s" and 0 < figure.low <= figure.value <= figure.high
        assert found[f"{what}: our bandwidth / numpy's"].value > 0
    assert os.listdir(disk_folder) == []


def test_bench_draws_its_figures(disk_folder, capsys):
    pytest.importorskip("matplotlib")
    picture = disk_folder / "figures.png"
    found = [Figure("one", 2.0, "GB/s", 1.0, 3.0), Figure("two", 0.5, "x"), Figure("three", 0.25, "")]
    assert show("bench", found, None, picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1 to 3" in shown(capsys)


def test_a_plot_without_matplotlib_is_refused_before_the_work(disk_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        main(["tune", "--folder", str(disk_folder), "--plot", "map.png"])
    assert ended.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("group", [name.rpartition("bench_")[2] for name in GROUPS])
def test_every_bench_explains_itself(group, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", group, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_interleaved_takes_turns_and_prepares_untimed():
    done = []
    costs = interleaved(
        {"a": lambda: done.append("a"), "b": lambda: time.sleep(0.01)},
        rounds=2,
        prepare=lambda name: (done.append(f"for {name}"), time.sleep(0.05)),
    )
    assert done == ["for a", "a", "for b"] * 3
    assert costs["a"].wall < 0.05 and costs["b"].wall >= 0.01
    assert costs["b"].wall_least <= costs["b"].wall <= costs["b"].wall_most


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_leaves_nothing(disk_folder, number):
    arguments = ["tune", "--folder", str(disk_folder), "--bytes", str(8 << 20), "--seconds", "60", "--yes"]
    command = [sys.executable, "-m", "locked_tensor", *arguments]
    # What a shell starts with `&` ignores SIGINT, and so would all that these tests start.
    hears = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears) as ended:
        deadline = time.monotonic() + 60
        while not os.listdir(disk_folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert os.listdir(disk_folder)
        ended.send_signal(number)
        _, errors = ended.communicate(timeout=60)
    assert ended.returncode == 130
    assert "interrupted; nothing is left behind" in errors
    assert os.listdir(disk_folder) == []


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


def test_bench_swap_gives_every_figure_and_leaves_nothing(disk_folder, capsys):
    path = disk_folder / "figures.json"
    arguments = ["--parameters", "40000", "--rounds", "1", "--json", str(path)]
    assert main(["bench", "swap", "--folder", str(disk_folder), *arguments]) == 0
    found = {figure["what"]: figure["value"] for figure in json.loads(path.read_text())}
    assert found["0 M parameters, AdamW: pipelined / without"] > 0
    assert any(what.endswith("forward / in memory") for what in found)
    assert found["forward and backward, save_on_disk / save_on_cpu"] > 0
    assert os.listdir(disk_folder) == ["figures.json"]


def test_bench_io_refuses_a_tensor_too_small_for_its_measurements(disk_folder, capsys):
    assert main(["bench", "io", "--folder", str(disk_folder), "--bytes", "4096"]) == 2
    assert "--bytes must be at least 16,777,216, got 4,096" in capsys.readouterr().err


def test_bench_dispatch_gives_every_figure(tmp_path, monkeypatch):
    from locked_tensor.cli import bench_dispatch

    monkeypatch.setattr(bench_dispatch, "CALLS", 2)
    json_file = tmp_path / "figures.json"
    assert main(["bench", "dispatch", "--rounds", "1", "--json", str(json_file)]) == 0
    figures = {row["what"]: row["value"] for row in json.loads(json_file.read_text())}
    for name in ("narrow", "view", "t[3:11]", "unfold through dispatch", "unbind through dispatch",
                 "torch.add of two small tensors, one locked"):
        assert figures[f"{name}, ours / the smallest Python subclass"] > 0
        assert figures[f"{name}, ours / plain"] > 0
    assert figures["a training step, parameters locked / plain"] > 0
    assert figures["torch.empty(16) inside the context"] > 0


def soak_arguments(folder, json_file) -> list[str]:
    return ["bench", "soak", "--minutes", "0.1", "--seed", "1", "--folder", str(folder), "--json", str(json_file)]


def figures_in(json_file) -> dict[str, float]:
    return {row["what"]: row["value"] for row in json.loads(json_file.read_text())}


def test_soak_finds_nothing_wrong_and_leaves_nothing(folder, tmp_path):
    # In a process of its own: what the heap of this one keeps and gives back is not the soak's.
    command = [sys.executable, "-m", "locked_tensor", *soak_arguments(folder, tmp_path / "figures")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = figures_in(tmp_path / "figures")
    assert figures["operations"] > 0 and figures["engines"] == sum(info.usable for info in lt.engines())
    assert figures["bytes wrong"] == figures["errors lost or unexpected"] == 0
    assert figures["growth of VmLck"] == figures["growth of descriptors"] == figures["growth of threads"] == 0
    assert figures["errors seen as expected"] <= figures["faults injected"]
    assert os.listdir(folder) == []


def test_soak_sees_a_handle_that_loses_bytes_and_errors(tmpfs_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lt.AioHandle, "sync_pwrite", lambda *arguments, **more: 1)
    monkeypatch.setattr(lt.AioHandle, "sync_pread", lambda *arguments, **more: 1)
    status = main(soak_arguments(tmpfs_folder, tmp_path / "figures"))
    figures = figures_in(tmp_path / "figures")
    assert status == 1
    assert figures["bytes wrong"] > 0 and figures["errors lost or unexpected"] > 0
    assert "was lost" in shown(capsys)


def test_soak_refuses_no_time(disk_folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "soak", "--minutes", "0", "--folder", str(disk_folder)])
    assert ended.value.code == 2
    assert "argument --minutes: must be a positive number, got '0'" in capsys.readouterr().err
