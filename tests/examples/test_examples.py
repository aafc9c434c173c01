"""The examples run as a reader would run them, without a warning, and print what they promise."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.smollm2 import load_once

nbformat = pytest.importorskip("nbformat")

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[[str], tuple[str, int]]


def value_of(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of the expression that it ends with, if any."""
    cell = ast.parse(source)
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example in an empty folder; return what it prints and how many figures a notebook draws."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    load_once(monkeypatch)

    def outputs(name: str) -> tuple[str, int]:
        capsys.readouterr()
        values: list[Any] = []
        if name.endswith(".py"):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        else:
            names: dict[str, Any] = {}
            cells = nbformat.read(EXAMPLES / name, as_version=4).cells
            values = [value_of(cell.source, names) for cell in cells if cell.cell_type == "code"]
        figures = sum(hasattr(value, "mark_rect") and "$schema" in value.to_dict() for value in values)
        out, err = capsys.readouterr()
        assert err == ""
        return out, figures

    return outputs


def test_examples_are_listed_and_notebooks_have_no_outputs() -> None:
    listed = re.findall(r"\]\((\S+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            assert len(cell.source.splitlines()) <= 30
            assert not cell.get("outputs"), path
            assert cell.get("execution_count") is None, path


def test_reproduce_notebook(run: Run) -> None:
    out, figures = run("reproduce.ipynb")
    assert figures == 2
    head, *lines = out.splitlines()
    assert head.split() == ["items", "16", "64", "256", "1,024", "4,096"]
    table = {line[:14].strip(): [float(cell) for cell in line[14:].split()] for line in lines}
    assert {"softmax", "paper", "log-length", "entropy-target", "hard"} <= set(table)
    assert table["softmax"][0] > 97
    # At 1,024 items: the order of the variants, as in the paper and in the committed run.
    at = {name: line[3] for name, line in table.items()}
    assert at["softmax"] < at["paper"] < at["entropy-target"]
    assert at["entropy-target"] == pytest.approx(at["hard"], abs=1.0)


def test_calibrate_notebook(run: Run) -> None:
    out, figures = run("calibrate.ipynb")
    assert figures == 1
    before, after = re.findall(r"accuracy ([\d.]+)%", out)
    assert float(after) > float(before)
    assert "policy.json: " in out
    assert "with policy: " in out


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


def test_dispersion(run: Run, tmp_path: Path) -> None:
    out, _ = run("dispersion.py")
    n, possible, softmax, log_length, target = numbers(next(line for line in out.splitlines() if "65,536" in line))
    assert n == 65536
    assert softmax <= possible < 0.001
    assert min(log_length, target) > 0.9
    assert "beyond 55 items" in out
    assert (tmp_path / "dispersion.png").read_bytes().startswith(b"\x89PNG")


def test_sharpen_model(run: Run) -> None:
    out, _ = run("sharpen_model.py")
    few, many = (numbers(line) for line in out.splitlines()[-2:])
    assert (few[0], many[0]) == (8, 20)
    assert few[1] <= few[2] <= 4
    assert many[1] < many[2] <= 4


def test_probe_heads(run: Run) -> None:
    out, _ = run("probe_heads.py")
    assert out.startswith("30 layers as rows, 9 heads as columns\n")
    maps = re.findall(r"^layer [ \d]\d  (.*)$", out, re.MULTILINE)
    assert [len(line) for line in maps] == [18] * 30
    steep, of = numbers(next(line for line in out.splitlines() if "above one half" in line))
    assert of == 270
    assert 30 < steep < 135
    *_, first, last = numbers(out.splitlines()[-1])
    assert last > 3 * first


def test_own_policy(run: Run) -> None:
    out, _ = run("own_policy.py")
    assert '"kind": "example-top-weight"' in out
    lines = {line[:11].strip(): numbers(line[11:]) for line in out.splitlines()[-3:]}
    assert list(lines) == ["plain", "top weight", "paper"]
    assert all(line[0] > 90 for line in lines.values())
    # The example's own policy helps at sizes far from training.
    assert lines["top weight"][2] > lines["plain"][2] + 3
    assert lines["top weight"][3] > lines["plain"][3]


def test_train_from_scratch(run: Run, tmp_path: Path) -> None:
    out, _ = run("train_from_scratch.py")
    _, plain, clipped, *rest = out.splitlines()
    accuracy, largest_logit = numbers(plain.partition("accuracy")[2])[:2]
    accuracy_clipped, largest_clipped, clips = numbers(clipped.partition("accuracy")[2])
    assert accuracy_clipped > accuracy
    assert largest_clipped < 60 < 1000 < largest_logit
    assert clips > 0
    assert len([line for line in rest if line.startswith("layer")]) == 8
    assert (tmp_path / "training" / "results.json").is_file()
