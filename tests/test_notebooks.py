"""The notebooks: every claim in them is an assertion that runs here, every one draws, and git holds no output."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600  # for one cell


@functools.cache
def stored(path: Path) -> dict:
    return json.loads(path.read_text())


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(path: Path, monkeypatch) -> list[dict]:
    """Outputs of a notebook, run from its own folder in a fresh kernel; raises at the first cell that fails."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    folder = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=folder).execute()
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


@pytest.mark.fast
def test_there_are_notebooks():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{i:02d}_" for i in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 6


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.fast if path is NOTEBOOKS[0] else ()) for path in NOTEBOOKS],
    ids=lambda x: x.stem,
)
def test_notebook_runs_and_draws_and_warns_of_nothing(path, monkeypatch):
    outputs = execute(path, monkeypatch)
    assert outputs[0]["text"].startswith("a ring of 8 cpu devices")
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []


def test_a_false_claim_fails_and_the_kernel_runs_this_python(tmp_path, monkeypatch):
    claim = f"import sys\nassert sys.executable != {sys.executable!r}, 'this very Python'"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(claim)])
    nbformat.write(notebook, tmp_path / "false.ipynb")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="this very Python"):
        execute(tmp_path / "false.ipynb", monkeypatch)


@pytest.mark.fast
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda x: x.stem)
def test_git_holds_no_outputs_and_every_notebook_begins_with_the_same_set_up(path):
    notebook = stored(path)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(notebook))
    assert all(set(cell["metadata"]) <= {"tags"} for cell in notebook["cells"])
    assert path.read_text() == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"  # readable diffs
    first = "".join(code_cells(notebook)[0]["source"])
    assert first.startswith("# Set-up")
    assert first == "".join(code_cells(stored(NOTEBOOKS[0]))[0]["source"])


@pytest.mark.fast
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda x: x.stem)
def test_links_of_notebooks_lead_to_notebooks(path):
    text = "".join(line for cell in stored(path)["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    targets = [part.split(")")[0] for part in text.split("](")[1:]]
    assert all((path.parent / target).exists() for target in targets), targets
