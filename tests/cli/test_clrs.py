"""`sharpmax clrs train` and `evaluate`, on a tiny model and two artificial algorithms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.lines import is_one_error_line
from tests.experiments.clrs import stub

pytest.importorskip("accelerate", reason="needs the extra hf")

QUICK = (
    "--per-cell", 12, "--steps", 20, "--batch-tokens", 256, "--row-tokens", 128, "--save-every", 8, "--device", "cpu",
    "--lr", 0.02,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    stub.install(monkeypatch.setitem)


def words(home: Path, out: Path, *more: Any) -> list[Any]:
    return ["clrs", "train", home / "model", "--data", home / "data", "--out", out, *QUICK, *more]


def saved(out: Path) -> Any:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_train(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "paper"
    outcome = sharpmax_command(*words(home, out, "--policy", "paper"))
    assert (outcome.code, outcome.err) == (0, "")
    assert {path.name for path in out.iterdir()} == {"run.json", "results.json", "curve.jsonl", "model"}
    assert (out / "model" / "sharpmax_policy.json").is_file()
    tables = saved(out)["tables"]
    assert [step for step, _ in tables["curve"]] == list(range(1, 21))
    assert tables["curve"][-1][1] < tables["curve"][0][1]
    assert tables["speed"]["tokens_per_second"] > 0
    assert tables["speed"]["share"] is None
    assert saved(out)["command"].startswith("sharpmax clrs train model --policy paper --per-cell 12 --steps 20")
    assert "tokens/s" in outcome.out
    for file in out.glob("*.json"):
        assert str(home).encode() not in file.read_bytes(), file.name
    refused = sharpmax_command(*words(home, out, "--policy", "paper"))
    assert refused.code == 2
    assert is_one_error_line(refused.err)
    assert "--resume" in refused.err
    other = sharpmax_command(*words(home, out, "--policy", "none", "--resume"))
    assert other.code == 2
    assert "policy" in other.err
    again = sharpmax_command(*words(home, out, "--policy", "paper", "--resume"))
    assert again.code == 0
    assert "is complete" in again.out
