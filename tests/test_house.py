"""The floor plan of CONTRIBUTING.md: who may use what."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = ("torch/", "c10/", "ATen/", "pybind11/", "Python.h", "libshm.h")
FLOORS = {
    "os": [],
    "memory": ["os"],
    "allocator": ["memory", "os"],
    "io": ["os"],
    "handle": ["io", "memory", "os"],
    "dispatch": ["memory", "os"],
    "bindings": ["os", "memory", "allocator", "io", "handle", "dispatch"],
}
WITHOUT_TORCH = ["os", "memory", "io", "handle"]
PYTHON_STAIR = """
    errors engines movable tensor limits decorators contexts memory awaiting settings handle scratch temporary files tickets boxes safetensors_format
    safetensors_reader safetensors_writer writer __init__ swap integrations cli __main__
""".split()


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include [<"](.+?)[>"]', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_includes_only_what_lies_below(floor):
    files = sorted((ROOT / "csrc" / floor).iterdir())
    assert files
    for path in files:
        for name in includes(path):
            above = name.split("/")[0] if "/" in name else ""
            if above in FLOORS and above != floor:
                assert above in FLOORS[floor], f"{path}: {name}"
            if floor in WITHOUT_TORCH:
                assert not name.startswith(TORCH), f"{path}: {name}"
            if floor == "allocator":
                assert not name.startswith(("torch/", "pybind11/", "Python.h")), f"{path}: {name}"


def test_there_is_no_other_floor():
    assert sorted(path.name for path in (ROOT / "csrc").iterdir()) == sorted(FLOORS)


def python_files() -> list[Path]:
    return sorted((ROOT / "locked_tensor").rglob("*.py"))


def step(module: str) -> int:
    return PYTHON_STAIR.index(module.split(".")[0])


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_python_imports_only_what_stands_before(path):
    own = path.relative_to(ROOT / "locked_tensor").with_suffix("").parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("locked_tensor."):
            imported = node.module.removeprefix("locked_tensor.")
            if imported != "_C":
                assert step(imported) <= step(own), f"{path}: {imported}"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_no_print_exit_or_assert(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "exit"), f"{path}:{node.lineno}"


def test_our_word_is_locked():
    for path in python_files() + sorted((ROOT / "csrc").rglob("*.*")):
        text = re.sub(r"is_pinned|torch has pinned|torch-pinned|_pinned_device_tensor|native_pins", "", path.read_text())
        assert "pinned" not in text.lower(), path
