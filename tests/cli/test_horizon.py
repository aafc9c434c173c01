"""`sharpmax horizon`, on tiny models in folders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sharpmax.cli import horizon
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from sharpmax.probing import certified
from sharpmax.probing import measurement as measured
from sharpmax.theory.rotary import spread_from_rotary
from tests.experiments.evaluate import tiny


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, one with small weights, and a policy."""
    folder = tmp_path_factory.mktemp("home")
    tiny.save(folder / "model")
    calm = tiny.model()
    for layer in calm.model.layers:
        layer.self_attn.q_proj.weight.mul_(0.01)
    calm.save_pretrained(folder / "calm")
    tiny.tokenizer().save_pretrained(folder / "calm")
    PerHead.of(Constant, value=[[2.0] * 4, [0.5] * 4]).save(folder / "policy.json")
    return folder


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that a test has the time to read."""
    monkeypatch.setattr(measured, "LONGEST", 500)


def tables_in(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["tables"]


def test_both_horizons_side_by_side_and_never_mixed(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "out"
    outcome = sharpmax_command("horizon", home / "model", "--out", out)
    # In a pipe there is no progress.
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    # The verdict comes first, in words.
    assert lines[0].startswith("Certified for every input: nothing that anyone could meet, for all 8 certificates are")
    assert lines[1].startswith("Measured on ")
    head = next(line for line in lines if line.lstrip().startswith("layer"))
    for column in ("certified spread", "certified horizon", "measured spread", "measured horizon"):
        assert column in head
    assert sum("vacuous" in line for line in lines[3:]) >= 2
    assert any(f"up to {measured.LONGEST:,} tokens" in line for line in lines)
    assert [file.name for file in out.iterdir()] == ["results.json"]
    text = (out / "results.json").read_text(encoding="utf-8")
    assert str(home) not in text
    assert str(tmp_path) not in text
    saved = json.loads(text)
    assert saved["command"] == "sharpmax horizon model --mass 0.5 --seed 0 --device cpu --dtype float32 --out out"
    tables = saved["tables"]
    assert tables["setting"]["family"] == "llama"
    assert (tables["setting"]["layers"], tables["setting"]["heads"], tables["setting"]["reach"]) == (
        2,
        4,
        10 * tiny.ROOM,
    )
    assert list(tables["heads"]) == [f"{i}.{j}" for i in range(2) for j in range(4)]
    for one in tables["heads"].values():
        certain, seen = one["certified"], one["measured"]
        assert seen["widest"] <= certain["spread"] == min(certain["bounds"].values())
        assert certain["log10_tokens"] == pytest.approx(math.log10(1 + math.exp(certain["spread"])))
        assert (certain["tokens"] is None) == (not certain["informative"])
    assert tables["heads"]["0.0"]["certified"]["by"] == "vocabulary"
    assert tables["heads"]["1.0"]["certified"]["by"] == "blocks"
    for number, layer in tables["layers"].items():
        spreads = [one["certified"]["spread"] for name, one in tables["heads"].items() if name.startswith(number)]
        assert layer["certified"]["smallest"] == min(spreads)
        assert sum(layer["measured"][kind] for kind in ("before", "at", "beyond")) == 4


def test_weights_alone(home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read, and nothing is said to be measured."""
    monkeypatch.setattr(measured, "measure_horizons", None)
    outcome = sharpmax_command.ok("horizon", home / "calm", "--certified-only", "--mass", "0.4", "--out", tmp_path)
    tables = tables_in(tmp_path)
    assert tables["measured"] is None
    assert all(one["measured"] is None for one in tables["heads"].values())
    assert "easured" not in outcome.out
    # Small weights: the certificate says something, and the table says what.
    told = [one["certified"] for one in tables["heads"].values() if one["certified"]["informative"]]
    assert len(told) == tables["certified"]["informative"] >= 4
    first = min(one["tokens"] for one in told)
    assert f"{len(told)} of 8 heads cannot keep 40% of their weight on one token" in outcome.out
    assert f"beyond {first:,}" in outcome.out
    assert "4 of 4" in outcome.out
    assert first == math.floor(1 + math.exp(min(one["spread"] for one in told)) * 0.6 / 0.4)


def test_a_policy_takes_part(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    for name, more in (("plain", ()), ("sharp", ("--policy", home / "policy.json"))):
        sharpmax_command.ok("horizon", home / "model", "--out", tmp_path / name, *more)
    plain, sharp = (tables_in(tmp_path / name) for name in ("plain", "sharp"))
    assert (plain["setting"]["policy"], sharp["setting"]["policy"]) == (None, "policy")
    for name, one in plain["heads"].items():
        factor = 2.0 if name.startswith("0") else 0.5
        assert sharp["heads"][name]["certified"]["spread"] == pytest.approx(factor * one["certified"]["spread"])
    # The first layer reads the same in both; the second reads what the first made of it.
    for head in range(4):
        before, after = (one["heads"][f"0.{head}"]["measured"]["spread"] for one in (plain, sharp))
        assert after == pytest.approx(2.0 * before, rel=1e-4)


def test_a_model_that_does_not_fit_its_weights_is_refused(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a certificate wrong, what is measured would tell."""
    wrong = lambda *args, **options: 1e-3 * spread_from_rotary(*args, **options)  # noqa: E731
    monkeypatch.setattr(certified, "spread_from_rotary", wrong)
    assert "computes more than its weights say" in sharpmax_command.refused(
        "horizon", home / "model", "--out", tmp_path / "out"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_horizon_is_never_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"spread": 4.0, "widest": 5.0, "tokens": 55.6, "before": 0, "at": 1, "beyond": 0}
    certified = {"smallest": 4.0, "median": 4.0, "tokens": 55, "informative": 1, "heads": 1}
    one = {"kind": "at", "tokens": 55.98, "low": 54.7, "high": 99.9}
    tables = {
        "verdict": [],
        "setting": {"model": "tiny", "mass": 0.5, "rule": "", "prompts": {}},
        "layers": {"0": {"certified": certified, "measured": measured}},
        "certified": {"median": 4.0, "median_by": {"norms": 4.0}},
        "measured": measured,
        "heads": {"0.0": {"measured": one}},
    }
    horizon._print(tables)
    said = capsys.readouterr().out
    assert "55 (54 … 99)" in said
    assert "56" not in said
    assert "100" not in said.replace("100%", "")
