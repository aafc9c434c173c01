"""The notebooks are kept without outputs, and run from the first cell to the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sharpmax

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
Run = Callable[[str], tuple[str, int]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a notebook in an empty folder: what its cells print, and how many figures they draw."""
    monkeypatch.setenv("PYTHONPATH", str(Path(sharpmax.__file__).parents[1]))
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def outputs(name: str) -> tuple[str, int]:
        notebook = nbformat.read(EXAMPLES / name, as_version=4)
        place = {"metadata": {"path": str(tmp_path)}}
        # nbclient waits 60 s for a kernel and 4 s for what a cell has printed, which it then leaves out: too short on a
        # busy machine.
        patience = {"timeout": 3600, "startup_timeout": 3600, "iopub_timeout": 3600}
        nbclient.NotebookClient(notebook, **patience, kernel_name="python3", resources=place).execute()
        found: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        figures = sum("text/html" in output.get("data", {}) for output in found)
        assert [output.text for output in found if output.get("name") == "stderr"] == []
        return "".join(output.text for output in found if output.get("name") == "stdout"), figures

    return outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_kept_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert len(cell.source.splitlines()) <= 30
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_reproduce(run: Run) -> None:
    out, figures = run("reproduce.ipynb")
    assert figures == 2
    head, *lines = out.splitlines()
    assert head.split() == ["items", "16", "64", "256", "1,024", "4,096"]
    table = {line[:14].strip(): [float(cell) for cell in line[14:].split()] for line in lines}
    assert {"softmax", "paper", "log-length", "entropy-target", "hard"} <= set(table)
    assert table["softmax"][0] > 97
    # At 1,024 items: the order of the arms, as in the paper and in the committed run.
    at = {name: line[3] for name, line in table.items()}
    assert at["softmax"] < at["paper"] < at["entropy-target"]
    assert at["entropy-target"] == pytest.approx(at["hard"], abs=1.0)


def test_calibrate(run: Run) -> None:
    out, figures = run("calibrate.ipynb")
    assert figures == 1
    before, after = (
        float(line.split("accuracy ")[1].split("%")[0]) for line in out.splitlines() if "accuracy " in line
    )
    assert after > before
    assert "policy.json: " in out
    assert "with policy: " in out
