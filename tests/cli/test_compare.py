"""`sharpmax compare` on small grids: the user's own normaliser, resuming, capacity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sharpmax.report.page import report_of
from tests.cli.lines import saved

METHODS = ("softmax", "ssmax", "hard")
COMMON = ("--seeds", 2, "--workers", 1, "--no-draw")
GRID = (*COMMON, "--steps", 400, "--batch", 32, "--width", 16, "--sizes", "16,64,256", "--samples", 32)
TINY = (*COMMON, "--steps", 3, "--batch", 4, "--width", 8, "--sizes", "16,32", "--samples", 4)

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "normaliser.md"
SQUARES = DOCS.read_text(encoding="utf-8").partition("`squares.py`:\n\n```python\n")[2].partition("```")[0]
"""The file that the documentation shows."""


def test_a_comparison_is_printed_and_saved_with_its_command(sharpmax_command: Any, tmp_path: Path) -> None:
    drawn = [word for word in GRID if word != "--no-draw"]
    outcome = sharpmax_command.ok("compare", *METHODS, *drawn, "--out", tmp_path / "out")
    results = saved(tmp_path / "out")
    tables = results["tables"]
    assert set(tables["leaderboard"]) == set(METHODS)
    assert results["command"].startswith("sharpmax compare softmax ssmax hard --task max")
    for name in METHODS:
        assert tables["accuracy"][name]["16"]["mean"] > 50.0
        assert len(tables["per_seed"][name]["256"]) == tables["accuracy"][name]["16"]["n"] == 2
        training = tables["training"][name]
        assert training["seconds"] > 0
        assert training["diverged"] == []
        assert sum(training["loss"]) / 2 < 1.5
        for measure in ("ranking", "hard", "close", "top_weight", "entropy"):
            assert set(tables[measure][name]) == {"16", "64", "256"}
        assert sum(line.split()[:1] == [name] for line in outcome.out.splitlines()) == 2, "in both tables"
    assert tables["entropy"]["softmax"]["256"]["mean"] > tables["entropy"]["softmax"]["16"]["mean"]
    assert tables["top_weight"]["hard"]["256"]["mean"] == 100.0
    assert str(tmp_path.parent) not in json.dumps(results)
    for sentence in report_of(tables).headline:
        assert sentence in outcome.out
    assert outcome.out.splitlines()[-1] == f"wrote {tmp_path / 'out' / 'report.html'}"


def test_files_bring_a_normaliser_or_methods_with_recipes_of_their_own(sharpmax_command: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SQUARES, encoding="utf-8")
    text = """
from sharpmax.experiments.compare.methods import Method
METHODS = [
    Method("slow", "softmax", recipe={"learning_rate": 1e-9}),
    Method("zoomed", "softmax", data={"zoom": 0.01}, at_test={"normaliser": "adaptive"}),
]
"""
    (tmp_path / "ablation.py").write_text(text, encoding="utf-8")
    files = ("--with", tmp_path / "mine.py", "--with", tmp_path / "ablation.py")
    sharpmax_command.ok("compare", "softmax", *TINY, *files, "--out", tmp_path / "out")
    tables = saved(tmp_path / "out")["tables"]
    assert set(tables["leaderboard"]) == {"softmax", "squares", "slow", "zoomed"}
    assert tables["methods"]["squares"]["summary"].startswith("yes: bounded squares")
    losses = [tables["training"][name]["loss"] for name in ("softmax", "slow", "zoomed")]
    assert losses[0] != losses[1] != losses[2]
    assert tables["methods"]["slow"]["recipe"] == {"learning_rate": 1e-9}


def test_resuming_does_only_what_is_missing(sharpmax_command: Any, tmp_path: Path) -> None:
    words = ("compare", "softmax", "hard", *TINY, "--out", tmp_path)
    sharpmax_command.ok(*words)
    before = saved(tmp_path)["tables"]
    assert "--resume" in sharpmax_command.refused(*words)
    lines = (tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "outcomes.jsonl").write_text("".join(lines[:-2]), encoding="utf-8")
    sharpmax_command.ok(*words, "--resume")
    assert saved(tmp_path)["tables"] == before, "trainings were done again, or other numbers came out"
    sharpmax_command.ok("compare", "softmax", "top-k", *TINY, "--sizes", "16,64", "--out", tmp_path, "--resume")
    assert set(saved(tmp_path)["tables"]["leaderboard"]) == {"softmax", "top-k"}
    # Softmax at 64, and the training and two tests of top-k.
    assert len((tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()) == len(lines) + 4
    assert "samples 4 and now got 5" in sharpmax_command.refused(
        "compare", "softmax", "hard", *TINY, "--samples", 5, "--out", tmp_path, "--resume"
    )


def test_capacity(sharpmax_command: Any, tmp_path: Path) -> None:
    small = (*COMMON, "--steps", 3, "--batch", 4, "--samples", 4, "--sizes", "16,32,64")
    grid = ("--task", "copy", "--width", "8,16", "--heads", "1,2", "--depth", "1,2")
    outcome = sharpmax_command.ok("compare", "--capacity", "--model", "encoder", *grid, *small, "--out", tmp_path)
    tables = saved(tmp_path)["tables"]
    cells = tables["capacity"]["softmax"]
    assert "causal" in tables["setting"]["model"]
    assert {(cell["width"], cell["heads"], cell["depth"]) for cell in cells} == {
        (w, h, d) for w in (8, 16) for h in (1, 2) for d in (1, 2)
    }
    assert set(tables["rules"]["softmax"]) == {"accuracy", "top"}
    for sentence in report_of(tables).headline:
        assert sentence in outcome.out
