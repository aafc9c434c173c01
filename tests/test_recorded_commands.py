"""Every command in the committed results can be run again with the repository alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from sharpmax.policies.base import policy_from_dict
from sharpmax.results import renamed
from sharpmax.tasks.registry import TASKS
from tests.blocks import check_command

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
    """The words of a command that name files or folders it reads."""
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


def files_of(one: Any) -> dict[str, str]:
    """Where the results hold the policies and files that their command names, by those names."""
    found = {str(file["name"]): "provenance.files" for file in one["provenance"].get("files") or []}
    tables = one.get("tables") or {}
    variants, training = tables.get("setting", {}).get("variants") or {}, tables.get("training") or {}
    for word in read_by(one["command"]):
        stem = PurePosixPath(word).stem
        if word.endswith(".json") and (variants.get(stem) or {}).get("policy"):
            found.setdefault(word, f"setting.variants.{stem}.policy")
        elif "command" in (training.get(word) or {}):
            found.setdefault(word, f"training.{word}.command")
    return found


OLDER = {"--leash": "--budget", "--limit": "--prompts", "--rate": "--lr"}
"""Earlier names of options, in saved results."""

REMOVED = {"--cell-text", "--row-tokens", "--weigh", "--largest"}
"""Options, each with a value, of the training runs of results/clrs; its page names them."""


@pytest.mark.parametrize("path", SAVED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_command_can_be_run_again(path: Path) -> None:
    """Its options are known, and what it reads is in the repository, by its path or name, or in the results file.

    Policies lie in `tables.setting.variants.NAME.policy`, and models of `clrs train` follow from the command in
    `tables.training.NAME.command`; newer results hold every file in `provenance.files`.
    """
    body = renamed(json.loads(path.read_text(encoding="utf-8")))
    results = [body] if isinstance(body, dict) else body
    for one in results:
        inside = files_of(one)
        text = one.get("tables", {}).get("setting", {}).get("text") or {}
        for word in read_by(one["command"]):
            # Results hold the name and hash of a text; the page of the results says where it comes from.
            if word == text.get("source") and text.get("fingerprint"):
                assert f"`{word}`" in LANGUAGE_PAGE, word
                continue
            assert word in inside or (ROOT / word).exists() or PurePosixPath(word).name in BY_NAME, (path, word)
            if "setting.variants" in inside.get(word, ""):
                policy_from_dict(one["tables"]["setting"]["variants"][PurePosixPath(word).stem]["policy"])
    for command in set(commands_in(body)):
        words = [OLDER.get(word, word) for word in shlex.split(command)]
        for option in REMOVED & set(words):
            del words[words.index(option) : words.index(option) + 2]
        assert "--shard" not in words, "a part is not the whole"
        if words[0] == "sharpmax":
            check_command(words)
