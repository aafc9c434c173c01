"""The notebooks are kept without outputs, and run from the first cell to the last."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.smollm2 import load_once

nbformat = pytest.importorskip("nbformat")

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
Run = Callable[[str], tuple[str, int]]


def value_of(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of the expression that it ends with, if any."""
    cell = ast.parse(source)
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the cells of a notebook in an empty folder: what they print, and how many figures they draw."""
    monkeypatch.chdir(tmp_path)
    load_once(monkeypatch)

    def outputs(name: str) -> tuple[str, int]:
        capsys.readouterr()
        names: dict[str, Any] = {}
        cells = [cell for cell in nbformat.read(EXAMPLES / name, as_version=4).cells if cell.cell_type == "code"]
        values = [value_of(cell.source, names) for cell in cells]
        figures = sum(hasattr(value, "mark_rect") and "$schema" in value.to_dict() for value in values)
        out, err = capsys.readouterr()
        assert err == ""
        return out, figures

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
