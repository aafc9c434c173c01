"""Files of trained heads: round trip, refusals in one line, and the shipped weights."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sharpmax.errors import FileFormatError
from sharpmax.models.stacked import SingleHeads
from sharpmax.models.weights import SCHEMA, Trained, save_tensors, shipped_path
from tests.test_errors import check_answers

KIND = "single-heads"
PROVENANCE = {"commit": "abc", "date": "2025-01-01T00:00:00+00:00", "command": "sharpmax reproduce – β", "seconds": 0.1}
ABOUT: dict[str, Any] = {"recipe": "paper", "steps": 3, "seeds": [4, 2], "trained": PROVENANCE}


@pytest.fixture
def trained() -> Trained:
    return Trained("paper", 3, (4, 2), SingleHeads.initial((4, 2)).state_dict(), PROVENANCE)


def same(a: Trained, b: Trained) -> bool:
    """Bit for bit, NaN and the sign of zero included."""
    bits = [{name: t.numpy().tobytes() for name, t in one.tensors.items()} for one in (a, b)]
    return bits[0] == bits[1] and replace(a, tensors={}) == replace(b, tensors={})


def test_a_file_is_read_back_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    trained.tensors["k.weight"][0, 0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    path = trained.save(str(tmp_path / "new" / "w.safetensors"))
    assert path == tmp_path / "new" / "w.safetensors"
    assert same(Trained.load(path), trained)
    assert [file.name for file in path.parent.iterdir()] == ["w.safetensors"]
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
    assert (header["sharpmax"], header["schema"], json.loads(header["about"])) == (KIND, str(SCHEMA), ABOUT)
    trained.first(1).save(path)
    assert same(Trained.load(path), trained.first(1))


def test_heads_hold_the_weights_of_the_chosen_seeds(trained: Trained) -> None:
    for which, order in ((None, [0, 1]), ([1], [1]), ([1, 0], [1, 0])):
        for name, parameter in trained.heads(which).named_parameters():
            assert torch.equal(parameter, trained.tensors[name][order])
            assert not parameter.requires_grad
    alone = trained.first(1)
    assert alone.seeds == (4,)
    assert all(torch.equal(t, trained.tensors[name][:1]) for name, t in alone.tensors.items())


def check_refused(path: Path, message: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        Trained.load(path)
    assert repr(str(path)) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_with_other_content_is_refused(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole: dict[str, dict[str, Any]] = {
        "header": {"sharpmax": KIND, "schema": "1"}, "about": ABOUT, "tensors": dict(trained.tensors),
    }  # fmt: skip

    def load(**changes: dict[str, Any]) -> None:
        header, about, tensors = (
            {name: value for name, value in (content | changes.get(part, {})).items() if value is not None}
            for part, content in whole.items()
        )
        header = {"about": json.dumps(about), **header}
        safetensors.torch.save_file(tensors, "w.safetensors", metadata=header)
        Trained.load("w.safetensors")

    check_answers("weights", {"load": load, "torch": torch, "trained": trained}, least=12)


def test_damaged_and_missing_files_are_refused(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    check_refused(path, "no file")
    check_refused(tmp_path, "no file")
    whole = trained.save(path).read_bytes()
    for content in (whole[:-100], whole[:50], bytes(range(256)), b""):
        path.write_bytes(content)
        check_refused(path, "damaged")
    trained.save(path)
    with pytest.raises(ValueError, match="JSON"):
        save_tensors(tmp_path / "nan", KIND, {}, {"loss": float("nan")})
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("recipe", ["paper", "sharp"])
def test_shipped_weights(recipe: str) -> None:
    assert shipped_path(recipe).stat().st_size < 5_000_000
    shipped = Trained.load(shipped_path(recipe))
    assert (shipped.recipe, shipped.steps, shipped.seeds) == (recipe, 100_000, tuple(range(10)))
    for name, tensor in shipped.tensors.items():
        assert tensor.isfinite().all(), name
        assert len(torch.unique(tensor.flatten(1), dim=0)) == 10, name  # seeds share no weights
    provenance = shipped.provenance
    assert {"sharpmax", "python", "torch", "numpy"} <= provenance["versions"].keys()
    assert {"cpu", "gpu", "system"} <= provenance["hardware"].keys()
    assert datetime.fromisoformat(provenance["date"]).tzinfo is not None
    assert provenance["commit"]
    assert provenance["command"]
    assert provenance["seconds"] > 0
