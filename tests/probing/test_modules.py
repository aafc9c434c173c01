"""`probe` and `monitor` of torch modules that are no transformers models, against dense entropies in float64."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sharpmax as sm
from sharpmax.monitoring.monitor import Monitor
from tests.integrations.test_torch_modules import Attention, ViT, strong

SIDES = {4: (4, 4), 16: (8, 8), 36: (12, 12)}
"""Patches of 2 × 2 pixels, and the size of an image that has so many."""


def vision() -> Any:
    return strong(ViT()).float()


def encoder() -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return strong(nn.TransformerEncoder(layer, 2)).float()


def image(size: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, *SIDES[size], generator=torch.Generator().manual_seed(seed))


def tokens(size: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, 16, generator=torch.Generator().manual_seed(seed))


MODULES = {"vit": (vision, image), "encoder": (encoder, tokens)}
both = pytest.mark.parametrize(("build", "draw"), MODULES.values(), ids=MODULES)


def entropies(model: nn.Module, x: Tensor, beta: float = 1.0) -> Tensor:
    """Entropy `[layers, B, H, L]` of every row from queries and keys in float64, multiplied by β in their product."""
    model, found = copy.deepcopy(model).double(), []

    def of(q: Tensor, k: Tensor) -> None:
        weights = (beta * q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        found.append(torch.special.entr(weights).sum(-1))

    def qkv(module: nn.Module, args: Any, out: Tensor) -> None:
        q, k, _ = out.view(*out.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        of(q, k)

    def layer(module: Any, args: Any) -> None:
        weight, bias = module.self_attn.in_proj_weight, module.self_attn.in_proj_bias
        q, k, _ = (args[0] @ weight.T + bias).view(*args[0].shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        of(q, k)

    for part in model.modules():
        if isinstance(part, Attention):
            part.qkv.register_forward_hook(qkv)
        elif isinstance(part, nn.TransformerEncoderLayer):
            part.register_forward_pre_hook(layer)
    with torch.no_grad():
        model(x.double())
    return torch.stack(found)


@both
@pytest.mark.parametrize("rows", ["last", "all"])
def test_a_probe_measures_dense_entropies(build: Any, draw: Any, rows: str) -> None:
    """In evaluation mode without gradients, where torch would fuse a whole layer of an encoder."""
    model = build()
    inputs = {size: [draw(size, 3, seed) for seed in range(2)] for size in SIDES}
    with torch.no_grad():
        plain = model(inputs[16][0])
        found = sm.probe(model, inputs=inputs, rows=rows)
        assert torch.equal(model(inputs[16][0]), plain)
    assert (found.setting["layers"], found.setting["heads"], found.setting["family"]) == (2, 4, type(model).__name__)
    assert found.setting["prompts_of_size"] == {"own": {str(size): 6 for size in SIDES}}
    expected = {size: torch.cat([entropies(model, x) for x in ones], 1) for size, ones in inputs.items()}
    for name, about in found.heads().items():
        layer, head = map(int, name.split("."))
        means = []
        for size, values in expected.items():
            chosen = values[layer, :, head, -1:] if rows == "last" else values[layer, :, head]
            means.append(float(chosen.mean()))
            assert about["curve"][str(size)]["entropy"] == pytest.approx(means[-1], abs=1e-4)
            assert about["curve"][str(size)]["count"] == size
        assert about["slope"] == pytest.approx(np.polyfit(np.log(list(SIDES)), means, 1)[0], abs=1e-3)
        assert about["kind"] != "local"


@both
def test_a_policy_takes_part(build: Any, draw: Any) -> None:
    """Only the first layer reads the same with a policy and without."""
    model, inputs = build(), {size: draw(size, 2) for size in SIDES}
    with sm.applied(model, sm.policies.Constant(2.0), example_inputs=inputs[4]):
        found = sm.probe(model, inputs=inputs)
    assert found.setting["policy"] == "β = 2"
    expected = entropies(model, inputs[36], beta=2.0)[0, :, :, -1].mean(0)
    curves = [found.heads()[f"0.{head}"]["curve"]["36"]["entropy"] for head in range(4)]
    assert curves == pytest.approx(expected.tolist(), abs=1e-4)


class Causal(nn.Module):
    """Looks back through heads that see the latest keys best; attends twice, or with `times` otherwise."""

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        q = torch.ones(len(x), 4, x.shape[1], 1)
        for _ in range(times):
            k = place[:, None].expand(len(x), 4, -1, -1)
            x = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.5)
        return x


def test_causal_modules_may_have_local_heads() -> None:
    found = sm.probe(Causal(), inputs={size: torch.zeros(1, size, 1) for size in (16, 64, 128)})
    assert {about["kind"] for about in found.heads().values()} == {"local"}


class Windows(nn.Module):
    """Attends within windows of four, then among all: the batch of the first call is another."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, 4)).flatten(0, 1)[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(parts, parts, parts)
        y = y.reshape(len(x), 1, -1, x.shape[-1])
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)


def test_batches_that_differ_between_calls_are_one_prompt() -> None:
    inputs = {size: tokens(size, 2) for size in (8, 16)}
    found = sm.probe(Windows(), inputs=inputs, rows="all")
    assert found.setting["prompts_of_size"] == {"own": {"8": 1, "16": 1}}
    parts = inputs[16].double().reshape(8, 4, 16)
    weights = (parts @ parts.mT / 4.0).softmax(-1)
    expected = float(torch.special.entr(weights).sum(-1).mean())
    assert found.heads()["0.0"]["curve"]["16"]["entropy"] == pytest.approx(expected, abs=1e-5)
    with sm.monitor(Windows(), [tokens(8, 2, seed) for seed in range(12)], false_alarms=0.3) as monitor:
        with monitor.request() as r:
            monitor._model(tokens(8, 2))
        assert len(r.report.scores) == 1


@both
def test_a_monitor_scores_dense_entropies(build: Any, draw: Any, tmp_path: Path) -> None:
    model, reports = build(), list[Any]()
    reference = [draw(16, 10, seed) for seed in range(6)]
    monitor = sm.monitor(model, reference, rows="all", false_alarms=0.1, callback=reports.append)
    path = monitor.save(tmp_path / "monitor.json")
    fresh = draw(16, 3, seed=9)
    with monitor, torch.no_grad():
        plain = model(fresh)
        with monitor.request() as r:
            model(fresh)
            model(fresh)
    assert torch.equal(model(fresh), plain)
    baseline = monitor._known.prompt
    columns = entropies(model, fresh).mean(-1).permute(1, 0, 2).flatten(1)
    assert reports[0].scores == pytest.approx(baseline.score(columns).tolist(), abs=1e-2)
    assert r.report.scores == reports[0].scores * 2
    with Monitor.load(model, path, callback=reports.append):
        model(fresh)
    assert reports[-1].scores == pytest.approx(reports[0].scores, abs=1e-6)
    assert not any(name.startswith("_sharpmax") for name in vars(model))
    # Queries of nothing look at everything alike.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "qkv" in name or "in_proj" in name:
                weight[:16] = 0.0
    with Monitor(model, monitor._known, rows="all", callback=reports.append):  # `load` refuses changed weights
        model(fresh)
    assert reports[-1].alarm
    assert {len(one.heads) for one in reports[-1].sequences} == {8}


def test_passes_that_attend_otherwise_have_no_score() -> None:
    model, reports = Causal(), list[Any]()
    reference = [{"x": torch.zeros(2, 4 + seed, 1)} for seed in range(20)]
    with sm.monitor(model, reference, false_alarms=0.2, callback=reports.append):
        model(torch.zeros(2, 8, 1), times=3)
    assert [one.why for one in reports[0].sequences] == ["12 heads were observed, but the monitor has learned 8"] * 2
