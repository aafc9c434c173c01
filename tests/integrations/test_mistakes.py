"""Mistakes with models, their policies, calibration and training: one line each, and the model is unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sharpmax as sm
from sharpmax.calibration.data import profile_for
from sharpmax.integrations import trainer, vllm
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import installed
from sharpmax.models.language import load_language_model
from sharpmax.models.scoring import encode, judge
from sharpmax.monitoring.monitor import Monitor
from sharpmax.policies import PAPER, Constant, PerHead
from tests.calibration.small import calibrated, same, snapshot
from tests.experiments.evaluate import tiny
from tests.integrations.families import FAMILIES, LLAMA, transformers
from tests.integrations.test_apply import everything
from tests.integrations.test_torch_modules import ViT
from tests.monitoring.monitored import monitored, prompts
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


def edited(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def rewritten(folder: Path, part: str = "", by: str = "", dtype: torch.dtype = torch.float32) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name.replace(part, by): one.to(dtype) for name, one in weights.items()}, folder / "model.safetensors")


def new(name: str, **options: Any) -> Any:
    """A model by the name of its family or of its class in transformers."""
    kind = getattr(transformers, name, None)
    return FAMILIES[name].build(**options) if kind is None else kind(kind.config_class(**options))


def test_what_is_not_supported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and folders that cannot have a policy, whole or in their weights; none is changed, nothing is written."""
    monkeypatch.chdir(tmp_path)
    made: list[tuple[Any, str, Any]] = []
    folders: list[dict[Path, bytes]] = []
    sharp, watched, file = hf.apply(LLAMA.build(), PAPER), LLAMA.build(), Path("monitor.json")
    logits = LLAMA.logits(sharp)
    with monitored(watched) as monitor:
        saved = monitor.save(file).read_text(encoding="utf-8")

    def build(name: str, change: Callable[[Any], None] = lambda model: None, **options: Any) -> Any:
        model = new(name, **options)
        change(model)
        made.append((model, repr(everything(model)), snapshot(model)))
        return model

    def folder(change: Callable[[Path], None] = lambda folder: None, name: str = "llama", **options: Any) -> str:
        path = Path(f"model-{len(folders)}")
        new(name, **options).save_pretrained(path)
        change(path)
        folders.append({file: file.read_bytes() for file in path.iterdir()})
        return str(path)

    def load_monitor(name: str, value: Any) -> None:
        """With another value in one field of a saved monitor, as "later.mean"."""
        body = json.loads(saved)
        part, _, field = name.rpartition(".")
        (body[part] if part else body)[field] = value
        file.write_text(json.dumps(body), encoding="utf-8")
        Monitor.load(watched, file)

    names = {name: getattr(sm.policies, name) for name in sm.policies.__all__} | {
        "sm": sm, "hf": hf, "torch": torch, "nn": torch.nn, "trainer": trainer, "vllm": vllm, "sharp": sharp,
        "build": build, "folder": folder, "partial": partial, "edited": edited, "rewritten": rewritten, "ViT": ViT,
        "monitored": monitored, "prompts": prompts, "load_monitor": load_monitor, "load_model": load_language_model,
    }  # fmt: skip
    check_answers("unsupported", names)
    for model, before, parts in made:
        assert repr(everything(model)) == before
        assert same(parts, snapshot(model))
        assert hf.policy_of(model) is None
    for files in folders:
        assert {file: file.read_bytes() for file in next(iter(files)).parent.iterdir()} == files
    assert len(list(tmp_path.iterdir())) == len(folders) + 1
    assert installed(watched) is None
    assert hf.policy_of(sharp) == PAPER
    assert torch.equal(LLAMA.logits(sharp), logits)
