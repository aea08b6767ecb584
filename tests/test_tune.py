"""`locked-tensor tune`: the search on a made landscape, the command on a real disk, and the file it writes."""

import json
import math
import os
import random

import pytest

import locked_tensor as lt
from locked_tensor.cli import main, tune
from locked_tensor.cli.search import LEAST_ROUNDS, OPERATIONS, Search, Space
from locked_tensor.settings import AioSettings, render_settings

SPACE = Space(
    block_sizes=[size << 10 for size in (128, 256, 512, 1024, 2048, 4096, 8192)],
    queue_depths=[8, 16, 32, 64, 128, 256],
    parallelisms=[1, 2, 4],
    engines=["io_uring", "libaio", "threads"],
)
DEFAULT = AioSettings(1 << 20, 128, 1, "io_uring")
SMALL = str(8 << 20)


class Landscape:
    """Two hills, one for each operation, seen through noise that only slows; a trial takes 0.3 s."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        everything = SPACE.everything()
        self.tops = {name: choose.choice(everything) for name in OPERATIONS}
        self.noise = choose
        self.now = 0.0

    def height(self, operation: str, settings: AioSettings) -> float:
        top = self.tops[operation]
        away = abs(math.log2(settings.block_size / top.block_size)) + abs(
            math.log2(settings.queue_depth / top.queue_depth)
        )
        away += abs(math.log2(settings.intra_op_parallelism / top.intra_op_parallelism))
        return 1e9 * 0.93**away * (1.0 if settings.engine == top.engine else 0.9)

    def measure(self, settings: AioSettings) -> dict[str, float]:
        self.now += 0.3
        return {name: self.height(name, settings) * self.noise.uniform(0.97, 1.0) for name in OPERATIONS}


@pytest.mark.parametrize("seed", range(20))
def test_search_finds_the_top_of_a_noisy_hill_in_time(seed):
    hills = Landscape(seed)
    search = Search(SPACE, hills.measure, DEFAULT, seconds=60, clock=lambda: hills.now)
    search.run()
    winners = tune.winners_of(search)
    for name in OPERATIONS:
        assert hills.height(name, getattr(winners, name)) >= 0.95e9
    assert hills.now <= 60


@pytest.mark.parametrize("seconds", [4, 10, 20, 30, 61])
def test_a_search_keeps_to_its_time_by_fewer_finalists(seconds):
    hills = Landscape(5)
    search = Search(SPACE, hills.measure, DEFAULT, seconds, clock=lambda: hills.now)
    search.run()
    least = 3 * LEAST_ROUNDS * 0.3  # of three finalists
    assert hills.now <= max(seconds, 0.7 * seconds + least + 0.3) + 0.001
    assert len(search.finalists) >= (6 if seconds > 60 else 2)


def test_search_takes_the_settings_that_cost_least_of_those_that_are_as_fast():
    clock = iter(range(10**6))
    search = Search(
        SPACE, lambda settings: dict.fromkeys(OPERATIONS, 1e9), DEFAULT, 500, clock=lambda: float(next(clock))
    )
    search.run()
    cheapest = min(
        search.finalists,
        key=lambda found: (
            SPACE.engines.index(found.engine), found.intra_op_parallelism, found.queue_depth, found.block_size
        ),
    )
    assert tune.winners_of(search) == (cheapest, cheapest, cheapest)


def test_search_of_a_space_with_one_point_ends_with_it():
    search = Search(Space([1 << 20], [128], [1], ["io_uring"]), lambda _: {"read": 1.0, "write": 1.0}, DEFAULT, 1e-9)
    search.run()
    assert search.finalists == [DEFAULT]


def test_tune_shows_and_saves_settings_that_from_file_reads(folder, capsys, monkeypatch):
    saved, picture = folder / "aio.json", folder / "map.png"
    pytest.importorskip("matplotlib")
    arguments = ["tune", "--folder", str(folder), "--seconds", "1", "--bytes", SMALL]
    assert main([*arguments, "--save", str(saved), "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert sorted(os.listdir(folder)) == ["aio.json", "map.png"]
    assert picture.read_bytes().startswith(b"\x89PNG")

    file = json.loads(saved.read_text())
    (shown,) = [line.split('"aio": ')[1] for line in text.splitlines() if line.startswith("DeepSpeed")]
    assert json.loads(shown) == file["aio"]
    for best_for in ("read", "write", None):
        with lt.AioHandle.from_file(saved, best_for=best_for) as handle:
            expected = {**file["aio"], "engine": file["locked_tensor"]["engine"]}
            if best_for is not None:
                expected = file["locked_tensor"][best_for]
            assert handle.get_block_size() == expected["block_size"]
            assert handle.get_queue_depth() == expected["queue_depth"]
            assert handle.get_intra_op_parallelism() == expected["intra_op_parallelism"]
            assert handle.engine == expected["engine"]
            line = f"{best_for or 'both':<5}  lt.aio_handle({handle.get_block_size()}, {handle.get_queue_depth()}, "
            assert line in text


def test_tune_spreads_over_several_folders_and_without_fio_compares_with_plain_calls(
    disk_folder, capsys, monkeypatch
):
    monkeypatch.setattr(tune, "fio_figures", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "120")
    folders = [disk_folder / "a:b", disk_folder / "c"]
    for each in folders:
        each.mkdir()
    arguments = ["tune", "--folder", *map(str, folders), "--seconds", "0.5", "--bytes", SMALL]
    assert main(arguments) == 0
    assert "plain calls" in " ".join(capsys.readouterr().out.split())
    assert [os.listdir(each) for each in folders] == [[], []]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--bytes", "4096"], "at least 1,048,576"),
        (["--bytes", str(1 << 60)], "too little free space"),
    ],
)
def test_tune_refuses_what_it_cannot_do(disk_folder, capsys, arguments, message):
    assert main(["tune", "--folder", str(disk_folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(disk_folder) == []


@pytest.mark.parametrize("group", ["tune", "bench tune", "bench io", "bench checkpoint", "bench swap", "bench soak"])
def test_options_that_cannot_be_are_refused_before_any_work(disk_folder, capsys, group):
    options = {
        "tune": ("--seconds", "--bytes"), "bench tune": ("--seconds", "--bytes", "--sweeps", "--rounds"),
        "bench io": ("--bytes", "--rounds"), "bench checkpoint": ("--bytes", "--rounds"),
        "bench swap": ("--parameters", "--rounds"), "bench soak": ("--minutes",),
    }
    for option in options[group]:
        for wrong in ("-5", "0", "nan", "1e9999", "x", "", "-1e3"):
            with pytest.raises(SystemExit) as ended:
                main([*group.split(), "--folder", str(disk_folder), f"{option}={wrong}"])
            assert ended.value.code == 2
            assert f"argument {option}: must be a positive" in capsys.readouterr().err
    assert os.listdir(disk_folder) == []


@pytest.mark.parametrize("option, command", [("--save", "tune"), ("--plot", "tune"), ("--json", "bench io")])
def test_a_file_that_could_not_be_written_at_the_end_is_refused_at_once(disk_folder, capsys, option, command):
    if option == "--plot":
        pytest.importorskip("matplotlib")
    for path, message in [("none/file", "there is no folder"), (".", "is a folder"), ("file/", "is a folder")]:
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--folder", str(disk_folder), option, str(disk_folder) + "/" + path])
        assert ended.value.code == 2
        errors = capsys.readouterr().err
        assert f"argument {option}:" in errors and message in errors
    assert os.listdir(disk_folder) == []


def written(folder, value) -> str:
    path = folder / "settings.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_from_file_reads_a_deepspeed_configuration_and_lets_arguments_win(disk_folder):
    aio = {"block_size": 65536, "queue_depth": 4, "single_submit": True, "overlap_events": True, "use_gds": False}
    path = written(disk_folder, {"train_batch_size": 8, "aio": aio})
    with lt.AioHandle.from_file(path, queue_depth=9, engine="threads") as handle:
        assert type(handle) is lt.AioHandle
        assert (handle.get_block_size(), handle.get_queue_depth()) == (65536, 9)
        assert (handle.get_single_submit(), handle.get_overlap_events()) == (True, True)
        assert handle.engine == "threads"


@pytest.mark.parametrize(
    "value, message",
    [
        ("{", "is not JSON"),
        ([1], "the file must be a JSON object"),
        ({}, 'has no "aio" object'),
        ({"aio": 3}, "aio must be a JSON object, got 3"),
        ({"aio": {"block_sise": 1}}, "aio has no setting 'block_sise'"),
        ({"aio": {"block_size": "1M"}}, "aio.block_size must be int, got '1M'"),
        ({"aio": {"queue_depth": True}}, "aio.queue_depth must be int, got True"),
        ({"aio": {"use_gds": True}}, "use_gds is true"),
        ({"aio": {}, "locked_tensor": {"engine": 1}}, "locked_tensor.engine must be str"),
        ({"aio": {"queue_depth": 0}}, "queue_depth must be in 1"),
    ],
)
def test_from_file_names_what_is_wrong(disk_folder, value, message):
    with pytest.raises(ValueError, match=message):
        lt.AioHandle.from_file(written(disk_folder, value))


def test_from_file_best_for_needs_such_settings(disk_folder):
    with pytest.raises(ValueError, match="no settings for 'read' alone"):
        lt.AioHandle.from_file(written(disk_folder, {"aio": {}}), best_for="read")
    with pytest.raises(ValueError, match="best_for must be"):
        lt.AioHandle.from_file(written(disk_folder, {"aio": {}}), best_for="reading")
    with pytest.raises(FileNotFoundError):
        lt.AioHandle.from_file(disk_folder / "missing")


def test_the_line_that_is_shown_makes_the_handle_that_is_saved(disk_folder):
    settings = AioSettings(1 << 19, 64, 2, "threads")
    path = written(disk_folder, render_settings(settings, settings, settings))
    with eval(f"lt.{settings.as_call()}") as shown, lt.AioHandle.from_file(path) as read:
        for name in ("get_block_size", "get_queue_depth", "get_intra_op_parallelism"):
            assert getattr(shown, name)() == getattr(read, name)()
        assert shown.engine == read.engine == "threads"


@pytest.mark.parametrize("number", [True, 1, -1])
def test_from_file_takes_no_descriptor(number):
    with pytest.raises(TypeError):
        lt.AioHandle.from_file(number)
    os.fstat(1)
