"""Every command in the committed results can be run again by somebody who has the repository alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from sharpmax.policies.base import policy_from_dict
from sharpmax.report.words import files_of, origin_of_run
from sharpmax.tasks.registry import TASKS

ROOT = Path(__file__).parents[1]
SAVED = sorted([*ROOT.glob("results/*/results.json"), *ROOT.glob("benchmarks/*.json")])
BY_NAME = {path.name for folder in ("docs", "examples", "src", "results") for path in (ROOT / folder).rglob("*")}
LANGUAGE_PAGE = (ROOT / "docs" / "results" / "language.md").read_text(encoding="utf-8")
FILES = {".json", ".jsonl", ".csv", ".parquet", ".py", ".txt", ".md", ".safetensors"}


def commands_in(value: Any) -> Iterator[str]:
    """Every command a file holds, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("command"), str):
            yield value["command"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from commands_in(one)


def read_by(command: str) -> list[str]:
    """The words of a command that name something it reads from a disk."""
    words = shlex.split(command)
    found = []
    for before, word in pairwise(words):
        if before == "--out" or word.startswith("--"):
            continue
        parts = [word] if before in ("--sizes", "--lengths") else word.split(",")
        found += [part for part in parts if part not in TASKS and ("/" in part or PurePosixPath(part).suffix in FILES)]
    if words[1:3] == ["clrs", "evaluate"]:
        models = words[3:]
        found += models[: next((at for at, word in enumerate(models) if word.startswith("--")), len(models))]
    return found


@pytest.mark.parametrize("path", SAVED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_command_reads_is_there(path: Path) -> None:
    """In the repository, by its path or under its name in another folder; or in the results file itself.

    Policies lie in `tables.setting.arms.NAME.policy`, and models of `clrs train` follow from the command in
    `tables.training.NAME.command`; newer results hold every file in `provenance.files`.
    """
    body = json.loads(path.read_text(encoding="utf-8"))
    results = [body] if isinstance(body, dict) else body
    for one in results:
        inside = files_of(one["command"], one["provenance"], one.get("tables", {}))
        text = one.get("tables", {}).get("setting", {}).get("text") or {}
        for word in read_by(one["command"]):
            # Of a text the results hold the name and a hash; the page of its results says where it comes from.
            if word == text.get("source") and text.get("fingerprint"):
                assert f"`{word}`" in LANGUAGE_PAGE, word
                continue
            assert word in inside or (ROOT / word).exists() or PurePosixPath(word).name in BY_NAME, (path, word)
            if "setting.arms" in inside.get(word, ""):
                policy_from_dict(one["tables"]["setting"]["arms"][PurePosixPath(word).stem]["policy"])
    for command in commands_in(body):
        assert "--shard" not in shlex.split(command), "a part is not the whole"


def test_the_test_sees_what_a_command_reads() -> None:
    command = "sharpmax evaluate m --policy p/a.json --policy paper --task kv,own.py --sizes 8..512 --out here/x.json"
    assert read_by(command) == ["p/a.json", "own.py"]
    assert read_by("sharpmax clrs evaluate one two --longest 9") == ["one", "two"]
    assert not set(TASKS) & set(read_by("sharpmax probe m --task kv,houses"))
    arms = {"setting": {"arms": {"a": {"policy": {"schema": 1, "kind": "constant"}}}}}
    assert list(files_of(command, {}, arms)) == ["p/a.json"]
    assert files_of(command, {}, {"setting": {"arms": {"a": {"policy": None}}}}) == {}


def test_the_page_says_where_they_are() -> None:
    body = json.loads((ROOT / "results/evaluate-smollm2/results.json").read_text(encoding="utf-8"))
    told = dict(origin_of_run(body["command"], body["provenance"], body["tables"]))["Files of the command"]
    assert "p/rows-half.json: in results.json, tables.setting.arms.rows-half.policy" in told
