"""`sharpmax demo` and `sharpmax report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PICTURES = ("dispersion.svg", "dispersion.png")
pytestmark = pytest.mark.usefixtures("small_demo")


def test_demo_writes_and_names_its_files(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sharpmax_command("demo", "--out", "shown/here", "--seed", 3)
    assert (outcome.code, outcome.err) == (0, "")
    for name in (*PICTURES, "results.json"):
        assert f"wrote shown/here/{name}\n" in outcome.out
        assert (tmp_path / "shown" / "here" / name).stat().st_size > 0
    assert outcome.out.rstrip().splitlines()[-1].startswith("What to see: ")
    assert "weight of the best item (%)" in outcome.out
    assert "entropy (nats)" in outcome.out
    assert not any(ord(letter) < 32 and letter != "\n" for letter in outcome.out)
    assert not any(line.endswith(" ") for line in outcome.out.splitlines())
    saved = json.loads((tmp_path / "shown" / "here" / "results.json").read_text(encoding="utf-8"))
    assert saved["command"] == "sharpmax demo --out shown/here --seed 3"
    assert saved["provenance"]["seed"] == 3


def test_nothing_of_the_machine_is_saved(sharpmax_command: Any, tmp_path: Path) -> None:
    assert sharpmax_command("demo", "--out", tmp_path / "run").code == 0
    for file in (tmp_path / "run").iterdir():
        content = file.read_bytes()
        assert str(tmp_path).encode() not in content
        assert str(Path(__file__).parents[2]).encode() not in content
    saved = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert saved["command"] == "sharpmax demo --out run --seed 0"


def test_same_seed_same_tables_and_pictures(sharpmax_command: Any, tmp_path: Path) -> None:
    for run in ("a", "b"):
        assert sharpmax_command("demo", "--out", tmp_path / run, "--seed", 5).code == 0
    tables = {run: json.loads((tmp_path / run / "results.json").read_text(encoding="utf-8"))["tables"] for run in "ab"}
    assert tables["a"] == tables["b"]
    for name in PICTURES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_report_draws_again_from_the_saved_results_alone(sharpmax_command: Any, tmp_path: Path) -> None:
    assert sharpmax_command("demo", "--out", tmp_path).code == 0
    before = {name: (tmp_path / name).read_bytes() for name in PICTURES}
    for name in PICTURES:
        (tmp_path / name).unlink()
    saved = (tmp_path / "results.json").read_text(encoding="utf-8")
    for argument in (tmp_path, tmp_path / "results.json"):
        outcome = sharpmax_command("report", argument)
        assert (outcome.code, outcome.err) == (0, "")
        assert {name: (tmp_path / name).read_bytes() for name in PICTURES} == before
    assert (tmp_path / "results.json").read_text(encoding="utf-8") == saved


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "newer"),
        ({"tables": {}}, "nothing to draw"),
        ({"tables": {"weight": {}, "entropy": {}, "theory": {}}}, "damaged"),
        ({"tables": {"weight": 1, "entropy": [], "theory": {"spread": "six"}}}, "damaged"),
    ],
)
def test_report_of_something_else(change: dict[str, Any], says: str, sharpmax_command: Any, tmp_path: Path) -> None:
    assert sharpmax_command("demo", "--out", tmp_path).code == 0
    file = tmp_path / "results.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    outcome = sharpmax_command("report", tmp_path)
    assert outcome.code == 2
    assert says in outcome.err
    assert outcome.err.count("\n") == 1
