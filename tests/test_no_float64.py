"""A device without float64, as Apple's GPUs are: everything that measures, learns and watches works there too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.experiments.evaluate import Plan, evaluate_tables, prepare
from sharpmax.experiments.reproduce import best_beta
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.projections import scale_queries
from sharpmax.models.language import weights_fingerprint
from sharpmax.monitoring.monitor import Monitor
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.probing.horizons import certify
from tests import no_float64
from tests.calibration.small import TEXT, calibrated
from tests.experiments.evaluate import tiny
from tests.integrations.families import FAMILIES
from tests.monitoring.monitored import model as small_model
from tests.monitoring.monitored import monitored, prompts

pytestmark = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")

POLICIES: dict[str, Policy] = {
    "paper": PAPER,
    "constant": Constant(2.0),
    "length": LogLength(3.0),
    "target": EntropyTarget(0.5),
    "linear": LogLinear(level=0.4, length=0.1, entropy=0.3, top=-0.2, var=0.1, reference=4.0),
    "curve": Curve((0.0, 1.0, 2.0), (1.0, 1.5, 2.0)),
    "constants": PerHead.of(Constant, value=[[1.0, 2.0, 3.0, 4.0]] * 2),
    "mixed": PerHead(((Polynomial((0.5, 1.0), (0.0, 9.0)), LogLength(2.0), Constant(2.0), EntropyTarget(0.7)),) * 2),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_acts(policy: Policy) -> None:
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), policy)
    with torch.no_grad():
        expected = family.logits(model)
    with no_float64.stand_in() as device, torch.no_grad():
        model.to(device)
        found = family.logits(model, input_ids=family.inputs(model)["input_ids"].to(device))
        assert found.device.type == device
        assert torch.allclose(found.cpu(), expected, atol=1e-4)


def test_weights_are_fingerprinted_and_folded() -> None:
    for name in ("llama", "qwen3"):
        model = FAMILIES[name].build()
        expected = weights_fingerprint(model)
        folded = weights_fingerprint(hf.fold(model, Constant(2.0)))
        with no_float64.stand_in() as device:
            model.to(device)
            assert weights_fingerprint(model) == expected
            # What `fold` does to the weights; the stand-in has no memory in which it could look for shared ones.
            for number, one in enumerate(modules_of(model.requires_grad_(False))):
                scale_queries(one, torch.full((one.heads, 1), 2.0, dtype=torch.float64), f"layer {number}")
            assert weights_fingerprint(model) == folded


def test_probing() -> None:
    options: dict[str, Any] = {"sizes": [8, 16, 32], "prompts": 2, "text": TEXT, "name": "tiny"}
    expected = sm.probe(tiny.model(), tiny.tokenizer(), **options).tables()
    with no_float64.stand_in() as device:
        found = sm.probe(tiny.model().to(device), tiny.tokenizer(), **options).tables()
    for head, about in expected["heads/kv"].items():
        assert found["heads/kv"][head]["slope"] == pytest.approx(about["slope"], abs=1e-3)


def test_certified_horizons() -> None:
    expected = certify(tiny.model(), 0.5)
    with no_float64.stand_in() as device:
        found = certify(tiny.model().to(device), 0.5)
    for one, other in zip(found.heads, expected.heads, strict=True):
        assert one.spread == pytest.approx(other.spread)


def test_a_monitor(tmp_path: Path) -> None:
    one = small_model()
    with monitored(one) as monitor:
        expected = monitor.thresholds
    with no_float64.stand_in() as device:
        one.to(device)
        with monitored(one) as monitor:
            assert monitor.thresholds == pytest.approx(expected, rel=1e-3)
            path = monitor.save(tmp_path / "monitor.json")
        with Monitor.load(one, path) as again, again.request() as request:
            one.generate(torch.tensor([prompts(1)[0]]).to(device), max_new_tokens=4, do_sample=False)
        assert request.report is not None


def test_a_calibration() -> None:
    with no_float64.stand_in() as device:
        assert calibrated(tiny.model().to(device), kinds=("rows",)).policy is not None


def test_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    plan = Plan(
        text=tmp_path / "text.txt", variants={"length": LogLength(8.0)}, tasks=(tiny.LETTERS,), sizes=(4,), prompts=2,
        lengths=(32,), windows=1, questions=0, with_cost=False,
    )  # fmt: skip
    expected = evaluate_tables(tiny.language(), plan, prepare(tiny.language(), plan), tmp_path / "here")
    with no_float64.stand_in() as device:
        there = replace(tiny.language(), model=tiny.model().to(device))
        found = evaluate_tables(there, plan, prepare(there, plan), tmp_path / "there")
    assert found["accuracy/letters"] == expected["accuracy/letters"]


def test_the_best_temperature() -> None:
    logits, wanted = torch.randn(5, 16), torch.randint(16, (5,))
    expected = best_beta(logits, wanted)
    with no_float64.stand_in() as device:
        found = best_beta(logits.to(device), wanted.to(device))
    assert torch.equal(found, expected)
