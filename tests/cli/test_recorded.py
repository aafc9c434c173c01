"""What a run says of its own command is enough to run it again: files that it names are in its results."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Any

import pytest

from sharpmax.policies.basic import Constant
from sharpmax.policies.registry import load_policy
from tests.cli.lines import saved


@pytest.mark.parametrize("given", ["p/warm.json", "p", "constant:1.25"])
def test_a_policy_is_found_again(
    given: str, home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Constant(1.25).save("p/warm.json")
    Constant(1.5).save("p/policy.json")
    sharpmax_command.ok("horizon", home / "model", "--certified-only", "--policy", given, "--out", "out")
    results = saved(Path("out"))
    words = shlex.split(results["command"])
    assert words[words.index("--policy") + 1] == given
    files = results["provenance"].get("files", [])
    assert [one["name"] for one in files] == ([] if given.startswith("constant") else [given])
    for one in files:
        assert hashlib.sha256(one["text"].encode()).hexdigest() == one["sha256"]
        Path("again.json").write_text(one["text"], encoding="utf-8")
        assert load_policy("again.json") == Constant(1.5 if given == "p" else 1.25)


def test_tasks_are_copied_and_data_are_not(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    tasks = ("--task", f"{home / 'letters.py'},text", "--text", home / "text.txt")
    sizes = ("--sizes", "8,16", "--prompts", 2, "--no-draw")
    sharpmax_command.ok("probe", home / "model", *tasks, *sizes, "--out", tmp_path)
    task, data = saved(tmp_path)["provenance"]["files"]
    assert (task["name"], task["text"]) == ("letters.py", (home / "letters.py").read_text(encoding="utf-8"))
    content = (home / "text.txt").read_bytes()
    assert data == {"name": "text.txt", "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
