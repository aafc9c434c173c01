"""A comparison of one variant, in this process. tests/cli/test_clrs.py compares several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharpmax.experiments.clrs import comparison
from sharpmax.experiments.clrs.comparison import VariantComparison
from sharpmax.experiments.clrs.data import Source
from sharpmax.experiments.clrs.training import FineTuneRecipe
from sharpmax.experiments.run_folder import RunStore
from sharpmax.results import load
from tests.experiments.clrs import toy

pytest.importorskip("accelerate", reason="needs the extra hf")


def test_a_variant_measures_its_speed_trains_and_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_WARM_UP_STEPS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # so that it trains on one thread
    files = [toy.write(tmp_path / f"{split}.jsonl", toy.TRAIN, 12, split) for split in ("train", "test")]
    recipe = FineTuneRecipe(minutes=0.005, batch_tokens=256, tokens_at_once=256)
    train, test = (Source(toy.ALGORITHMS, 12, dataset=file) for file in files)
    made = VariantComparison(
        "scratch:1m", ("learn:ssmax",), (0,), recipe, train, test, tmp_path, tmp_path, "cpu", False, "sharpmax"
    )
    store, name = RunStore(tmp_path), "learn-ssmax-0"
    made.run(store, lambda *progress: None)  # a single variant runs in this process
    assert list(store.records) == [f"measure_speed {name}", "steps", f"train {name}", f"test {name}"]
    assert store.records[f"measure_speed {name}"]["steps_per_second"] > 0.0
    assert 1 <= load(tmp_path / name).tables["setting"]["steps"] <= store.records["steps"]["steps"]
    assert not (tmp_path / name / "states").exists()
    answers = store.records[f"test {name}"]["answers"]
    assert len(answers) == len(test.examples("test", tmp_path))
    assert all(0.0 < answer["entropy"] < 1.0 for answer in answers)
