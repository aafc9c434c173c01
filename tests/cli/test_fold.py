"""`sharpmax fold`, on a tiny model in a folder: a checkpoint that needs no sharpmax."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.integrations import transformers as hf
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.log_linear import LogLinear
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
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and policies."""
    folder = tmp_path_factory.mktemp("home")
    gentle().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    policies: dict[str, Policy] = {
        "constants": CONSTANTS,
        "levels": PerHead.of(LogLinear, level=[[-0.5, 0.0, 0.25, 0.0], [0.0, 0.5, 1.0, 0.1]]),
        "rows": PerHead.of(LogLinear, level=[[0.1] * 4] * 2, entropy=[[0.0] * 4, [0.0, 0.0, 0.5, 0.0]]),
        "lengths": PerHead.of(LogLength, reference=[[16.0] * 4] * 2),
    }
    for name, policy in policies.items():
        policy.save(folder / f"{name}.json")
    return folder


def logits_of(folder: Path) -> Tensor:
    """Of a checkpoint, by transformers alone."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    logits: Tensor = model.eval().requires_grad_(False)(input_ids=IDS).logits
    return logits


@pytest.mark.parametrize("name", ["constants", "levels"])
@pytest.mark.parametrize("there", [False, True])
def test_a_folded_checkpoint_is_the_applied_policy(
    name: str, there: bool, home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "new" / "folded"
    if there:
        out.mkdir(parents=True)
    before = {file.name: file.read_bytes() for file in (home / "model").iterdir()}
    outcome = sharpmax_command.ok("fold", home / "model", "--policy", home / f"{name}.json", "--out", out)
    assert f"wrote {out}: " in outcome.out
    model = gentle()
    plain = model(input_ids=IDS).logits
    with hf.applied(model, home / f"{name}.json"):
        sharp = model(input_ids=IDS).logits
    assert (sharp - plain).abs().max() > 0.1
    assert (logits_of(out) - sharp).abs().max() < 1e-5
    assert {file.name for file in out.iterdir()} == set(before)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert "2 layers × 4 heads" in config.pop("sharpmax_folded")
    assert config == json.loads(before["config.json"])
    tokenizer: Any = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer("a b?").input_ids == tiny.tokenizer()("a b?").input_ids
    # The model it came from is as it was.
    assert {file.name: file.read_bytes() for file in (home / "model").iterdir()} == before


def test_folding_twice_is_refused(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    sharpmax_command.ok("fold", home / "model", "--policy", "constant:2", "--out", tmp_path / "once")
    twice = ("fold", tmp_path / "once", "--policy", "constant:2", "--out", tmp_path / "twice")
    assert "already holds a policy: β = 2; fold the original" in sharpmax_command.refused(*twice)
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


def test_as_adapter(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    line = ("fold", home / "model", "--policy", home / "constants.json", "--as", "adapter", "--out", tmp_path / "a")
    assert "Load it as any PEFT adapter" in sharpmax_command.ok(*line).out
    assert {file.name for file in (tmp_path / "a").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("rows.json", "sharpmax calibrate --foldable"),
        ("lengths.json", "the nearest foldable one"),
        ("lengths.json", "β = 2.5 at length 1024"),
    ],
)
def test_the_error_says_what_to_fold_instead(
    policy: str, says: str, home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    line = ("fold", home / "model", "--policy", home / policy, "--out", tmp_path / "out")
    assert says in sharpmax_command.refused(*line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_nothing_is_written_over(kind: str, home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "out"
    kept = out / "model.safetensors" if kind == "folder" else out
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("precious")
    error = sharpmax_command.refused("fold", home / "model", "--policy", home / "constants.json", "--out", out)
    assert "--out: got" in error
    assert "a new or empty folder" in error
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [kept]
    assert kept.read_text() == "precious"


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing(
    there: bool, home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, place: Path) -> None:
        place.write_bytes(source.read_bytes()[:100])
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    if there:
        out.mkdir()
    monkeypatch.setattr(shutil, "copyfile", full)
    assert f"cannot write {str(out)!r} (No space left on device); the disk is full" in sharpmax_command.refused(
        "fold", home / "model", "--policy", "constant:2", "--out", out
    )
    assert list(tmp_path.rglob("*")) == ([out] if there else [])
