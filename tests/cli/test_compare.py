"""`sharpmax compare` on small grids: both engines, a normaliser of one's own, going on, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpmax.report.compare import headline
from tests.cli.lines import run_alone, saved

METHODS = ("softmax", "ssmax", "hard")
COMMON = ("--seeds", 2, "--workers", 1, "--no-draw")
GRID = (*COMMON, "--steps", 400, "--batch", 32, "--width", 16, "--sizes", "16,64,256", "--samples", 32)
TINY = (*COMMON, "--steps", 3, "--batch", 4, "--width", 8, "--sizes", "16,32", "--samples", 4)
SPENT = ("seconds", "memory")

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "compare.md"
SQUARES = DOCS.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
"""The file that the documentation shows."""


def tables_of(folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = saved(folder)["tables"]
    return tables


def without_time(tables: dict[str, Any]) -> dict[str, Any]:
    kept = {name: {k: v for k, v in one.items() if k not in SPENT} for name, one in tables["training"].items()}
    return {**tables, "training": kept}


def test_engines_give_the_same_numbers(sharpmax_command: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install ray")
    line = ("compare", "softmax", "hard", *TINY, "--device", "cpu", "--out")
    sharpmax_command.ok(*line, tmp_path / "here")
    done = run_alone(*line, tmp_path / "ray", "--engine", "ray", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("comparing: ") for line in done.stderr.splitlines())
    assert without_time(tables_of(tmp_path / "ray")) == without_time(tables_of(tmp_path / "here"))


def test_a_comparison_is_printed_and_saved_with_its_command(sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command.ok("compare", *METHODS, *GRID, "--out", tmp_path)
    results = saved(tmp_path)
    tables = results["tables"]
    assert set(tables["league"]) == set(METHODS)
    assert results["command"].startswith("sharpmax compare softmax ssmax hard --task max")
    for name in METHODS:
        assert tables["accuracy"][name]["16"]["mean"] > 50.0
        assert tables["accuracy"][name]["16"]["n"] == 2
        assert len(tables["per_seed"][name]["256"]) == 2
        training = tables["training"][name]
        assert training["seconds"] > 0
        assert training["diverged"] == []
        assert training["loss"]["mean"] < 1.5
        for measure in ("ranking", "hard", "close", "top_weight", "entropy"):
            assert set(tables[measure][name]) == {"16", "64", "256"}
        assert sum(line.split()[:1] == [name] for line in outcome.out.splitlines()) >= 2  # rank, and causes
    assert tables["entropy"]["softmax"]["256"]["mean"] > tables["entropy"]["softmax"]["16"]["mean"]
    assert tables["top_weight"]["hard"]["256"]["mean"] == 100.0
    assert str(tmp_path.parent) not in json.dumps(results)
    for sentence in headline(tables):
        assert sentence in outcome.out
    assert outcome.out.splitlines()[-1] == f"wrote {tmp_path / 'results.json'}"


def test_a_normaliser_of_ones_own_is_one_file(sharpmax_command: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SQUARES, encoding="utf-8")
    sharpmax_command.ok("compare", "softmax", *TINY, "--with", file, "--out", tmp_path / "out")
    tables = tables_of(tmp_path / "out")
    assert set(tables["league"]) == {"softmax", "squares"}
    assert tables["methods"]["squares"]["summary"].startswith("yes: bounded squares")
    sharpmax_command.ok("compare", "squares", *TINY, "--workers", 2, "--with", file, "--out", tmp_path / "two")
    assert tables_of(tmp_path / "two")["per_seed"]["squares"] == tables["per_seed"]["squares"]


def test_a_file_may_list_methods_with_recipes_of_their_own(sharpmax_command: Any, tmp_path: Path) -> None:
    file = tmp_path / "ablation.py"
    text = """
from sharpmax.experiments.compare.methods import Method
METHODS = [
    Method("slow", "softmax", recipe={"learning_rate": 1e-9}),
    Method("zoomed", "softmax", data={"zoom": 0.01}, at_test={"normaliser": "adaptive"}),
]
"""
    file.write_text(text, encoding="utf-8")
    sharpmax_command.ok("compare", "softmax", *TINY, "--with", file, "--out", tmp_path / "out")
    tables = tables_of(tmp_path / "out")
    assert set(tables["league"]) == {"softmax", "slow", "zoomed"}
    losses = [tables["training"][name]["loss_per_seed"] for name in ("softmax", "slow", "zoomed")]
    assert losses[0] != losses[1] != losses[2]
    assert tables["methods"]["slow"]["recipe"] == {"learning_rate": 1e-9}


def test_going_on_does_only_what_is_missing(sharpmax_command: Any, tmp_path: Path) -> None:
    words = ("compare", "softmax", "hard", *TINY, "--out", tmp_path)
    sharpmax_command.ok(*words)
    before = tables_of(tmp_path)
    assert "--resume" in sharpmax_command.refused(*words)
    lines = (tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "outcomes.jsonl").write_text("".join(lines[:-2]), encoding="utf-8")
    sharpmax_command.ok(*words, "--resume")
    assert tables_of(tmp_path) == before, "trainings were done again, or other numbers came out"
    more = sharpmax_command("compare", "softmax", "top-k", *TINY, "--sizes", "16,64", "--out", tmp_path, "--resume")
    assert more.code == 0
    assert set(tables_of(tmp_path)["league"]) == {"softmax", "top-k"}
    # Softmax at 64, and the training and two tests of top-k.
    assert len((tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()) == len(lines) + 4
    assert "samples 4 and now got 5" in sharpmax_command.refused(
        "compare", "softmax", "hard", *TINY, "--samples", 5, "--out", tmp_path, "--resume"
    )


@pytest.mark.parametrize("task", ["recall", "sort", "copy"])
def test_further_tasks(task: str, sharpmax_command: Any, tmp_path: Path) -> None:
    sharpmax_command.ok("compare", "softmax", "--task", task, "--model", "encoder", *TINY, "--out", tmp_path)
    setting = tables_of(tmp_path)["setting"]
    assert ("causal" in setting["model"]) == (task != "sort")


def test_capacity(sharpmax_command: Any, tmp_path: Path) -> None:
    small = (*COMMON, "--steps", 5, "--batch", 8, "--samples", 8, "--sizes", "16,32,64,128,256")
    grid = ("--width", "8,16", "--heads", "1,2", "--depth", "1,2")
    outcome = sharpmax_command.ok("compare", "--capacity", "--model", "encoder", *grid, *small, "--out", tmp_path)
    tables = tables_of(tmp_path)
    cells = tables["capacity"]["softmax"]
    assert {(cell["width"], cell["heads"], cell["depth"]) for cell in cells} == {
        (w, h, d) for w in (8, 16) for h in (1, 2) for d in (1, 2)
    }
    assert set(tables["laws"]["softmax"]) == {"accuracy", "top"}
    deep = tables["layers"]["softmax"]
    assert set(deep) == {cell["model"] for cell in cells if cell["depth"] == 2}
    for found in deep.values():
        assert len(found["measured"]) == 2
    for sentence in headline(tables):
        assert sentence in outcome.out


def test_the_page_is_drawn_again_from_the_results_alone(sharpmax_command: Any, tmp_path: Path) -> None:
    words = [word for word in TINY if word != "--no-draw"]
    outcome = sharpmax_command.ok("compare", "softmax", "hard", *words, "--seeds", 1, "--out", tmp_path / "out")
    drawn = [f"{name}.{form}" for name in ("accuracy", "sharpness", "causes") for form in ("svg", "png")]
    assert outcome.out.rstrip().endswith("report.html")
    sharpmax_command.ok("report", tmp_path / "out", "--out", tmp_path / "again")
    assert {file.name for file in (tmp_path / "again").iterdir()} == {*drawn, "report.html"}
    for name in (*drawn, "report.html"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n", "a file that defines a subclass of Normaliser"),
        ("x = 1 / 0\n", "ZeroDivisionError"),
        ("METHODS = ['softmax']\n", "a list of sharpmax.experiments.compare.methods.Method"),
        (SQUARES.replace('"squares"', '"softmax"'), "softmax"),
        (SQUARES.replace('"squares"', '"step"'), "a name that no method has"),
    ],
)
def test_a_file_that_is_no_normaliser_is_one_line(text: str, says: str, sharpmax_command: Any, tmp_path: Path) -> None:
    file = tmp_path / f"mine{abs(hash(text))}.py"
    file.write_text(text, encoding="utf-8")
    assert says in sharpmax_command.refused("compare", "softmax", *TINY, "--with", file, "--out", tmp_path / "out")
