"""`sharpmax horizon`, on tiny models in folders."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from sharpmax.probing import horizons
from sharpmax.theory.bounds import spread_from_weights
from tests.cli.lines import names_no_folder, saved
from tests.experiments.evaluate import tiny


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With a model of small weights, and a policy."""
    calm = tiny.model()
    for layer in calm.model.layers:
        layer.self_attn.q_proj.weight.mul_(0.01)
    calm.save_pretrained(home / "calm")
    tiny.tokenizer().save_pretrained(home / "calm")
    PerHead.of(Constant, value=[[2.0] * 4, [0.5] * 4]).save(home / "policy.json")
    return home


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that a test has the time to read."""
    monkeypatch.setattr(horizons, "LONGEST", 500)


def test_both_horizons_side_by_side_and_never_mixed(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "out"
    lines = sharpmax_command.ok("horizon", home / "model", "--device", "cpu", "--out", out).out.splitlines()
    assert lines[0].startswith("Certified for every input: 0 of 8 certificates are informative. The tightest (layer ")
    assert lines[1].startswith("Measured on ")
    head = next(line for line in lines if line.lstrip().startswith("layer"))
    for column in ("certified spread", "certified horizon", "measured spread", "measured horizon"):
        assert column in head
    assert sum("vacuous" in line for line in lines[3:]) >= 2
    assert [file.name for file in out.iterdir()] == ["results.json"]
    assert names_no_folder(out, home, tmp_path)
    command = "sharpmax horizon model --mass 0.5 --seed 0 --device cpu --dtype float32 --out out"
    assert saved(out)["command"] == command
    tables = saved(out)["tables"]
    setting = tables["setting"]
    assert [setting[name] for name in ("family", "layers", "heads", "reach")] == ["llama", 2, 4, 10 * tiny.ROOM]
    assert list(tables["heads"]) == [f"{i}.{j}" for i in range(2) for j in range(4)]
    for one in tables["heads"].values():
        certain, seen = one["certified"], one["measured"]
        assert seen["widest"] <= certain["spread"]
        assert certain["log10_tokens"] == pytest.approx(math.log10(1 + math.exp(certain["spread"])))
        assert (certain["tokens"] is None) == (not certain["informative"])
    for number, layer in tables["layers"].items():
        spreads = [one["certified"]["spread"] for name, one in tables["heads"].items() if name.startswith(number)]
        assert layer["certified"]["median"] == statistics.median(spreads)
        assert sum(layer["measured"][kind] for kind in ("before", "at", "beyond")) == 4


def test_weights_alone(home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horizons, "measure_horizons", None)
    line = ("horizon", home / "calm", "--certified-only", "--mass", "0.4")
    outcome = sharpmax_command.ok(*line, "--out", tmp_path)
    tables = saved(tmp_path)["tables"]
    assert tables["measured"] is None
    assert all(one["measured"] is None for one in tables["heads"].values())
    assert "easured" not in outcome.out
    # With small weights, certificates are informative.
    known = [one["certified"] for one in tables["heads"].values() if one["certified"]["informative"]]
    assert len(known) == tables["certified"]["informative"] >= 4
    first = min(one["tokens"] for one in known)
    assert f"{len(known)} of 8 certificates are informative" in outcome.out
    assert f"allows 40% of the weight on one token up to {first:,} tokens" in outcome.out
    assert "4 of 4" in outcome.out
    assert first == math.floor(1 + math.exp(min(one["spread"] for one in known)) * 0.6 / 0.4)
    # The β of a policy multiplies the certified spreads.
    sharpmax_command.ok(*line, "--policy", home / "policy.json", "--out", tmp_path)
    sharp = saved(tmp_path)["tables"]
    assert sharp["setting"]["policy"] == "policy"
    for name, one in tables["heads"].items():
        factor = 2.0 if name.startswith("0") else 0.5
        assert sharp["heads"][name]["certified"]["spread"] == pytest.approx(factor * one["certified"]["spread"])


def test_a_model_that_does_not_fit_its_weights_is_refused(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horizons, "spread_from_weights", lambda *of, **more: spread_from_weights(*of, **more) / 1e3)
    assert "computes more than its weights say" in sharpmax_command.refused(
        "horizon", home / "model", "--out", tmp_path / "out"
    )
    assert list(tmp_path.iterdir()) == []
