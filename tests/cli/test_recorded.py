"""What a run says of its own command is enough to run it again: files that it names are in its results."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sharpmax.policies.basic import Constant
from sharpmax.policies.registry import load_policy

LINES = {
    "probe": ("probe", "{model}", "--task", "letters.py", "--sizes", "4,8", "--prompts", "2"),
    "horizon": ("horizon", "{model}", "--certified-only"),
}


@pytest.mark.parametrize(
    ("name", "given"),
    [("probe", "p/warm.json"), *(("horizon", given) for given in ("p/warm.json", "p", "constant:1.25", "paper"))],
)
def test_a_policy_is_found_again(
    name: str, given: str, home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command and the files in the results alone give the same tables."""
    monkeypatch.chdir(tmp_path)
    Constant(1.25).save("p/warm.json")
    Constant(1.5).save("p/policy.json")
    task = (home / "letters.py").read_text(encoding="utf-8")
    Path("letters.py").write_text(task, encoding="utf-8")
    words = [word.format(model=home / "model") for word in LINES[name]] + ["--policy", given]
    words += [] if name == "horizon" else ["--no-draw"]
    sharpmax_command.ok(*words, "--out", "out")
    saved = json.loads(Path("out/results.json").read_text(encoding="utf-8"))
    files = {one["name"]: one for one in saved["provenance"].get("files", [])}
    said = shlex.split(saved["command"])
    assert said[said.index("--policy") + 1] == given
    asked = {given} if given.startswith("p/") or given == "p" else set()
    assert set(files) == asked | (set() if name == "horizon" else {"letters.py"})
    for one in files.values():
        assert hashlib.sha256(one["text"].encode()).hexdigest() == one["sha256"]
    if asked:
        Path("again.json").write_text(files[given]["text"], encoding="utf-8")
        assert load_policy("again.json") == Constant(1.5 if given == "p" else 1.25)


def test_data_are_told_apart_and_not_copied(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    words = ("probe", home / "model", "--task", "text", "--text", home / "text.txt", "--sizes", "8,16", "--no-draw")
    sharpmax_command.ok(*words, "--prompts", 2, "--out", tmp_path)
    (file,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["provenance"]["files"]
    content = (home / "text.txt").read_bytes()
    assert file == {"name": "text.txt", "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
