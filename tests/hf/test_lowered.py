"""Rules as kernels are given them, inside of a model: the interpreter runs what a GPU would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpmax import hf
from sharpmax.attention.kernels import sharpen
from sharpmax.hf import lowered
from tests.hf.families import FAMILIES

# The compiler uses parts of torch that torch advises against.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "UserWarning")]


def gradients(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, position_ids=positions, use_cache=False).logits.logsumexp(-1).sum().backward()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("documents", [[24], [10, 14]], ids=["causal", "packed"])
def test_compiled_layers_learn_through_the_kernels(documents: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    launched: list[str] = []

    def launch(q: torch.Tensor, really: Any = sharpen._launch) -> Any:
        launched.append("launch")
        return really(q)

    monkeypatch.setattr(sharpen, "_launch", launch)
    model = hf.apply(FAMILIES["llama"].build(), "paper")
    ids = torch.randint(3, 97, (2, sum(documents)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in documents]).expand(2, -1)
    expected = gradients(model, ids, positions)
    before = len(launched)
    monkeypatch.setattr(lowered, "_on_gpu", lambda q: True)
    eager = gradients(model, ids, positions)
    once = len(launched) - before
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(backend="aot_eager", fullgraph=True)
    compiled = gradients(model, ids, positions)
    # A launch in the pass forward and one in the pass backward of each layer.
    assert len(launched) - before == 2 * once == 4 * model.config.num_hidden_layers
    for found in (eager, compiled):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()))
