"""Every notebook runs from its first cell to its last, and keeps its outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.ipynb"))


def test_there_are_tutorials():
    assert TUTORIALS


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_notebook_runs_and_keeps_its_outputs(path, disk_folder):
    notebook = nbformat.read(path, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells)
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(disk_folder)}})
    client.execute()


def test_the_first_tutorial_fits_an_ordinary_lock_limit(disk_folder, run_with_memlock, monkeypatch):
    monkeypatch.chdir(disk_folder)
    notebook = nbformat.read(TUTORIALS[0], as_version=4)
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    done = run_with_memlock(8192, "-c", source)
    assert done.returncode == 0, done.stderr
