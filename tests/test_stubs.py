"""The stubs `_C.pyi` say what the compiled module says of itself, name by name and argument by argument."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, missing

import locked_tensor as lt
from locked_tensor import _C

PLAIN_C = {"tag", "torch_dispatch", "dispatch_in_mode"}  # not pybind11's: they do not name their arguments
STUBS = ast.parse((Path(lt.__file__).parent / "_C.pyi").read_text())


def in_brackets_removed(text: str) -> str:
    while "[" in text:
        text = re.sub(r"\[[^\[\]]*\]", "", text)
    return text


def of_module(function: object) -> list[str]:
    """The arguments as pybind11 documents them: `*` where keywords begin, `=` behind what has a default."""
    line = in_brackets_removed((function.__doc__ or "").splitlines()[0])
    inside = line[line.index("(") + 1 : line.rindex(") ->")]
    arguments = [each.strip() for each in inside.split(",") if each.strip()]
    return [each.split(":")[0] + ("=" if " = " in each else "") for each in arguments]


def of_stub(node: ast.FunctionDef) -> list[str]:
    positional = node.args.args
    with_default = len(positional) - len(node.args.defaults)
    names = [each.arg + ("=" if index >= with_default else "") for index, each in enumerate(positional)]
    if node.args.kwonlyargs:
        names.append("*")
    for each, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
        names.append(each.arg + ("=" if default is not None else ""))
    return names


def functions() -> list[tuple[str, object, ast.FunctionDef]]:
    found = []
    for node in STUBS.body:
        if isinstance(node, ast.FunctionDef):
            if node.name not in PLAIN_C:
                found.append((node.name, getattr(_C, node.name), node))
        elif isinstance(node, ast.ClassDef):
            kind = getattr(_C, node.name)
            for method in node.body:
                is_method = isinstance(method, ast.FunctionDef) and not method.decorator_list
                if is_method:
                    found.append((f"{node.name}.{method.name}", getattr(kind, method.name), method))
    return found


@pytest.mark.parametrize("name, function, node", functions(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_stub_has_the_arguments_of_the_module(name, function, node):
    theirs, ours = of_module(function), of_stub(node)
    if node.args.vararg is not None:  # `async` among them, which a stub cannot name
        assert ours == theirs[: len(ours)] and theirs[len(ours)] == "async"
        return
    unnamed = [each.startswith("arg") and each[3:].isdecimal() for each in theirs]
    assert [None if skip else each for skip, each in zip(unnamed, theirs)] == [
        None if skip else each for skip, each in zip(unnamed, ours)
    ]
    assert len(theirs) == len(ours)


@pytest.mark.parametrize("tool", ["mypy", "ruff"])
def test_the_package_passes(tool):
    arguments = {"mypy": [], "ruff": ["check", "locked_tensor", "tests", "setup.py"]}[tool]
    if subprocess.run([sys.executable, "-m", tool, "--version"], capture_output=True).returncode != 0:
        missing(tool)
    done = subprocess.run([sys.executable, "-m", tool, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
