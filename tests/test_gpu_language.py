"""Language models on a GPU: the same policies, the same answers, the same rows seen as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sharpmax.integrations.transformers as hf
from sharpmax.calibration.calibrate import calibrate
from sharpmax.integrations.transformers.interface import observe
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.polynomial import PAPER
from sharpmax.stats.call import AttentionCall
from tests.calibration.small import TEXT, profile
from tests.experiments.evaluate import tiny
from tests.integrations.families import BIDIRECTIONAL, FAMILIES, LENGTH, Family
from tests.numerics import NEEDS_GPU

pytestmark = NEEDS_GPU

ROWS = LogLinear(level=0.4, length=0.1, entropy=0.3, top=-0.2, var=0.1, reference=4.0)
POLICIES = [None, Constant(1.7), ROWS]


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def check_logits(family: Family, policy: Policy | None, length: int, tolerance: float) -> None:
    model = hf.apply(family.build(), policy)
    inputs = family.inputs(model, length=length)
    with torch.no_grad():
        expected = family.logits(model, **inputs)
        found = family.logits(model.cuda(), **on_gpu(inputs))
    assert torch.allclose(found.cpu(), expected, atol=tolerance)


@pytest.mark.parametrize("policy", POLICIES, ids=["none", "constant", "rows"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda one: one.name)
def test_logits_equal_those_of_the_cpu(family: Family, policy: Policy | None) -> None:
    check_logits(family, policy, LENGTH, 2e-3)


@pytest.mark.parametrize("policy", [LogLength(2.0), ROWS], ids=["log-length", "rows"])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("family", BIDIRECTIONAL, ids=lambda one: one.name)
def test_few_tokens_equal_those_of_the_cpu(
    family: Family, length: int, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which rounds Whisper's convolutions to 10 bits
    check_logits(family, policy, length, 1e-3)


@pytest.mark.parametrize("policy", [PAPER, LogLength(4.0), ROWS], ids=["paper", "log-length", "rows"])
def test_gradients_equal_those_of_the_cpu(policy: Policy) -> None:
    model = hf.apply(FAMILIES["llama"].build(), policy)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    # Two documents in a row, told apart by their positions: attention gets a mask.
    positions = (torch.arange(40) % 23).expand(2, -1)
    found = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        model(ids.to(device), position_ids=positions.to(device), use_cache=False).logits.logsumexp(-1).sum().backward()
        found.append({name: weight.grad.cpu().clone() for name, weight in model.named_parameters()})
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected, atol=2e-3 * float(expected.abs().max())), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_of_compiled_layers_equal_others() -> None:
    model = hf.apply(FAMILIES["llama"].build(), PAPER).cuda()
    found = []
    for compiled in (False, True):
        for layer in model.model.layers if compiled else ():
            layer.compile(fullgraph=True)
        # Rows of several lengths, with a mask and without: shapes become symbols, and the kernels have to take them.
        for length in (24, 40, 56):
            ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0)).cuda()
            for positions in (torch.arange(length), torch.arange(length) % 23):
                model.zero_grad()
                out = model(ids, position_ids=positions.expand(2, -1).cuda(), use_cache=False)
                out.logits.logsumexp(-1).sum().backward()
                found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    for eager, compiled_too in zip(found[:6], found[6:], strict=True):
        assert torch.allclose(compiled_too, eager, atol=2e-3 * float(eager.abs().max()))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("policy", POLICIES, ids=["none", "constant", "rows"])
def test_generation_equals_that_of_the_cpu(policy: Policy | None, cache: str) -> None:
    model = hf.apply(FAMILIES["llama"].build(), policy)
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    expected = model.generate(ids, **options)
    assert torch.equal(model.cuda().generate(ids.cuda(), **options).cpu(), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_generation_equals_that_of_the_cpu() -> None:
    model = hf.apply(FAMILIES["llama"].build(), ROWS)
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    # With a static cache transformers compiles the pass of a new token by itself on a GPU.
    assert torch.equal(model.cuda().generate(ids.cuda(), cache_implementation="static", **options).cpu(), expected)


def test_rows_seen_equal_those_of_the_cpu() -> None:
    model = hf.apply(FAMILIES["llama"].build(), ROWS)
    inputs = FAMILIES["llama"].inputs(model)
    rows: list[torch.Tensor] = []

    def keep(seen: AttentionCall) -> None:
        rows.append(seen.logits(torch.tensor([3, 11], device=seen.query.device)).scaled(None).softmax(-1).cpu())

    remove = observe(model, keep)
    with torch.no_grad():
        model(**inputs)
        model.cuda()(**on_gpu(inputs))
    remove()
    for cpu, gpu in zip(rows[:2], rows[2:], strict=True):
        assert torch.allclose(cpu, gpu, atol=1e-3)


def test_a_calibration_keeps_to_its_budget() -> None:
    model = tiny.model().cuda()
    found = calibrate(model, tiny.tokenizer(), task=tiny.LETTERS, budget=0.05, profile=profile(), texts={"words": TEXT})
    assert found.chosen.policy.layers == tiny.LAYERS
    assert all(change.kl <= 1.3 * 0.05 for change in found.chosen.changes.values())
