"""Mistakes with models, their policies, calibration and training: one line each, and the model is unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration.data import profile_for
from sharpmax.integrations import trainer
from sharpmax.integrations import transformers as hf
from sharpmax.models.scoring import encode, judge
from sharpmax.policies import PAPER, Constant, PerHead
from tests.calibration.small import calibrated, same, snapshot
from tests.experiments.evaluate import tiny
from tests.test_errors import check_answers


def test_mistakes_have_the_answers_of_the_golden_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    model = tiny.model()
    before = snapshot(model)

    def calibrate(**options: Any) -> Any:
        return calibrated(model, **options)

    def constants(layers: int, heads: int) -> PerHead:
        return PerHead.of(Constant, value=[[2.0] * heads] * layers)

    names = {
        "sm": sm, "hf": hf, "torch": torch, "trainer": trainer, "model": model, "words": tiny.tokenizer(),
        "prompt": tiny.LETTERS.prompts(4, 1, seed=0)[0], "calibrate": calibrate, "constants": constants, "PAPER": PAPER,
        "profile_for": profile_for, "encode": encode, "judge": judge,
    }  # fmt: skip
    check_answers("models", names)
    assert same(before, snapshot(model))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
