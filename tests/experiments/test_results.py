"""Results files: round trip, validation, provenance."""

from __future__ import annotations

import getpass
import json
import platform
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from sharpmax import provenance
from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.provenance import without_machine
from sharpmax.results import FILE_NAME, Results, collect, load

TABLES = {"accuracy": {"softmax": {"1024": {"mean": 53.8, "sem": 0.9, "n": 10}}}}
PACKAGE = Path(sharpmax.__file__).resolve().parent


def test_round_trip(tmp_path: Path) -> None:
    results = collect("sharpmax reproduce --seed 7", TABLES, seed=7)
    path = results.save(tmp_path / "new" / FILE_NAME)
    assert load(path) == load(path.parent) == results
    body = json.loads(path.read_text(encoding="utf-8"))
    assert list(body) == ["schema", "kind", "command", "provenance", "tables"]
    assert body["kind"] == results.kind == "reproduce"
    del body["kind"]  # as files of earlier versions
    path.write_text(json.dumps(body), encoding="utf-8")
    assert load(path) == results
    assert list(body["provenance"]) == ["commit", "versions", "hardware", "seed", "date"]
    assert [file.name for file in path.parent.iterdir()] == [FILE_NAME]


def test_provenance_names_no_machine_and_no_account() -> None:
    found = provenance.provenance(seed=7)
    assert found["seed"] == 7
    assert found["versions"]["sharpmax"] == sharpmax.__version__
    assert {"python", "torch", "numpy"} <= set(found["versions"])
    assert set(found["hardware"]) == {"cpu", "cores", "ram_gb", "gpu", "system"}
    assert found["hardware"]["cores"] >= 1
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    text = json.dumps(found)
    for private in (platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd()), str(PACKAGE)):
        assert len(private) < 4 or private not in text


@pytest.mark.parametrize(
    ("root", "head", "changes", "commit"),
    [
        (str(PACKAGE.parent.parent), "abc123", "", "abc123"),
        (str(PACKAGE.parent.parent), "abc123", "M rows/api.py", "abc123-dirty"),
        (str(PACKAGE.parent.parent.parent), "abc123", "", None),  # sharpmax installed inside another checkout
        (None, None, None, None),
    ],
)
def test_commit(
    root: str | None, head: str | None, changes: str | None, commit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {("rev-parse", "--show-toplevel"): root, ("rev-parse", "HEAD"): head}
    monkeypatch.setattr(provenance, "_git", lambda folder, *words: answers.get(words, changes))
    assert provenance.commit() == commit


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "JSON"),
        ('{"schema": true}', "not a results file"),
        ('{"schema": 2}', "newer sharpmax"),
        ('{"schema": 1, "command": "x", "tables": {}}', "'provenance'"),
        ('{"schema": 1, "command": "x", "provenance": {}, "tables": {}}', "'commit'"),
        ('{"schema": 1, "command": "x", "provenance": {}, "tables": []}', "an object"),
        ('{"schema": 1, "command": 3, "provenance": {}, "tables": {}}', "a text"),
    ],
)
def test_invalid_files_are_rejected(body: str, says: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(body, encoding="utf-8")
    with pytest.raises(FileFormatError, match=f"results: .*{re.escape(says)}"):
        load(tmp_path)
    with pytest.raises(FileFormatError, match="no file"):
        load(tmp_path / "elsewhere")


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_values_that_json_cannot_hold_are_rejected(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="tables"):
        Results("sharpmax x", {}, {"accuracy": value}).save(tmp_path / FILE_NAME)
    assert list(tmp_path.iterdir()) == []


def test_paths_outside_the_current_folder_are_shown_by_name() -> None:
    shown = {"results/my run": "results/my run", "/home/somebody/run": "run", "../../somebody/run": "run", "/": "DIR"}
    assert {path: without_machine(Path(path)) for path in shown} == shown
