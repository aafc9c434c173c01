"""`sharpmax compare` on small grids: both engines, a normaliser of one's own, going on, and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from sharpmax.report.compare import headline
from tests.cli.lines import is_one_error_line

METHODS = ("softmax", "ssmax", "hard")
GRID = (
    *METHODS, "--seeds", 2, "--steps", 500, "--batch", 32, "--width", 16, "--sizes", "16,64,256", "--samples", 32,
    "--no-draw",
)  # fmt: skip
TINY = (
    "--seeds",
    2,
    "--steps",
    3,
    "--batch",
    4,
    "--width",
    8,
    "--sizes",
    "16,32",
    "--samples",
    4,
    "--workers",
    1,
    "--no-draw",
)
ENGINES = {"here": ("--workers", 1), "ray": ("--engine", "ray", "--workers", 2)}
SPENT = ("seconds", "memory")

DOCS = Path(__file__).parents[2] / "docs" / "compare.md"
SQUARES = DOCS.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
"""The file that the documentation shows."""


def run_alone(*words: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: Ray changes the one that it is started in."""
    home = str(Path(sharpmax.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sharpmax.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=1200)


def tables_of(folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["tables"]
    return tables


def without_time(tables: dict[str, Any]) -> dict[str, Any]:
    kept = {name: {k: v for k, v in one.items() if k not in SPENT} for name, one in tables["training"].items()}
    return {**tables, "training": kept}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reduced grid on every engine."""
    found = {}
    for name, words in ENGINES.items():
        if name == "ray":
            pytest.importorskip("ray", reason="pip install ray")
        folder = tmp_path_factory.mktemp(name)
        done = run_alone("compare", *GRID, "--device", "cpu", "--out", folder, *words)
        assert done.returncode == 0, name
        assert all(line.startswith("comparing: ") for line in done.stderr.splitlines()), name
        found[name] = folder
    return found


def test_engines_give_the_same_numbers(runs: dict[str, Path]) -> None:
    here = without_time(tables_of(runs["here"]))
    for name in ENGINES:
        assert without_time(tables_of(runs[name])) == here, name


def test_a_league_is_saved_with_where_it_comes_from(runs: dict[str, Path]) -> None:
    saved = json.loads((runs["here"] / "results.json").read_text(encoding="utf-8"))
    tables = saved["tables"]
    assert set(tables["league"]) == set(METHODS)
    assert saved["command"].startswith("sharpmax compare softmax ssmax hard --task max")
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
    assert tables["entropy"]["softmax"]["256"]["mean"] > tables["entropy"]["softmax"]["16"]["mean"]
    assert tables["top_weight"]["hard"]["256"]["mean"] == 100.0
    assert str(runs["here"].parent) not in json.dumps(saved)


def test_the_league_is_printed_aligned(sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command("compare", "softmax", "stick-breaking", *TINY, "--out", tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    (header,) = [line for line in lines if line.strip().startswith("method") and "train s" in line]
    rows = [line for line in lines if line.startswith((" softmax", " stick-breaking"))]
    assert len(rows) >= 2
    for row in rows[:2]:
        assert len(row) == len(header)
    assert "wrote " in lines[-1]


def test_a_normaliser_of_ones_own_is_one_file(sharpmax_command: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SQUARES, encoding="utf-8")
    outcome = sharpmax_command("compare", "softmax", *TINY, "--with", file, "--out", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    tables = tables_of(tmp_path / "out")
    assert set(tables["league"]) == {"softmax", "squares"}
    assert tables["methods"]["squares"]["summary"].startswith("yes: bounded squares")
    in_processes = run_alone("compare", "squares", *TINY, "--workers", 2, "--with", file, "--out", tmp_path / "two")
    assert in_processes.returncode == 0
    assert all(line.startswith("comparing: ") for line in in_processes.stderr.splitlines())
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
    outcome = sharpmax_command("compare", "softmax", *TINY, "--with", file, "--out", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    tables = tables_of(tmp_path / "out")
    assert set(tables["league"]) == {"softmax", "slow", "zoomed"}
    losses = [tables["training"][name]["loss_per_seed"] for name in ("softmax", "slow", "zoomed")]
    assert losses[0] != losses[1] != losses[2]
    assert tables["methods"]["slow"]["recipe"] == {"learning_rate": 1e-9}


def test_seeds_may_be_trained_apart(sharpmax_command: Any, tmp_path: Path) -> None:
    for stack in (1, 2):
        outcome = sharpmax_command("compare", "ssmax", *TINY, "--stack", stack, "--out", tmp_path / str(stack))
        assert (outcome.code, outcome.err) == (0, "")
    apart, together = (tables_of(tmp_path / str(stack)) for stack in (1, 2))
    assert apart["training"]["ssmax"]["loss_per_seed"] == pytest.approx(
        together["training"]["ssmax"]["loss_per_seed"], rel=1e-4
    )
    assert len((tmp_path / "1" / "outcomes.jsonl").read_text().splitlines()) == 6
    assert len((tmp_path / "2" / "outcomes.jsonl").read_text().splitlines()) == 3


def test_going_on_does_only_what_is_missing(sharpmax_command: Any, tmp_path: Path) -> None:
    words = ("compare", "softmax", "hard", *TINY, "--out", tmp_path)
    assert sharpmax_command(*words).code == 0
    before = tables_of(tmp_path)
    again = sharpmax_command(*words)
    assert again.code == 2
    assert is_one_error_line(again.err)
    assert "--resume" in again.err
    lines = (tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "outcomes.jsonl").write_text("".join(lines[:-2]), encoding="utf-8")
    assert sharpmax_command(*words, "--resume").code == 0
    assert tables_of(tmp_path) == before, "trainings were done again, or other numbers came out"
    more = sharpmax_command("compare", "softmax", "top-k", *TINY, "--sizes", "16,64", "--out", tmp_path, "--resume")
    assert more.code == 0
    assert set(tables_of(tmp_path)["league"]) == {"softmax", "top-k"}
    # Softmax at 64, and the training and two tests of top-k.
    assert len((tmp_path / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()) == len(lines) + 4
    other = sharpmax_command("compare", "softmax", "hard", *TINY, "--samples", 5, "--out", tmp_path, "--resume")
    assert other.code == 2
    assert "samples 4 and now got 5" in other.err


@pytest.mark.parametrize("task", ["recall", "sort", "copy"])
def test_further_tasks(task: str, sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command("compare", "softmax", "--task", task, "--model", "encoder", *TINY, "--out", tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    setting = tables_of(tmp_path)["setting"]
    assert ("causal" in setting["model"]) == (task != "sort")


def test_capacity(sharpmax_command: Any, tmp_path: Path) -> None:
    small = (
        "--no-draw",
        "--seeds",
        2,
        "--steps",
        20,
        "--batch",
        8,
        "--samples",
        8,
        "--workers",
        1,
        "--sizes",
        "16,32,64,128,256",
    )
    grid = ("--width", "8,16", "--heads", "1,2", "--depth", "1,2")
    outcome = sharpmax_command("compare", "--capacity", "--model", "encoder", *grid, *small, "--out", tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
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
    assert "disperses first" in outcome.out
    for sentence in headline(tables):
        assert sentence in outcome.out


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_page_is_drawn_and_its_verdict_printed(seeds: int, sharpmax_command: Any, tmp_path: Path) -> None:
    words = [word for word in TINY if word != "--no-draw"]
    outcome = sharpmax_command("compare", "softmax", "hard", *words, "--seeds", seeds, "--out", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    for sentence in headline(tables_of(tmp_path / "out")):
        assert sentence in outcome.out
    drawn = [f"{name}.{form}" for name in ("accuracy", "sharpness", "causes") for form in ("svg", "png")]
    assert outcome.out.rstrip().endswith("report.html")
    assert sharpmax_command("report", tmp_path / "out", "--out", tmp_path / "again").code == 0
    assert {file.name for file in (tmp_path / "again").iterdir()} == {*drawn, "report.html"}
    for name in (*drawn, "report.html"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


def test_without_drawing_there_is_no_page(sharpmax_command: Any, tmp_path: Path) -> None:
    assert sharpmax_command("compare", "softmax", *TINY, "--out", tmp_path).code == 0
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("hardmax",), "METHODS: got 'hardmax'; allowed: softmax, adaptive, ssmax"),
        (("--task", "min"), "--task: got 'min'; allowed: max, recall, sort, copy"),
        (("--task", "copy"), "--model encoder"),
        (("--model", "rnn"), "--model: got 'rnn'; allowed: single, encoder"),
        (("--heads", "2"), "add --model encoder"),
        (("--model", "encoder", "--heads", "3"), "--width: got 8; allowed: a multiple of --heads, 3"),
        (("--model", "encoder", "--depth", "1,2"), "add --capacity"),
        (("--capacity",), "--model encoder"),
        (("--seeds", "0"), "--seeds: got 0"),
        (("--sizes", "big"), "--sizes: got 'big'"),
        (("--task", "recall", "--model", "encoder", "--sizes", "100000"), "--sizes: got 100000; allowed: up to 16384"),
        (("--with", "nowhere.py"), "--with: got 'nowhere.py'"),
        (("--engine", "dask"), "--engine: got 'dask'"),
        (("--address", "head:6379"), "add --engine ray"),
        (("--device", "tpu"), "--device: got 'tpu'"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], says: str, sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command("compare", *TINY, *words, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert is_one_error_line(outcome.err), outcome.err
    assert says in outcome.err


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
    outcome = sharpmax_command("compare", "softmax", *TINY, "--with", file, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert is_one_error_line(outcome.err), outcome.err
    assert says in outcome.err


def test_a_store_that_is_broken_is_one_line_and_stays(sharpmax_command: Any, tmp_path: Path) -> None:
    words = ("compare", "softmax", *TINY, "--out", tmp_path)
    assert sharpmax_command(*words).code == 0
    file = tmp_path / "outcomes.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(["not json\n", *lines]), encoding="utf-8")
    outcome = sharpmax_command(*words, "--resume")
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert file.read_text(encoding="utf-8").endswith(lines[-1])
