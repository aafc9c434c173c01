"""Known ways to get a comparison of policies wrong that no single function shows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import sharpmax as sm
from sharpmax.experiments.reproduce import measure
from sharpmax.models.weights import Trained, shipped_path
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant
from tests.numerics import heads


def test_variants_differ_in_nothing_but_the_policy() -> None:
    """A variant that changes nothing is the baseline to the last bit, scale and mask included."""
    q, k, v = (heads(1, 2, 9, 16) for _ in range(3))
    options = {"is_causal": True, "scale": 0.2}
    baseline = F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
    assert torch.equal(sm.attention(q, k, v, policy=Constant(1.0), **options), baseline)  # type: ignore[call-overload]
    # A variant that forgot the scale is caught by the same comparison.
    assert not torch.equal(sm.attention(q, k, v, policy=Constant(1.0), is_causal=True), baseline)


def test_variants_of_an_experiment_see_the_same_heads_and_sets() -> None:
    """A variant whose policy does nothing must repeat the baseline's numbers exactly."""
    trained = [Trained.load(shipped_path("paper")).heads([0])]
    variants: list[dict[str, Policy | None]] = [{"softmax": None, "paper": Constant(1.0)}]
    measured = measure(trained, variants, [64], 32, (0, 0))[64]
    for table in (measured.correct, measured.entropy, measured.top_weight):
        assert (table["paper"] == table["softmax"]).all()
